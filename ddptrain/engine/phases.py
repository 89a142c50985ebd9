"""``with phase("forward"):`` tells the watchdog, the stopwatch and a profiler's trace at once."""

from types import TracebackType
from typing import final

from torch.profiler import record_function

from ddptrain.engine.stopwatch import Stopwatch
from ddptrain.torch_private import is_profiled
from ddptrain.watchdog.watchdog import Watchdog

_SAID = {"data": "waiting for a batch"}
"""To the watchdog, where it is not the phase's own name."""


@final
class Phases:
    """What a step is made of: data, forward, backward, all_reduce, optimizer. They may nest: the time between
    the end of one and the end of the next belongs to that one."""

    def __init__(self, watchdog: Watchdog, stopwatch: Stopwatch) -> None:
        self.watchdog = watchdog
        self.stopwatch = stopwatch
        self._made: dict[str, _Phase] = {}

    def __call__(self, name: str, step: int | None = None) -> "_Phase":
        """step: tells the watchdog that this phase of it begins; None: it hears nothing."""
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = _Phase(name, self.stopwatch)
        if step is not None:
            self.watchdog.mark(_SAID.get(name, name), step)
        return made


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
