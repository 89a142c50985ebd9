"""Trainings against themselves under other overrides, lap by lap in turns, and which of those help."""

import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddptrain.api.timing import Timing, format_shares
from ddptrain.text import say
from ddptrain.tools.bench.paced_run import LapTimes, PacedRun, Unfit

_LAP_S = 1.0  # A lap is long enough for this, in the shortest steps too
_GAIN = 0.97  # Ratio of the step's time below which an override is worth taking, where there is no noise


@dataclass(frozen=True, slots=True)
class OverrideResult:
    """What was measured of an override."""

    override: str
    lap: LapTimes  # Medians of its laps
    ratios: Sequence[float]  # Of its step's time to the baseline's, lap by lap

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


class Bench:
    """Starts paced runs that differ in overrides only.

    words: of all of them. ranks: of each. steps: of the shortest lap. rounds: laps of each. folder: for all
    their files.
    """

    def __init__(self, words: Sequence[str], ranks: int, steps: int, rounds: int, folder: Path) -> None:
        self._words, self.ranks, self._steps, self._rounds = words, ranks, steps, rounds
        self.folder = folder
        self._started = 0
        self._times = 0
        """A lap is so many of the shortest."""
        self._as_it_is: list[LapTimes] = []

    @contextmanager
    def paced(self, *more: str) -> Iterator[PacedRun]:
        self._started += 1
        folder = self.folder / str(self._started)
        paced = PacedRun([*self._words, *more], self.ranks, folder, self._steps)
        try:
            yield paced
        finally:
            paced.end()

    @property
    def as_it_is(self) -> LapTimes:
        """The median lap of the training as it is, over all comparisons so far."""
        return _typical(self._as_it_is)

    def compare(self, override: str) -> OverrideResult:
        """Lap by lap in turns with the training as it is, both new: one process may be slower than its like
        for all its life. Raises Unfit."""
        with self.paced() as baseline, self.paced(*shlex.split(override)) as other:
            self._warm_up(baseline)
            self._warm_up(other)
            ours: list[LapTimes] = []
            theirs: list[LapTimes] = []
            for turn in range(self._rounds):
                # ABBA: neither always comes after the other
                for paced in (baseline, other)[:: 1 if turn % 2 == 0 else -1]:
                    (ours if paced is baseline else theirs).append(paced.lap(self._times))
        ratios = [b.ms_per_step / a.ms_per_step for a, b in zip(ours, theirs, strict=True)]
        self._as_it_is += ours if override else [*ours, *theirs]
        return OverrideResult(override, _typical(theirs), ratios)

    def _warm_up(self, paced: PacedRun) -> None:
        paced.warm_up()
        lap = paced.lap()
        if not self._times:
            self._times = max(1, round(_LAP_S / max(sum(lap.seconds.values()), 1e-3)))


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What came of all comparisons."""

    itself: OverrideResult  # The training as it is: against its like, with the lap of all its comparisons
    results: Sequence[OverrideResult]
    helping: Sequence[OverrideResult]  # Of these, what is faster than noise

    @property
    def fastest(self) -> OverrideResult | None:
        return min(self.helping, key=lambda result: result.ratio, default=None)


Candidates = Callable[[Mapping[str, Any]], Sequence[str]]
"""The overrides to try, for a training's setup."""


def compare_candidates(bench: Bench, candidates: Candidates) -> BenchResult:
    """The training as it is against itself, against each candidate, and against those that help together."""
    itself = bench.compare("")
    noise = max(itself.ratio, 1 / itself.ratio) - 1
    least, most = min(itself.ratios), max(itself.ratios)
    say(f"noise       against itself x{itself.ratio:.3f} ({least:.3f} to {most:.3f})")
    results = []
    for override in candidates(itself.lap.setup):
        began = time.monotonic()
        try:
            results.append(bench.compare(override))
        except Unfit as error:
            say(f"{override}  can't be had: {error}")
            continue
        say(f"{override}  x{results[-1].ratio:.3f}  ({time.monotonic() - began:.0f} s)")
    best = _best_set([result for result in results if _helps(result, noise)])
    if len(best) > 1:
        together = " ".join(result.override for result in best)
        try:
            results.append(bench.compare(together))
        except Unfit as error:
            say(f"{together}  can't be had together: {error}")
    # not before: every comparison has said more about it
    usual = bench.as_it_is
    split = format_shares(Timing(usual.seconds, usual.steps))
    say(f"as it is    {usual.ms_per_step:.2f} ms a step on {usual.setup['device']}: {split}")
    itself = replace(itself, lap=usual)
    return BenchResult(itself, results, [result for result in results if _helps(result, noise)])


def _typical(laps: Sequence[LapTimes]) -> LapTimes:
    """The laps' median step, split as the medians of its phases are."""
    last, steps = laps[-1], sum(lap.steps for lap in laps)
    whole = steps * statistics.median(lap.ms_per_step for lap in laps) / 1e3
    phases = {name: statistics.median(lap.seconds[name] / lap.steps for lap in laps) for name in last.seconds}
    share = whole / max(sum(phases.values()), 1e-12)
    return LapTimes(
        steps, {name: seconds * share for name, seconds in phases.items()}, last.setup, last.peak_memory
    )


def _helps(result: OverrideResult, noise: float) -> bool:
    """Faster than what a training differs from its like by, and in three of four laps."""
    return result.ratio * (1 + noise) <= _GAIN and statistics.quantiles(result.ratios, n=4)[2] < 1


def _best_set(results: Sequence[OverrideResult]) -> list[OverrideResult]:
    """Of each key the override that helps most; how the data are loaded is one key."""
    best: dict[str, OverrideResult] = {}
    for result in sorted(results, key=lambda result: result.ratio):
        key = result.override.partition("=")[0]
        best.setdefault("data" if key.startswith("data.") else key, result)
    return list(best.values())
