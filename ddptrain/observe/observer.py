"""Observers: told what happened, on rank 0, with plain numbers. They change nothing and never talk
to other ranks; one that raises is reported once and dropped."""

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ddptrain.observe.timing import Lap, Timing
from ddptrain.protocols import Figure

log = logging.getLogger(__name__)

_PAUSE_S = 0.1
"""Between two looks at what is to be told: no step pays for waking a thread."""
_MOST_WAITING = 1000
"""Log steps not told yet; beyond them, the training waits."""


@dataclass(frozen=True, slots=True)
class Start:
    """Before the first step of this process."""

    step: int
    """Steps done in earlier processes: 0 unless resumed."""
    steps: int
    evaluates: bool
    """The evaluation at ``step`` is still to come, or comes again."""
    preview: Tensor | None
    """Augmented training samples as pictures, uint8 (n, 3, H, W)."""


class Log(NamedTuple):
    """At a log step. ``values`` are the same whenever the run is repeated; ``timing`` is not."""

    step: int
    epoch: float
    samples: int
    values: Mapping[str, float]
    lap: Lap

    @property
    def timing(self) -> Timing:
        """Since the last log step."""
        return self.lap.timing


@dataclass(frozen=True, slots=True)
class Evaluated:
    step: int
    epoch: float
    samples: int
    metrics: Mapping[str, float]
    figures: Mapping[str, Figure]
    seconds: float
    is_best: bool
    timing: Timing
    """Since the last evaluation, this one included."""


@dataclass(frozen=True, slots=True)
class Saved:
    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Result:
    """What a run has come to."""

    outcome: str
    """done, or what ended it."""
    metrics: Mapping[str, float]
    """Of the last evaluation."""
    best: Mapping[str, float]
    """The best value of the metric that counts, and its step."""
    higher_is_better: bool
    """In that metric."""


@dataclass(frozen=True, slots=True)
class Times:
    """Of this process."""

    timing: Timing
    """Of rank 0."""
    ranks: Sequence[Timing]
    """Of all ranks, up to the last evaluation; empty where there was none."""
    seconds: float
    """With the set-up."""
    peak_memory_mib: float


@dataclass(frozen=True, slots=True)
class End:
    """After the last step of this process, also where an error ended it."""

    step: int
    steps: int
    result: Result
    times: Times


class Observer(ABC):
    """Implement the events; leave those of no interest empty. The training waits for all but ``log``."""

    at_once = False
    """Whether it waits for ``log`` too."""

    @abstractmethod
    def start(self, event: Start) -> None: ...

    @abstractmethod
    def log(self, event: Log) -> None: ...

    @abstractmethod
    def evaluated(self, event: Evaluated) -> None: ...

    @abstractmethod
    def saved(self, event: Saved) -> None: ...

    @abstractmethod
    def end(self, event: End) -> None: ...


class Observers:
    """Tells all observers of an event, in the order of events; ranks other than the first have none.

    Of log steps they are told by a thread, a moment later: a step waits for no terminal and no disk, unless
    those fall behind.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)
        self._some_at_once = any(observer.at_once for observer in observers)
        self._some_later = not all(observer.at_once for observer in observers)
        self._waiting: deque[Log] = deque()
        self._talking = threading.RLock()
        self._over = threading.Event()
        self._ended: BaseException | None = None
        """What an observer ended the thread with."""

    def start(self, event: Start) -> None:
        self._tell(lambda observer: observer.start(event))
        self._over.clear()
        if self._some_later:
            threading.Thread(target=self._tell_later, name="observers", daemon=True).start()

    def log(self, event: Log) -> None:
        if self._some_at_once:
            with self._talking:
                self._tell_log(event, at_once=True)
        if self._some_later:
            self._waiting.append(event)
        if len(self._waiting) > _MOST_WAITING or self._ended is not None:
            self.settle()

    def settle(self) -> None:
        """Tell now of all log steps so far: before something is written that a resume will build on."""
        with self._talking:
            if self._ended is not None:
                ended, self._ended = self._ended, None
                raise ended
            while self._waiting:
                self._tell_log(self._waiting.popleft(), at_once=False)

    def evaluated(self, event: Evaluated) -> None:
        self._tell(lambda observer: observer.evaluated(event))

    def saved(self, event: Saved) -> None:
        self._tell(lambda observer: observer.saved(event))

    def end(self, event: End) -> None:
        try:
            self._tell(lambda observer: observer.end(event))
        finally:
            self._over.set()

    def _tell(self, what: Callable[[Observer], None]) -> None:
        with self._talking:
            self.settle()
            for observer in list(self._observers):
                self._tell_one(observer, what)

    def _tell_log(self, event: Log, at_once: bool) -> None:
        for observer in [o for o in self._observers if o.at_once == at_once]:
            self._tell_one(observer, lambda observer: observer.log(event))

    def _tell_later(self) -> None:
        while not self._over.wait(_PAUSE_S):
            try:
                self.settle()
            except BaseException as ended:  # SystemExit, say: the training's own thread has to end with it
                self._ended = ended
                return

    def _tell_one(self, observer: Observer, what: Callable[[Observer], None]) -> None:
        try:
            what(observer)
        except Exception:  # whatever it is, the training must not pay for it
            log.exception("%s failed and is switched off", type(observer).__name__)
            self._observers.remove(observer)
