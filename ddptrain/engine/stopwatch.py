"""How fast it goes, by the host's clock; never waits for the device."""

import resource
import time
from collections.abc import Iterator
from typing import TypeVar

import torch

Item = TypeVar("Item")


class Stopwatch:
    """Seconds, samples and the time spent waiting for data, in total and since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self._read_at = time.perf_counter()
        self._samples = self._read_samples = 0
        self._waited = self._read_waited = 0.0
        self._paused = self._read_paused = 0.0

    def begin(self) -> None:
        """Set-up ends here: what it took is not training."""
        self.pause(time.perf_counter() - self._began)

    def next(self, batches: Iterator[Item]) -> Item:
        """The next batch; the wait for it counts as waiting for data."""
        asked = time.perf_counter()
        batch = next(batches)
        self._waited += time.perf_counter() - asked
        return batch

    def count(self, samples: int) -> None:
        self._samples += samples

    def settle(self) -> None:
        """Wait for the device, before the clock is read around something that is not training: what is
        still queued there is training time. A sync point."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def pause(self, seconds: float) -> None:
        """Time that was spent on evaluating or saving, not training."""
        self._paused += seconds

    def lap(self) -> dict[str, float]:
        """Speed since the last lap."""
        now = time.perf_counter()
        speed = self._speed(
            now - self._read_at - (self._paused - self._read_paused),
            self._samples - self._read_samples,
            self._waited - self._read_waited,
        )
        self._read_at, self._read_samples = now, self._samples
        self._read_waited, self._read_paused = self._waited, self._paused
        return speed

    def total(self) -> dict[str, float]:
        """Speed over the whole process, with its seconds and peak memory."""
        seconds = time.perf_counter() - self._began
        return {
            **self._speed(seconds - self._paused, self._samples, self._waited),
            "seconds": seconds,
            "peak_memory_mib": self._peak_memory() / 2**20,
        }

    def _speed(self, seconds: float, samples: int, waited: float) -> dict[str, float]:
        seconds = max(seconds, 1e-9)
        return {"samples_per_s": samples / seconds, "data_wait": waited / seconds}

    def _peak_memory(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
