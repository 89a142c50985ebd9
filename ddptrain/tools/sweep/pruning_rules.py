"""Which jobs of a sweep go on: pure rules over the evaluations in its ledger, applied by one process. Jobs of
different metrics are not compared."""

import math
from collections.abc import Sequence
from statistics import median
from typing import final

from ddptrain.config.schema import Sweep
from ddptrain.tools.sweep.ledger import Evaluation, Job

_ENOUGH = 3
"""Other jobs that a median is taken of, at least."""


class PruningRule:
    """By itself it prunes nothing. Values count the higher the better; one that is no number is worse than
    all."""

    prunes = False

    def goes_on(self, job: Job, jobs: Sequence[Job], waiting: bool) -> bool:
        """Whether a job goes on after its last evaluation.

        jobs: all of the sweep. waiting: some have not been started yet.
        """
        return True

    def revivable(self, jobs: Sequence[Job], idle: bool) -> list[Job]:
        """Pruned jobs to go on with, the first one first, now that nothing waits to be started; idle: nothing
        runs either. Without pruning: all that an earlier sweep has pruned."""
        return [job for job in jobs if job.status == "pruned"]


@final
class Asha(PruningRule):
    """Asynchronous successive halving (Li et al. 2020, arXiv:1810.05934, algorithm 2).

    A job pauses at each rung, with a checkpoint, and goes on from there once it is among the best
    ``1/eta`` that have got to that rung. Unlike there, all jobs are brought to the first rung before one
    goes beyond it: they are known in advance here, and the order in which they come then doesn't matter.
    And where too few are left to promote one of ``eta``, the best goes on, so that one gets to the end.

    Optuna's SuccessiveHalvingPruner can't have a job pause and go on: there the best so far passes each rung,
    and of a grid whose jobs get better and better it trains twice as much.
    """

    prunes = True

    def __init__(self, eta: int, rungs: int) -> None:
        self._eta = eta
        self._rungs = [float(eta) ** -rung for rung in range(rungs, 0, -1)]

    def goes_on(self, job: Job, jobs: Sequence[Job], waiting: bool) -> bool:
        rung = self._rung(job.evaluations[-1].share)
        if rung is None or job.passed >= rung or job.evaluations[-1].share >= 1:
            return True
        return not waiting and job in self._best(rung, jobs)

    def revivable(self, jobs: Sequence[Job], idle: bool) -> list[Job]:
        pruned = [job for job in jobs if job.status == "pruned"]
        best = [
            job
            for rung in reversed(self._rungs)
            for job in self._best(rung, jobs)
            if job in pruned and job.passed < rung
        ]
        if best or not idle or any(job.status == "done" for job in jobs):
            return best
        return sorted(pruned, key=self._standing, reverse=True)[:1]

    def _standing(self, job: Job) -> tuple[float, float, int]:
        last = job.evaluations[-1]
        return self._rung(last.share) or 0.0, _known(last.value), -job.number

    def _best(self, rung: float, jobs: Sequence[Job]) -> list[Job]:
        """One of eta of the jobs that have got to a rung, the best."""
        chosen: set[int] = set()
        for metric in {job.metric for job in jobs}:
            alike = [job for job in jobs if job.metric == metric]
            values = {job.number: value for job in alike if (value := self._value_at(rung, job)) is not None}
            ranked = sorted(values, key=lambda number: (-_known(values[number]), number))
            chosen |= set(ranked[: len(ranked) // self._eta])
        return [job for job in jobs if job.number in chosen]

    def _value_at(self, rung: float, job: Job) -> float | None:
        """A job's first value at a rung or between it and the next one."""
        reached = [evaluation for evaluation in job.evaluations if self._rung(evaluation.share) == rung]
        return min(reached, key=lambda evaluation: evaluation.share).value if reached else None

    def _rung(self, share: float) -> float | None:
        """The last rung that lies behind."""
        behind = [rung for rung in self._rungs if rung <= share * (1 + 1e-9)]
        return behind[-1] if behind else None


@final
class Median(PruningRule):
    """The median stopping rule (Golovin et al. 2017, Google Vizier, section 3.2.2): a job ends where its best
    value so far is below the median of the others' means up to the same share of the run.

    Of all that have got so far. Optuna's MedianPruner compares with those alone that are done, and of a grid
    that runs at once prunes nothing.
    """

    prunes = True

    def __init__(self, first: float) -> None:
        """first: share of the run before which nothing is pruned."""
        self._first = first

    def goes_on(self, job: Job, jobs: Sequence[Job], waiting: bool) -> bool:
        share = job.evaluations[-1].share
        if share < self._first or share >= 1:
            return True
        others = [other for other in jobs if other is not job and other.metric == job.metric]
        means = [mean for other in others for mean in _mean_up_to(share, other.evaluations)]
        if len(means) < _ENOUGH:
            return True
        return max(_known(evaluation.value) for evaluation in job.evaluations) >= median(means)

    def revivable(self, jobs: Sequence[Job], idle: bool) -> list[Job]:
        return []


def pruning_rule(sweep: Sweep) -> PruningRule:
    match sweep.prune:
        case "asha":
            return Asha(sweep.eta, sweep.rungs)
        case "median":
            return Median(float(sweep.eta) ** -sweep.rungs)
        case _:
            return PruningRule()


def _mean_up_to(share: float, evaluations: Sequence[Evaluation]) -> list[float]:
    """One mean, or none for a job that has not got there."""
    if not any(evaluation.share >= share for evaluation in evaluations):
        return []
    values = [_known(evaluation.value) for evaluation in evaluations if evaluation.share <= share]
    return [sum(values) / len(values)] if values else []


def _known(value: float) -> float:
    return -math.inf if math.isnan(value) else value
