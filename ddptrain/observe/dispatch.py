"""Passes events to observers, in order, on rank 0, without harm to the training."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ddptrain.api.observer import End, Evaluated, Log, Observer, Saved, Start
from ddptrain.observe.console import Console
from ddptrain.observe.jsonl import Jsonl
from ddptrain.observe.lock import lost
from ddptrain.observe.rundir import check_kept

log = logging.getLogger(__name__)

_PAUSE_S = 0.1
"""The thread polls at this interval, so that no step pays for waking it."""
_MOST_WAITING = 1000
"""Most log events that are queued; beyond that, the training waits."""
_LAST_EVENTS_S = 60.0
"""Limit at the end for all slow observers."""


class Observers:
    """Passes each event to all observers; only rank 0 has any.

    Log events are handled by a thread, so a step does not wait for terminal and disk, unless they fall
    behind. Slow observers have a thread each. Where the run's folder is lost, those that write are left out.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = [observer for observer in observers if not observer.slow]
        self._slow = [_SlowObserver(observer) for observer in observers if observer.slow]
        self._waiting: deque[Log] = deque()
        self._talking = threading.RLock()
        self._over = threading.Event()
        self._ended: BaseException | None = None
        """The exception by which an observer has ended the thread."""
        self._folder = Path()
        self.lost = False
        """The run's folder is no longer this run's, as of the last event that was handled."""

    def start(self, event: Start) -> None:
        self._folder = event.run.folder
        check_kept(self._folder)
        self._notify_all(lambda observer: observer.start(event))
        self._over.clear()
        if self._observers:
            threading.Thread(target=self._run, name="observers", daemon=True).start()

    def log(self, event: Log) -> None:
        self._waiting.append(event)
        for slow in () if self.lost else self._slow:
            slow.tell(lambda observer: observer.log(_copy(event)))
        if len(self._waiting) > _MOST_WAITING or self._ended is not None:
            self.flush()

    def flush(self) -> None:
        """Handle all queued log events now: before a checkpoint is written."""
        with self._talking:
            if self._ended is not None:
                ended, self._ended = self._ended, None
                raise ended
            self._look_for_folder()
            while self._waiting:
                event = self._waiting.popleft()
                for observer in list(self._observers):
                    self._notify(observer, lambda one, event=event: one.log(_copy(event)))  # type: ignore[misc]

    def evaluated(self, event: Evaluated) -> None:
        self._notify_all(lambda observer: observer.evaluated(replace(event, metrics=dict(event.metrics))))

    def saved(self, event: Saved) -> None:
        self._notify_all(lambda observer: observer.saved(event))

    def end(self, event: End) -> None:
        try:
            with self._talking:
                self.flush()
                for observer in list(self._observers):
                    self._notify(observer, lambda one: one.end(event))
            for slow in self._slow:  # last: the others' files are complete
                slow.tell(lambda observer: observer.end(event))
            until = time.monotonic() + _LAST_EVENTS_S
            for slow in self._slow:
                slow.finish(until)
        finally:
            self._over.set()

    def _notify_all(self, what: Callable[[Observer], None]) -> None:
        with self._talking:
            self.flush()
            for slow in () if self.lost else self._slow:
                slow.tell(what)
            for observer in list(self._observers):
                self._notify(observer, what)

    def _run(self) -> None:
        while not self._over.wait(_PAUSE_S):
            try:
                self.flush()
            except BaseException as ended:  # SystemExit, for example: raised again in the main thread
                self._ended = ended
                return

    def _look_for_folder(self) -> None:
        """Leave out those that would write into a folder that is another's now: a moved one's metrics are
        still its own."""
        if not self.lost and lost(self._folder) is not None:
            self.lost = True
            self._observers = [
                observer for observer in self._observers if isinstance(observer, Console | Jsonl)
            ]

    def _notify(self, observer: Observer, what: Callable[[Observer], None]) -> None:
        self._look_for_folder()  # again: the process may have been stopped since the last look
        if observer not in self._observers:
            return
        try:
            what(observer)
        except Exception as error:  # of any kind: it must not end the training
            self._look_for_folder()
            _tell_of(observer, error, self.lost)
            if observer in self._observers:
                self._observers.remove(observer)


class _SlowObserver:
    """A slow observer and its thread."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._events: queue.SimpleQueue[Callable[[Observer], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=type(observer).__name__, daemon=True)
        self._is_dropped = False

    def tell(self, what: Callable[[Observer], None]) -> None:
        if self._is_dropped:  # its events would be kept, with their pictures
            return
        if self._thread.ident is None:
            self._thread.start()
        self._events.put(what)

    def finish(self, until: float) -> None:
        """until: on time.monotonic's clock."""
        self._events.put(None)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            log.warning("%s is not done; the run ends without waiting longer", type(self._observer).__name__)

    def _run(self) -> None:
        while (what := self._events.get()) is not None:
            try:
                what(self._observer)
            except Exception as error:
                self._is_dropped = True
                _tell_of(self._observer, error)
                break


def _copy(event: Log) -> Log:
    """With numbers of its own: what an observer changes is seen by no other."""
    return event._replace(values=dict(event.values))


def _tell_of(observer: Observer, error: Exception, lost: bool = False) -> None:
    """One message: a traceback, but where it is the disk that refuses. lost: the folder, of which the run's
    end tells."""
    name = type(observer).__name__
    if isinstance(error, OSError):
        log.log(logging.DEBUG if lost else logging.WARNING, "%s is switched off: %s", name, error)
    else:
        log.error("%s failed and is switched off", name, exc_info=error)
