"""Where the next point of a search comes from: Optuna's samplers, asked with all that the ledger knows."""

import math
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ddptrain.errors import UserError
from ddptrain.tools.sweep.ranges import Choice, Range
from ddptrain.tools.sweep.study import distributions_of, study_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial


def check_sampler(search: str, ranges: Sequence[Range], objectives: int) -> None:
    """Raises UserError where it can't sample these, or a package is missing."""
    if find_spec("optuna") is None or find_spec("cmaes") is None:
        raise UserError(f"sweep.search={search}: needs optuna: pip install 'ddptrain[optuna]'")
    if search != "cmaes":
        return
    for each in ranges:
        if isinstance(each, Choice):
            raise UserError(
                f"{each.name}={','.join(each.texts)}: sweep.search=cmaes searches numbers, and a list"
                " has no order. Give it a range, or say sweep.search=tpe."
            )
    if objectives > 1:
        raise UserError("sweep.search=cmaes: takes one objective. Say sweep.search=tpe for several.")


def sample(
    search: str,
    ranges: Sequence[Range],
    trials: Sequence["FrozenTrial"],
    objectives: int,
    seeds: Iterable[int],
) -> Iterator[dict[str, Any]]:
    """One point for each seed: a number or a text by each range's name. It follows from the arguments alone.

    search: as ``sweep.search``. trials: the points before, by their numbers.
    """
    study = _replay_cmaes(trials) if search == "cmaes" else study_of(trials, objectives)
    for seed in seeds:
        study.sampler = _sampler(search, len(ranges), seed)
        yield study.ask(distributions_of(ranges)).params  # stays there, as one that runs


def _sampler(search: str, ranges: int, seed: int) -> "BaseSampler":
    from optuna.samplers import CmaEsSampler, RandomSampler, TPESampler

    match search:
        case "tpe":
            # Optuna's ten are a third of a search of thirty; with these it finds better points there
            return TPESampler(seed=seed, n_startup_trials=min(10, 2 * ranges + 1))
        case "cmaes":
            return CmaEsSampler(seed=seed, warn_independent_sampling=False)
        case _:
            return RandomSampler(seed=seed)


def _replay_cmaes(trials: Sequence["FrozenTrial"]) -> "Study":
    """A study that has asked for these trials one after the other.

    Optuna's CMA-ES keeps its state in the trials that it has asked for, and a ledger has none: so it is asked
    and told again (1,000 trials take a second). It looks at the order of the values alone, so it is told
    places: trials that are known in part have one, too.
    """
    from optuna.samplers import CmaEsSampler
    from optuna.trial import TrialState

    study = study_of(())
    study.sampler = CmaEsSampler(seed=0, warn_independent_sampling=False)
    known = (trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED))
    places = {id(trial): place for place, trial in enumerate(sorted(known, key=_standing))}
    for trial in trials:
        study.enqueue_trial(trial.params)
        replayed = study.ask(trial.distributions)
        _ = replayed.relative_params  # has CMA-ES sample, which brings it to its next generation
        if id(trial) in places:
            study.tell(replayed, -places[id(trial)])
    return study


def _standing(trial: "FrozenTrial") -> tuple[int, float, float]:
    """For sorting, as TPE does: the complete ones by their scores, then those that got furthest."""
    if trial.value is not None:
        return 0, 0.0, -trial.value
    if trial.last_step is None:
        return 2, 0.0, 0.0
    value = trial.intermediate_values[trial.last_step]
    return 1, -trial.last_step, math.inf if math.isnan(value) else -value
