"""Names a rank that is slower than the others, and at what, while the run goes on.

Ranks wait for each other in each step, so their steps take equally long. What differs is what each does by
itself: waiting for its own batches and copies, its passes, its optimizer. That is compared.
"""

import statistics
from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple, final

from ddptrain.api.timing import Timing

_OWN = {
    "data": "waiting for data",
    "copy": "waiting for copies to the GPU",
    "forward": "forward and backward",
    "backward": "forward and backward",
    "optimizer": "the optimizer",
}
"""Phases in which a rank waits for no other, in words."""
_WINDOW_S = 10.0
_WINDOWS = 3
"""In so many in a row it has to be slower: a moment's noise names nobody."""
_LEAST = 0.1


class Slow(NamedTuple):
    """A rank's work on its own takes longer than the median of the others' by ``share`` of that."""

    rank: int
    share: float
    reason: str

    def __str__(self) -> str:
        return f"{self.share:.0%} slower than the median of the others: {self.reason}"


@final
class SlowRank:
    """Is shown all ranks' timings about once a second."""

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        self._window_s = window_s
        self._began = 0.0
        self._before: Mapping[int, Timing] = {}
        """At the window's beginning."""
        self._behind: deque[Slow | None] = deque(maxlen=_WINDOWS)
        """In each of the last windows."""
        self._named: int | None = None

    def look(self, now: float, timings: Mapping[int, Timing]) -> Slow | None:
        """The rank that is slower, once; again only after it was not. now: seconds, of any clock. timings: of
        all ranks, by rank; as long as one is missing, nothing is compared."""
        if self._before.keys() != timings.keys():
            self._began, self._before = now, dict(timings)
            return None
        if now - self._began < self._window_s:
            return None
        laps = {rank: timing.since(self._before[rank]) for rank, timing in timings.items()}
        self._began, self._before = now, dict(timings)
        if len(laps) < 2 or any(lap.samples <= 0 or lap.seconds["replay"] for lap in laps.values()):
            return None  # in an evaluation, or where a captured step hides who waits
        self._behind.append(_behind(laps))
        windows = [window for window in self._behind if window is not None]
        ranks = {window.rank for window in windows}
        if len(windows) < _WINDOWS or len(ranks) > 1:
            if not windows:
                self._named = None
            return None
        [rank] = ranks
        if rank == self._named:
            return None
        self._named = rank
        reason, _ = Counter(window.reason for window in windows).most_common(1)[0]
        return Slow(rank, statistics.median(window.share for window in windows), reason)


def _behind(laps: Mapping[int, Timing]) -> Slow | None:
    """The slowest rank of a window, if it is much slower."""
    work = {rank: _seconds_by_reason(lap) for rank, lap in laps.items()}
    slowest = max(work, key=lambda rank: sum(work[rank].values()))
    others = [of for rank, of in work.items() if rank != slowest]
    usual = statistics.median(sum(of.values()) for of in others)
    more = sum(work[slowest].values()) - usual
    if more < _LEAST * usual:
        return None
    reason = max(
        work[slowest],
        key=lambda reason: work[slowest][reason] - statistics.median(of[reason] for of in others),
    )
    return Slow(slowest, more / max(usual, 1e-12), reason)


def _seconds_by_reason(lap: Timing) -> dict[str, float]:
    """For a sample."""
    seconds = dict.fromkeys(_OWN.values(), 0.0)
    for phase, reason in _OWN.items():
        seconds[reason] += lap.seconds[phase] / lap.samples
    return seconds
