"""Terminal output: a progress bar, or plain lines if there is no terminal."""

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, final

from ddptrain.api.observer import End, Evaluated, Log, Observer, RunInfo, Start
from ddptrain.api.timing import format_shares
from ddptrain.observe.advice import advise
from ddptrain.observe.clock import clock
from ddptrain.observe.lock import was_taken
from ddptrain.observe.monitor import in_short
from ddptrain.text import replace_file

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.progress import Progress, TaskID

log = logging.getLogger("ddptrain")

_BAR = 20
"""Columns of the progress bar."""


@final
class Console(Observer):
    """One line at each log step and evaluation; on a terminal also a progress bar with loss, speed and
    ETA."""

    def __init__(self) -> None:
        self._run = RunInfo()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._metrics = ""
        self._evaluations = 0
        self._steps = 0
        self._first_step = 0

    def start(self, event: Start) -> None:
        self._run, self._steps, self._first_step = event.run, event.steps, event.step
        if not sys.stderr.isatty():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        whole = Column(no_wrap=True)
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # a narrow terminal cuts this one
        self._progress = Progress(
            TextColumn("{task.description}", table_column=whole), BarColumn(_BAR),
            MofNCompleteColumn(table_column=whole), TimeRemainingColumn(table_column=whole),
            TextColumn("{task.fields[status]}", table_column=rest), console=_terminal(), transient=True,
            expand=True,
        )  # fmt: skip
        self._progress.start()
        self._task = self._progress.add_task("training", total=event.steps, completed=event.step, status="")

    def log(self, event: Log) -> None:
        shown = {name: value for name, value in event.values.items() if not name.startswith("lr/")}
        values = "  ".join(f"{name} {_short(value)}" for name, value in shown.items())
        speed = event.timing.samples_per_s
        left = (self._steps - event.step) * (event.samples / event.step) / max(speed, 1e-9)
        line = (
            f"step {event.step}/{self._steps}  epoch {event.epoch:.2f}  {values}"
            f"  {_short(speed)} samples/s  waiting for data {event.timing.shares['data']:.0%}"
        )
        log.info("%s  ETA %s", line, clock(left))
        if self._progress is not None and self._task is not None:
            loss = f"loss {_short(event.values['loss'])}" if "loss" in event.values else ""
            pace = f"{_short(speed)} samples/s"
            evaluated = f"evaluated: {self._metrics}" if self._metrics else ""
            status = "  ".join(
                part for part in (loss, pace, in_short(self._run.devices.latest()), evaluated) if part
            )
            self._progress.update(self._task, completed=event.step, status=status)

    def evaluated(self, event: Evaluated) -> None:
        self._evaluations += 1
        self._metrics = _format_metrics(event.metrics)
        log.info(
            "evaluated at epoch %.2f: %s%s  (%.1f s)",
            event.epoch,
            self._metrics,
            "  (best so far)" if event.is_best else "",
            event.seconds,
        )
        if event.timing.samples:
            log.info("time       %s", format_shares(event.timing, self._reading()))

    def end(self, event: End) -> None:
        if self._progress is not None:
            self._progress.stop()
        result, times = event.result, event.times
        if result.outcome in ("done", "stopped early"):
            metrics, seconds = _format_metrics(result.metrics), clock(times.seconds)
            last = f", the last {event.step - self._first_step}" if self._first_step else ""
            log.info("%s: %s after %d steps%s in %s", result.outcome, metrics, event.step, last, seconds)
            if (best := dict(result.best)) and (step := best.pop("step")) != event.step:
                log.info("best       %s at step %d (checkpoint=best)", _format_metrics(best), step)
            if times.timing.samples:
                if self._evaluations != 1:  # else the line was printed above
                    log.info("time       %s", format_shares(times.timing, self._reading()))
                if (reading := self._run.loading.reading) is not None:
                    log.info("stream     %s", reading().fetched)
                if count := self._run.loading.left_out:
                    log.info("left out   %s of the set, listed above (on_error=skip)", f"{count:,}")
                log.info("advice     %s", advise(self._run, times))

    def _reading(self) -> str:
        """What waiting for data was made of, so far, where the set lies elsewhere."""
        reading = self._run.loading.reading
        if reading is None:
            return ""
        network, decoding, _ = reading()
        share = network / max(network + decoding, 1e-9)
        return f" (network {share:.0%}, decoding {1 - share:.0%})"


def open_log(path: str | None, first: bool) -> None:
    """Send this process's log to the terminal and to ``log.txt``; ranks other than the first log errors
    only."""
    logger = logging.getLogger("ddptrain")
    logger.propagate = False
    logger.setLevel(logging.INFO if first else logging.ERROR)
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    if first and sys.stderr.isatty():
        from rich.highlighter import NullHighlighter
        from rich.logging import RichHandler

        logger.addHandler(
            RichHandler(
                console=_terminal(),
                show_time=False,
                show_path=False,
                show_level=False,
                highlighter=NullHighlighter(),
            )
        )
    else:
        logger.addHandler(_with_format(logging.StreamHandler(), "%(message)s"))
    for terminal in logger.handlers:  # which has these already
        terminal.addFilter(lambda record: record.name != "ddptrain.ended")
    if first and path is not None:
        logger.addHandler(_with_format(_LogFile(Path(path)), "%(asctime)s %(message)s"))


class _LogFile(logging.FileHandler):
    """Says once that the disk refuses, where logging's own prints a traceback for each line. A file that is
    deleted or replaced under the run is put back."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a+", "utf-8", errors="backslashreplace")
        self._path = path
        self._error_printed = False

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        try:
            if self.stream is not None and was_taken(self._path, self.stream.fileno()):
                _put_back(self._path, self.stream)
                self.stream = self._open()
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 # logging's
        if isinstance(error := sys.exc_info()[1], OSError) and not self._error_printed:
            self._error_printed = True
            with suppress(OSError):  # stderr may lie on the same disk
                print(f"{self.baseFilename} lacks lines ({error.strerror})", file=sys.stderr, flush=True)
        elif not isinstance(error, OSError):
            super().handleError(record)


def _put_back(path: Path, taken: TextIO) -> None:
    taken.seek(0)
    replace_file(path, taken.buffer.read())
    taken.close()


def _with_format(handler: logging.Handler, layout: str) -> logging.Handler:
    handler.setFormatter(logging.Formatter(layout))
    return handler


@cache
def _terminal() -> "Terminal":
    """One rich console for both log and progress bar."""
    from rich.console import Console as Terminal

    return Terminal(stderr=True)


def _format_metrics(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if "/" not in name)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
