"""Where a step's time goes: by the host's clock on a CPU, by events in the device's own queue on a GPU.
Never waits for the device."""

import resource
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import TypeVar, final

import torch
from torch import Tensor
from torch.autograd import Variable

from ddptrain.observe.timing import PHASES, Timing

Item = TypeVar("Item")


class Clock(ABC):
    """Adds up seconds by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @abstractmethod
    def mark(self, phase: str) -> None:
        """What has passed since the last mark belongs to this phase."""

    @abstractmethod
    def mark_fetched(self, waited: float) -> None:
        """A batch is there, for which the host has waited so many seconds."""

    @abstractmethod
    def drain(self) -> None:
        """Add up what is known by now."""


@final
class HostClock(Clock):
    def __init__(self) -> None:
        super().__init__()
        self._at = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._at
        self._at = now

    def mark_fetched(self, waited: float) -> None:
        self.mark("data")

    def drain(self) -> None:
        pass


@final
class DeviceClock(Clock):
    """Marks are events in the current stream; they are read steps later, when the device has long passed
    them, and used again."""

    def __init__(self) -> None:
        super().__init__()
        self._free: list[torch.cuda.Event] = []
        self._open: deque[tuple[str, torch.cuda.Event, float]] = deque()
        self._last = self._recorded()

    def mark(self, phase: str) -> None:
        self._open.append((phase, self._recorded(), 0.0))

    def mark_fetched(self, waited: float) -> None:
        self._open.append(("data", self._recorded(), waited))

    def drain(self) -> None:
        while self._open and self._open[0][1].query():
            phase, event, waited = self._open.popleft()
            passed = self._last.elapsed_time(event) / 1e3
            if phase == "data":
                # longer than the host has waited, the device waits for the copying stream
                self.seconds["copy"] += max(0.0, passed - waited)
                passed = min(passed, waited)
            self.seconds[phase] += passed
            self._free.append(self._last)
            self._last = event

    def _recorded(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Stopwatch:
    """One rank's. overlaps: gradients are summed over ranks during the backward pass."""

    def __init__(self, device: torch.device, overlaps: bool) -> None:
        self._device = device
        self._overlaps = overlaps
        self._clock: Clock = HostClock()
        self._began = time.perf_counter()
        self._samples = 0
        self._flops = self._peak = 0.0
        self._laps: dict[str, Timing] = {}

    def begin(self, flops: float, peak: float) -> None:
        """Set-up ends here: what it took is not training. For `Timing`: FLOPs per sample, and FLOP/s of all
        ranks."""
        self._flops, self._peak = flops, peak
        self._clock = DeviceClock() if self._device.type == "cuda" else HostClock()

    def next(self, batches: Iterator[Item]) -> Item:
        """The next batch."""
        self._clock.mark("optimizer")
        self._clock.drain()
        asked = time.perf_counter()
        batch = next(batches)
        self._clock.mark_fetched(time.perf_counter() - asked)
        return batch

    def mark(self, phase: str) -> None:
        """What has passed since the last mark belongs to this phase."""
        self._clock.mark(phase)

    def forward_is_done(self, loss: Tensor) -> None:
        """Also: mark the end of this rank's own backward pass when it comes, for DDP then still waits for
        the others' gradients. Autograd runs callbacks in the order in which they were queued: this one is
        queued at the start of the pass, DDP's at its end."""
        self._clock.mark("forward")
        if self._overlaps:
            loss.register_hook(self._queue_mark)

    def backward_is_done(self) -> None:
        if not self._overlaps:
            self._clock.mark("backward")

    def count(self, samples: int) -> None:
        self._samples += samples

    def settle(self) -> None:
        """Wait for the device, before the clock is read around something that is not training: what is
        still queued there is training time. A sync point."""
        self._clock.mark("optimizer")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def lap(self, name: str) -> Timing:
        """The time since the last lap of this name."""
        now = self.total()
        before, self._laps[name] = self._laps.get(name), now
        return now if before is None else now.since(before)

    def total(self) -> Timing:
        """The time since `begin`."""
        self._clock.drain()
        return Timing(dict(self._clock.seconds), self._samples, self._flops, self._peak)

    def process(self) -> dict[str, float]:
        """Seconds since this was made, and peak memory."""
        return {
            "seconds": time.perf_counter() - self._began,
            "peak_memory_mib": self._peak_memory() / 2**20,
        }

    def _queue_mark(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._mark_backward)

    def _mark_backward(self) -> None:
        self._clock.mark("backward")

    def _peak_memory(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
