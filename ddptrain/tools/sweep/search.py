"""A search: which point of a sweep's ranges is tried next, by what its ledger says of those before."""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, final

from ddptrain.config.schema import Sweep
from ddptrain.errors import ExitCode
from ddptrain.text import counted
from ddptrain.tools.sweep.ledger import Job
from ddptrain.tools.sweep.objectives import check_one_metric, check_results, scores_of
from ddptrain.tools.sweep.ranges import Point, Range
from ddptrain.tools.sweep.samplers import check_sampler, sample
from ddptrain.tools.sweep.study import trial_of

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

_ATTEMPTS = 10
"""Samples for one point, where points come that were tried before."""


@final
class Search:
    """Keeps nothing: the same ledger makes it ask for the same point, in whichever process."""

    def __init__(self, sweep: Sweep, ranges: Sequence[Range], fixed: Iterable[str]) -> None:
        """fixed: the words that all points share.

        Raises UserError where these can't go together, or a package is missing.
        """
        self._sweep = sweep
        self._objectives: dict[str, str] = sweep.objectives or {}
        self._ranges = {each.name: each for each in ranges}
        self._words = tuple(fixed)
        self._fixed = frozenset(self._words)
        self.trials = int(min(sweep.trials or 0, math.prod(each.count for each in ranges)))
        """Most points: all that there are, or ``sweep.trials``."""
        check_sampler(sweep.search, ranges, max(1, len(self._objectives)))

    def describe(self) -> str:
        objectives = ", ".join(f"{name} {way}" for name, way in self._objectives.items())
        aims = f" for {objectives}" if objectives else ""
        return f"{counted(self.trials, 'point')} by {self._sweep.search}{aims}"

    def words(self, point: Point) -> tuple[str, ...]:
        """Those of a job."""
        return (*self._words, *(f"{name}={text}" for name, text in point.items()))

    def points(self, jobs: Sequence[Job]) -> list[tuple[Job, Point]]:
        """The jobs that are points of these ranges, whichever sweep asked for them, by their numbers."""
        return [
            (job, point)
            for job in jobs
            for words in (job.words, *job.also)
            if (point := self._point(words)) is not None
        ]

    def next_point(self, jobs: Sequence[Job]) -> Point | None:
        """What to try next; None where all points have been tried, or no new one comes.

        jobs: all of the ledger. Raises UserError where a job that is done lacks an objective, or jobs without
        objectives are judged by several metrics.
        """
        known = self.points(jobs)
        if len(known) >= self.trials:
            return None
        ranges = list(self._ranges.values())
        tried = {tuple(point.values()) for _, point in known}
        check_one_metric([job for job, _ in known], self._objectives)
        trials = [self._trial(job, point) for job, point in known]
        objectives, seeds = max(1, len(self._objectives)), self._seeds(len(known))
        for values in sample(self._sweep.search, ranges, trials, objectives, seeds):
            texts = tuple(each.write(values[each.name]) for each in ranges)
            if texts not in tried:
                return dict(zip(self._ranges, texts, strict=True))
        if any(math.isinf(each.count) for each in ranges):
            return None
        left = (
            texts for texts in itertools.product(*(each.every() for each in ranges)) if texts not in tried
        )
        return dict(zip(self._ranges, next(left), strict=True))

    def _seeds(self, number: int) -> Iterator[int]:
        """Of the samples for one point: they follow from ``sweep.seed`` and its number alone."""
        for attempt in range(_ATTEMPTS):
            text = f"{self._sweep.seed} {number} {attempt}"
            yield int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])

    def _point(self, words: Sequence[str]) -> Point | None:
        """What a job's words say of the ranges; None where it is none of their points."""
        own = [word.partition("=") for word in words if word not in self._fixed]
        texts = {name: text for name, _, text in own}
        if not self._fixed <= set(words) or len(own) != len(texts) or texts.keys() != self._ranges.keys():
            return None
        within = all(each.read(texts[name]) is not None for name, each in self._ranges.items())
        return {name: texts[name] for name in self._ranges} if within else None

    def _trial(self, job: Job, point: Point) -> "FrozenTrial":
        """What the sampler learns of a job.

        Numbers that were not finite are worse than all. Another failure says nothing of the point. One that
        has not ended, or was pruned, is known as far as it got.
        """
        from optuna.trial import TrialState

        ranges = list(self._ranges.values())
        if job.status == "done":
            check_results(job, self._objectives)
        if job.status == "done" and (scores := scores_of(job, self._objectives)):
            return trial_of(ranges, point, TrialState.COMPLETE, scores)
        if job.status == "done" or (job.status == "failed" and job.code == ExitCode.DIVERGED):
            return trial_of(ranges, point, TrialState.PRUNED)
        evaluations = () if self._objectives else tuple(job.evaluations)
        if job.status == "failed" or (job.status == "timeout" and not evaluations):
            return trial_of(ranges, point, TrialState.FAIL)
        known = evaluations or job.status == "pruned"
        state = TrialState.PRUNED if known else TrialState.RUNNING
        return trial_of(ranges, point, state, evaluations=evaluations)
