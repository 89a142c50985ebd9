"""The time of each phase: by the host's clock on a CPU, by events in the device's queue on a GPU. Never waits
for the device."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch

from ddptrain.api.observer import Times
from ddptrain.api.timing import PHASES, Lap, Timing
from ddptrain.data.prefetch import copy_waits
from ddptrain.distributed.device import peak_memory


class Clock(ABC):
    """Adds up seconds by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @abstractmethod
    def mark(self, phase: str) -> None:
        """The time since the last mark belongs to this phase."""

    @abstractmethod
    def drain(self) -> None:
        """Add up what is known so far."""


@final
class HostClock(Clock):
    def __init__(self) -> None:
        super().__init__()
        self._at = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._at
        self._at = now

    def drain(self) -> None:
        pass


@final
class DeviceClock(Clock):
    """Marks are events in the current stream; they are read steps later, when the device has passed them, and
    reused."""

    def __init__(self) -> None:
        super().__init__()
        self._free: list[torch.cuda.Event] = []
        self._open: deque[tuple[str, torch.cuda.Event]] = deque()
        self._last = self._recorded()
        copy_waits.clear()  # of batches that were fetched before

    def mark(self, phase: str) -> None:
        self._open.append((phase, self._recorded()))
        if phase == "evaluating":
            copy_waits.clear()  # of validation batches

    def drain(self) -> None:
        while self._open and self._open[0][1].query():
            phase, event = self._open.popleft()
            self.seconds[phase] += self._last.elapsed_time(event) / 1e3
            self._free.append(self._last)
            self._last = event
        while copy_waits and copy_waits[0][1].query():
            before, after = copy_waits.popleft()
            copying = before.elapsed_time(after) / 1e3
            self.seconds["copy"] += copying
            self.seconds["data"] -= copying

    def _recorded(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@final
class PausedClock(Clock):
    """Heeds no marks. seconds: of the clock that goes on later."""

    def __init__(self, seconds: dict[str, float]) -> None:
        super().__init__()
        self.seconds = seconds

    def mark(self, phase: str) -> None:
        pass

    def drain(self) -> None:
        pass


class Stopwatch:
    """The time of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock: Clock = HostClock()
        self._began = time.perf_counter()
        self._samples = 0
        self.flops = 0.0
        """Of a sample."""
        self._peak = 0.0
        self._laps: dict[str, Timing] = {}
        self._ended_early = False

    def begin(self, flops: float, peak: float) -> None:
        """Start measuring; set-up time does not count. flops: per sample. peak: FLOP/s of all ranks."""
        self.flops, self._peak = flops, peak
        self._ended_early = False
        self._clock = HostClock()
        if self._device.type == "cuda":
            self._clock = DeviceClock()
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self, phase: str) -> None:
        """A phase of the step ends, unless `mark_early` has ended it (a backward pass)."""
        if phase == "backward" and self._ended_early:
            self._ended_early = False
        else:
            self._clock.mark(phase)

    def mark_early(self, phase: str) -> None:
        """A phase ends inside its ``with`` block: the rest of the block belongs to the next phase."""
        self._clock.mark(phase)
        self._ended_early |= phase == "backward"

    def mark(self, phase: str) -> None:
        """The time since the last mark belongs to this phase."""
        self._clock.mark(phase)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, marks are not heeded: while a CUDA graph captures, an event would become a part of it."""
        clock, self._clock = self._clock, PausedClock(self._clock.seconds)
        try:
            yield
        finally:
            self._clock = clock

    def count(self, samples: int) -> None:
        """A step is over."""
        self._samples += samples
        self._clock.drain()

    def synchronize(self, queued: str = "optimizer") -> None:
        """Wait for the device, before something that is not training for example. queued: the phase in which
        what is still queued counts. A sync point."""
        self._clock.mark(queued)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._clock.drain()

    def lap(self, name: str) -> Lap:
        """From the end of the last lap of this name, or from `begin`."""
        self._clock.drain()
        start, self._laps[name] = self._laps.get(name, Timing()), self.total()
        return Lap(self._laps[name], start)

    def total(self) -> Timing:
        """The time since `begin` that has been added up so far. Does not ask the device, which may have
        failed."""
        return Timing(dict(self._clock.seconds), self._samples, self.flops, self._peak)

    def times(self, ranks: Sequence[Timing]) -> Times:
        """The times of this process, at its end. ranks: the last known timing of each rank."""
        seconds = time.perf_counter() - self._began
        return Times(self.total(), ranks, seconds, peak_memory(self._device) / 2**20)
