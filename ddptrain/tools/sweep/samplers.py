"""Where the next point of a search comes from: Optuna's samplers, and CMA-ES.

Each is a function of what is known of the points before and of a seed; nothing is kept between two points.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ddptrain.errors import UserError
from ddptrain.tools.sweep.ledger import Evaluation
from ddptrain.tools.sweep.ranges import Choice, Numbers, Range

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

Values = dict[str, Any]
"""A number or a text for each range, by its name."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A point that was asked for before, and what is known of it."""

    values: Values
    state: str
    """complete, pruned (known in part, or known to be bad), running, failed (nothing was learnt)."""
    scores: tuple[float, ...] = ()
    """Of one that is complete: finite, the higher the better."""
    course: Sequence[Evaluation] = ()
    """Of one that is pruned."""
    generation: int | None = None
    """Of CMA-ES, which it was drawn in."""


@dataclass(frozen=True, slots=True)
class SampledPoint:
    values: Values
    generation: int | None = None


Sampler = Callable[[Sequence[Range], Sequence[Trial], int, Iterator[int]], Iterator[SampledPoint]]
"""Draws one point after the other, one for each seed; arguments: the ranges, the trials before, how many
objectives there are, the seeds."""


def tpe(
    ranges: Sequence[Range], trials: Sequence[Trial], objectives: int, seeds: Iterator[int]
) -> Iterator[SampledPoint]:
    """Optuna's TPE (Watanabe 2023, arXiv:2304.11127): the first ones at random; what runs counts as bad, so
    that others are drawn elsewhere."""
    from optuna.samplers import TPESampler

    # Optuna's ten are a third of a search of thirty; with these it finds better points there
    first = min(10, 2 * len(ranges) + 1)
    study = study_of(ranges, trials, objectives)
    for seed in seeds:
        study.sampler = TPESampler(seed=seed, n_startup_trials=first)
        yield SampledPoint(study.ask(_distributions(ranges)).params)  # stays there, as one that runs


def uniform(
    ranges: Sequence[Range], trials: Sequence[Trial], objectives: int, seeds: Iterator[int]
) -> Iterator[SampledPoint]:
    from optuna.samplers import RandomSampler

    study = study_of(ranges, (), objectives)
    for seed in seeds:
        study.sampler = RandomSampler(seed=seed)
        yield SampledPoint(study.ask(_distributions(ranges)).params)


def cmaes(
    ranges: Sequence[Range], trials: Sequence[Trial], objectives: int, seeds: Iterator[int]
) -> Iterator[SampledPoint]:
    """CMA-ES (Hansen 2016, arXiv:1604.00772) over numbers in [0, 1], begun as in Optuna: from the middle, a
    sixth wide.

    Optuna's own keeps its state as a pickle in its study. Here it is computed again: a generation is over
    once enough of its points have ended; what is asked for while the last ones run belongs to it, too.
    """
    import numpy as np
    from cmaes import CMA

    numbers = [found for found in ranges if isinstance(found, Numbers)]
    size = len(numbers)
    bounds = np.tile([0.0, 1.0], (size, 1))
    optimizer = CMA(np.full(size, 0.5), 1 / 6, bounds=bounds, n_max_resampling=10 * size)
    known = sorted((trial for trial in trials if trial.state in ("complete", "pruned")), key=_standing)
    places = {id(trial): place for place, trial in enumerate(known)}  # CMA-ES looks at the order alone
    while True:
        own = [t for t in trials if t.generation == optimizer.generation and id(t) in places]
        if len(own) < optimizer.population_size:
            break
        told = own[: optimizer.population_size]
        optimizer.tell(
            [(np.array([n.to_unit(t.values[n.name]) for n in numbers]), places[id(t)]) for t in told]
        )
    for seed in seeds:
        optimizer.reseed_rng(seed)
        drawn = optimizer.ask()
        values = {found.name: found.from_unit(place) for found, place in zip(numbers, drawn, strict=True)}
        yield SampledPoint(values, optimizer.generation)


SAMPLERS: Mapping[str, Sampler] = {"tpe": tpe, "random": uniform, "cmaes": cmaes}
"""By ``sweep.search``."""


def check_sampler(search: str, ranges: Sequence[Range], objectives: int) -> None:
    """Raises UserError where it can't draw from these, or a package is missing."""
    if find_spec("optuna") is None or find_spec("cmaes") is None:
        raise UserError(f"sweep.search={search}: needs optuna: pip install 'ddptrain[optuna]'")
    if search != "cmaes":
        return
    for found in ranges:
        if isinstance(found, Choice):
            raise UserError(
                f"{found.name}={','.join(found.texts)}: sweep.search=cmaes searches numbers, and a list"
                " has no order. Give it a range, or say sweep.search=tpe."
            )
    if objectives > 1:
        raise UserError("sweep.search=cmaes: takes one objective. Say sweep.search=tpe for several.")


def study_of(ranges: Sequence[Range], trials: Sequence[Trial], objectives: int) -> "Study":
    """A study in memory that knows these trials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(directions=["maximize"] * objectives)
    distributions = _distributions(ranges)
    study.add_trials([_frozen(trial, distributions) for trial in trials])
    return study


def _frozen(trial: Trial, distributions: "dict[str, BaseDistribution]") -> "FrozenTrial":
    from optuna.trial import TrialState, create_trial

    states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "running": TrialState.RUNNING}
    return create_trial(
        state=states.get(trial.state, TrialState.FAIL),
        values=trial.scores or None,
        params=trial.values,
        distributions=distributions,
        # its steps are whole numbers: millionths of the run
        intermediate_values={round(at.share * 1e6): at.value for at in trial.course},
    )


def _distributions(ranges: Sequence[Range]) -> "dict[str, BaseDistribution]":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, BaseDistribution] = {}
    for each in ranges:
        if isinstance(each, Choice):
            found[each.name] = CategoricalDistribution(each.texts)
        elif each.whole:
            found[each.name] = IntDistribution(int(each.low), int(each.high), log=each.log)
        else:
            found[each.name] = FloatDistribution(each.low, each.high, log=each.log)
    return found


def _standing(trial: Trial) -> tuple[int, float, float]:
    """For sorting, as TPE does: the complete ones by their scores, then those that got furthest."""
    if trial.state == "complete":
        return 0, 0.0, -trial.scores[0]
    if not trial.course:
        return 2, 0.0, 0.0
    last = trial.course[-1]
    return 1, -last.share, math.inf if math.isnan(last.value) else -last.value
