"""``with phase("forward"):`` informs watchdog, stopwatch and profiler."""

from types import TracebackType
from typing import final

from torch.profiler import record_function

from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.engine.stopwatch import Stopwatch
from ddptrain.torch_private import is_profiled

_SAID = {"data": "waiting for a batch"}
"""Names for the watchdog that differ from the phase's."""


@final
class Phases:
    """The phases of a step: data, forward, backward, all_reduce, optimizer; captured: data, replay. They may
    nest: a phase gets the time between the end of the previous one and its own end."""

    def __init__(self, watchdog: Watchdog, stopwatch: Stopwatch) -> None:
        self.watchdog = watchdog
        self.stopwatch = stopwatch
        self._phases: dict[str, _Phase] = {}

    def __call__(self, name: str, step: int | None = None) -> "_Phase":
        """step: the watchdog is told that this phase of the step begins; None: it is not told."""
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase(name, self.stopwatch)
        if step is not None:
            self.watchdog.mark(_SAID.get(name, name), step)
        return phase


@final
class _Phase:
    def __init__(self, name: str, stopwatch: Stopwatch) -> None:
        self._name = name
        self._stopwatch = stopwatch
        self._range: record_function | None = None

    def __enter__(self) -> None:
        if is_profiled():
            self._range = record_function(self._name)
            self._range.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopwatch.end(self._name)
        if self._range is not None:
            self._range.__exit__(kind, error, trace)
            self._range = None
