"""Names a rank that is slower than the others, and at what, while the run goes on.

Ranks wait for each other in each step, so their steps take equally long. What differs is what each does by
itself: waiting for its own batches and copies, its passes, its optimizer. That is compared.
"""

import statistics
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, final

from ddptrain.api.timing import Timing
from ddptrain.observe.advice import PHASE_NAMES

_OWN = {
    "data": PHASE_NAMES["data"],
    "copy": PHASE_NAMES["copy"],
    "forward": "forward and backward",
    "backward": "forward and backward",
    "optimizer": PHASE_NAMES["optimizer"],
}
"""Phases in which a rank waits for no other, in words."""
_WINDOW_S = 10.0
_WINDOWS = 3
"""In so many in a row it has to be slower: a moment's noise names nobody."""
_SLOW, _USUAL = 0.1, 0.05
"""Shares above which a rank is slower, and below which it is no longer."""


class Slow(NamedTuple):
    """A rank's own work takes longer than the median of the others' by ``share`` of that."""

    rank: int
    share: float
    reason: str

    def __str__(self) -> str:
        return f"{self.share:.0%} slower than the median of the others: {self.reason}"


@final
class SlowRanks:
    """Is shown all ranks' timings about once a second. All have about as many samples of each step."""

    def __init__(self) -> None:
        self._began = 0.0
        self._before: Mapping[int, Timing] = {}
        """At the window's beginning."""
        self._last: dict[int, deque[Slow]] = {}
        """Of each rank, its windows in a row up to now in which it was slower."""
        self._named: set[int] = set()

    def look(self, now: float, timings: Mapping[int, Timing]) -> list[Slow]:
        """The ranks that are slower, each once; again only after it was not. now: seconds, of any clock.
        timings: by rank."""
        if self._before.keys() != timings.keys():
            self._began, self._before = now, dict(timings)
            return []
        if now - self._began < _WINDOW_S:
            return []
        laps = {rank: timing.since(self._before[rank]) for rank, timing in timings.items()}
        self._began, self._before = now, dict(timings)
        if len(laps) < 2 or any(lap.samples <= 0 or lap.seconds["replay"] for lap in laps.values()):
            return []  # in an evaluation, or where a captured step hides who waits
        work = {rank: _seconds_by_reason(lap) for rank, lap in laps.items()}
        judged = [self._judge(_beside(rank, work)) for rank in work]
        return [slow for slow in judged if slow is not None]

    def _judge(self, slow: Slow) -> Slow | None:
        """A rank's window is over; what is to be said of it."""
        windows = self._last.setdefault(slow.rank, deque(maxlen=_WINDOWS))
        if slow.share < _USUAL:
            self._named.discard(slow.rank)
        if slow.share < _SLOW:
            windows.clear()
            return None
        windows.append(slow)
        if len(windows) < _WINDOWS or slow.rank in self._named:
            return None
        self._named.add(slow.rank)
        reason = statistics.mode(window.reason for window in windows)
        return Slow(slow.rank, statistics.median(window.share for window in windows), reason)


def _beside(rank: int, work: Mapping[int, Mapping[str, float]]) -> Slow:
    """A rank beside the others, in a window. work: seconds by reason."""
    own, others = work[rank], [of for other, of in work.items() if other != rank]
    usual = statistics.median(sum(of.values()) for of in others)
    more = {reason: own[reason] - statistics.median(of[reason] for of in others) for reason in own}
    share = sum(own.values()) / max(usual, 1e-12) - 1
    return Slow(rank, share, max(more, key=lambda reason: more[reason]))


def _seconds_by_reason(lap: Timing) -> dict[str, float]:
    """For a sample."""
    seconds = dict.fromkeys(_OWN.values(), 0.0)
    for phase, reason in _OWN.items():
        seconds[reason] += lap.seconds[phase] / lap.samples
    return seconds
