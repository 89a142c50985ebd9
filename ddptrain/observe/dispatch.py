"""Tells observers what happened: in the order of events, on rank 0, never harming the training."""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from ddptrain.api.observer import End, Evaluated, Log, Observer, Saved, Start

log = logging.getLogger(__name__)

_PAUSE_S = 0.1
"""Between two looks at what is to be told: no step pays for waking a thread."""
_MOST_WAITING = 1000
"""Log steps not told yet; beyond them, the training waits."""
_LAST_EVENTS_S = 60.0
"""At the end, for a slow observer."""


class Observers:
    """Tells all observers of an event, in the order of events; ranks other than the first have none.

    Of log steps they are told by a thread, a moment later: a step waits for no terminal and no disk, unless
    those fall behind. Slow ones have a thread each.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = [observer for observer in observers if not observer.slow]
        self._slow = [_Beside(observer) for observer in observers if observer.slow]
        self._waiting: deque[Log] = deque()
        self._talking = threading.RLock()
        self._over = threading.Event()
        self._ended: BaseException | None = None
        """What an observer ended the thread with."""

    def start(self, event: Start) -> None:
        self._tell(lambda observer: observer.start(event))
        self._over.clear()
        if self._observers:
            threading.Thread(target=self._tell_later, name="observers", daemon=True).start()

    def log(self, event: Log) -> None:
        self._waiting.append(event)
        for beside in self._slow:
            beside.tell(lambda observer: observer.log(event))
        if len(self._waiting) > _MOST_WAITING or self._ended is not None:
            self.settle()

    def settle(self) -> None:
        """Tell now of all log steps so far: before something is written that a resume will build on."""
        with self._talking:
            if self._ended is not None:
                ended, self._ended = self._ended, None
                raise ended
            while self._waiting:
                event = self._waiting.popleft()
                for observer in list(self._observers):
                    self._tell_one(observer, lambda told, event=event: told.log(event))  # type: ignore[misc]

    def evaluated(self, event: Evaluated) -> None:
        self._tell(lambda observer: observer.evaluated(event))

    def saved(self, event: Saved) -> None:
        self._tell(lambda observer: observer.saved(event))

    def end(self, event: End) -> None:
        try:
            self._tell(lambda observer: observer.end(event))
            for beside in self._slow:
                beside.finish()
        finally:
            self._over.set()

    def _tell(self, what: Callable[[Observer], None]) -> None:
        with self._talking:
            self.settle()
            for beside in self._slow:
                beside.tell(what)
            for observer in list(self._observers):
                self._tell_one(observer, what)

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


class _Beside:
    """A slow observer in a thread of its own."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._events: queue.SimpleQueue[Callable[[Observer], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=type(observer).__name__, daemon=True)

    def tell(self, what: Callable[[Observer], None]) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._events.put(what)

    def finish(self) -> None:
        self._events.put(None)
        self._thread.join(_LAST_EVENTS_S)
        if self._thread.is_alive():
            log.warning("%s is not done; the run ends without it", type(self._observer).__name__)

    def _run(self) -> None:
        while (what := self._events.get()) is not None:
            try:
                what(self._observer)
            except Exception:
                log.exception("%s failed and is switched off", type(self._observer).__name__)
                break
