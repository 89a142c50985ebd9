"""A process that draws figures: drawing takes a second, a step may take a millisecond."""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, final

from ddptrain.api.recipe import ConfusionMatrix, Curves
from ddptrain.distributed.cpu import cores
from ddptrain.observe.child import start_module
from ddptrain.observe.drawing import RenderedFigure
from ddptrain.text import first_few

log = logging.getLogger("ddptrain")

_LAST_S = 60.0
"""Limit at the end for figures that are still to be drawn."""
_SHARE = 0.02
"""Of the time of all cores, for figures before the end."""
_NEW_S = 0.5
"""Seconds of a core that a figure is taken to need the first time."""
PngReceiver = Callable[[bytes], None]


class _Request(NamedTuple):
    figure: object
    """Identifies requests for the same figure."""
    words: tuple[Any, ...]
    receivers: list[PngReceiver]


@final
class Drawer:
    """Draws one figure after the other, in at most 2 % of the time of all cores. Only the newest request of
    each name is kept: if evaluations come faster, some figures are skipped. What is still wanted at the end
    is drawn then."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        self._line: Connection[Any, Any] = ours
        self._process = start_module(
            "ddptrain.observe.drawing", [str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        self._waiting: dict[str, _Request] = {}
        self._in_progress: _Request | None = None
        """The request in progress."""
        self._saves = False
        """Whether what was drawn is being saved."""
        self._lacking: set[str] = set()
        """Letters that have been said to be in no font."""
        self._changed = threading.Condition()
        self._cores = cores()
        self._began = time.monotonic()
        self._spent = 0.0
        """Seconds of a core, in all."""
        self._needs: dict[str, float] = {}
        """Those of the last figure of each name."""
        self._at_end = False
        threading.Thread(target=self._run, name="drawer", daemon=True).start()

    @property
    def pid(self) -> int:
        """The drawing process's id."""
        return self._process.pid

    def draw(self, name: str, figure: ConfusionMatrix | Curves, receiver: PngReceiver) -> None:
        """receiver: called with the PNG, in another thread."""
        if isinstance(figure, Curves):
            words: tuple[Any, ...] = ("lines", dict(figure.lines), figure.x, figure.y)
        else:
            words = ("matrix", figure.counts, figure.classes)
        self._ask(name, figure, words, receiver)

    def draw_curves(self, metrics: Path, receiver: PngReceiver) -> None:
        """Draw the curves of a metrics.jsonl, read when the request is processed."""
        self._ask("curves", None, ("curves", str(metrics)), receiver)

    def finish(self) -> None:
        """Wait until all is drawn, a minute at most."""
        until = time.monotonic() + _LAST_S
        with self._changed:
            self._at_end = True
            self._changed.notify_all()
            while self._waiting or self._in_progress is not None or self._saves:
                if not self._changed.wait(until - time.monotonic()):
                    log.warning("drawing the figures takes too long; some are missing")
                    self._waiting.clear()
                    break
            self._at_end = False

    def _ask(self, name: str, figure: object, words: tuple[Any, ...], receiver: PngReceiver) -> None:
        with self._changed:
            for request in (self._waiting.get(name), self._in_progress):
                if request is not None and figure is not None and request.figure is figure:
                    request.receivers.append(receiver)
                    return
            self._waiting[name] = _Request(figure, words, [receiver])
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                name = next(iter(self._waiting))
                if not self._at_end and (pause := self._until_allowed(name)) > 0:
                    self._changed.wait(pause)
                    continue
                self._in_progress = request = self._waiting.pop(name)
            try:
                self._line.send(request.words)
                answer = RenderedFigure(*self._line.recv())
            except (EOFError, OSError):
                code = self._process.wait()  # below 0: of a signal
                answer = RenderedFigure(b"", f"the drawing process has ended with exit code {code}")
            if answer.error:
                log.warning("%s was not drawn: %s", name, answer.error)
            self._say_lacking(name, answer.lacking)
            with self._changed:
                self._spent += answer.seconds
                self._needs[name] = answer.seconds
                self._in_progress, self._saves = None, True
            for receiver in request.receivers if answer.png else ():  # a slow disk must not hold up `draw`
                try:
                    receiver(answer.png)
                except OSError as error:
                    log.warning("%s was drawn, but could not be saved: %s", name, error)
                except Exception:  # of any kind: it must not end the training
                    log.exception("%s was drawn, but could not be saved", name)
            with self._changed:
                self._saves = False
                self._changed.notify_all()

    def _until_allowed(self, name: str) -> float:
        """Seconds until the figure keeps to its share of the time."""
        seconds = self._spent + self._needs.get(name, _NEW_S)
        return self._began + seconds / (_SHARE * self._cores) - time.monotonic()

    def _say_lacking(self, name: str, letters: str) -> None:
        if new := "".join(letter for letter in letters if letter not in self._lacking):
            self._lacking |= set(new)
            log.info(
                "note       %s: no font on this machine has %s; names with it are drawn as #0, #1 ..."
                " Install one that has, such as Noto Sans CJK",
                *(name, first_few(list(new), 5)),
            )


@cache
def shared_drawer() -> Drawer:
    """Shared by all observers of this process."""
    return Drawer()


os.register_at_fork(after_in_child=shared_drawer.cache_clear)  # a child has not its thread
