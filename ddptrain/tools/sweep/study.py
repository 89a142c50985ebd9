"""The points of a sweep as Optuna knows them: trials of a study in memory, made when one is needed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddptrain.tools.sweep.ledger import Evaluation
from ddptrain.tools.sweep.ranges import Choice, Point, Range

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, TrialState


def study_of(trials: Sequence["FrozenTrial"], objectives: int = 1) -> "Study":
    """A study that knows these trials. objectives: how many there are, each the better the higher."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(directions=["maximize"] * objectives)
    study.add_trials(trials)
    return study


def trial_of(
    ranges: Sequence[Range],
    point: Point,
    state: "TrialState",
    scores: Sequence[float] = (),
    evaluations: Sequence[Evaluation] = (),
) -> "FrozenTrial":
    """A point of these ranges that has been tried. scores: of a complete one, the higher the better."""
    from optuna.trial import create_trial

    return create_trial(
        state=state,
        values=scores or None,
        params={each.name: each.read(point[each.name]) for each in ranges},
        distributions=distributions_of(ranges),
        # its steps are whole numbers: millionths of the run
        intermediate_values={round(each.share * 1e6): each.value for each in evaluations},
    )


def distributions_of(ranges: Sequence[Range]) -> "dict[str, BaseDistribution]":
    return {each.name: _distribution(each) for each in ranges}


def _distribution(values: Range) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(values, Choice):
        return CategoricalDistribution(values.texts)
    if values.whole:
        return IntDistribution(int(values.low), int(values.high), log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)
