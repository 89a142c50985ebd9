"""Tells observers what happened: in the order of events, on rank 0, never harming the training."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from ddptrain.api.observer import End, Evaluated, Log, Observer, Saved, Start

log = logging.getLogger(__name__)

_PAUSE_S = 0.1
"""Between two looks at what is to be told: no step pays for waking a thread."""
_MOST_WAITING = 1000
"""Log steps not told yet; beyond them, the training waits."""


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
