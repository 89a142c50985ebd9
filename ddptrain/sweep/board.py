"""What the person who sweeps sees: a table of all jobs, live on a terminal, else a line at each change."""

import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ddptrain.observe.clock import clock
from ddptrain.sweep.ledger import Job

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_PLAIN_WIDTH = 160
"""Columns where there is no terminal: a file, a pipe."""
_COLOURS = {"done": "green", "running": "cyan", "pruned": "dim", "failed": "red", "timeout": "red"}
_ORDER = ("done", "pruned", "running", "stopped", "new", "timeout", "failed")


class Board:
    """Follows the jobs of one sweep."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        """jobs: those that are asked for; what their words have in common goes without saying."""
        self._common = _common(jobs)
        self._live: Live | None = None

    @contextmanager
    def showing(self) -> Iterator[None]:
        """The table is on the terminal inside, if there is one."""
        if not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(stderr=True), refresh_per_second=2, transient=True) as self._live:
            yield

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def look(self, jobs: Sequence[Job]) -> None:
        """Something may have changed, be it the clock."""
        if self._live is not None:
            self._live.update(table(jobs))

    def changed(self, job: Job) -> None:
        """A job has started or ended."""
        if self._live is None:
            value = "" if job.value is None else f"  {job.metric} {job.value:.4f}"
            kind = "slot" if job.on_cpu else "GPU"
            on = f"  on {kind} {','.join(job.gpus)}" if job.gpus and job.status == "running" else ""
            took = f"  {job.seconds:.1f} s" if job.status != "running" else ""
            words = shlex.join(_telling(job, self._common))
            self.say(f"{job.folder}  {words}  {_status(job)}{value}{took}{on}{_because(job)}")


def print_table(jobs: Sequence[Job]) -> None:
    """On standard output, as wide as the terminal, sorted by the metric."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    with console.capture() as drawn:
        console.print(table(jobs))
    for line in drawn.get().splitlines():  # rich fills its lines with blanks
        print(line.rstrip())
    for job in jobs:
        if job.why:
            console.print(f"{job.folder}: {job.why}", markup=False, highlight=False, soft_wrap=True)


def table(jobs: Sequence[Job]) -> "Table":
    """All jobs, the best first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    ranked = sorted(jobs, key=_place)
    common = _common(jobs)
    metrics = {job.metric for job in jobs if job.metric}
    found = Table(box=box.SIMPLE, title=_counts(jobs), title_justify="left", title_style="")
    for name in ("job", "status", "overrides"):
        found.add_column(name, overflow="fold")
    for name in (metrics.pop() if len(metrics) == 1 else "metric", "steps", "time", "GPU"):
        found.add_column(name, justify="right", overflow="fold")
    for job in ranked:
        seconds = job.seconds + (time.time() - job.began if job.status == "running" else 0)
        found.add_row(
            job.folder,
            Text(_status(job), style=_COLOURS.get(job.status, "")),
            Text(shlex.join(_telling(job, common))),
            "" if job.value is None else f"{job.value:.4f}",
            f"{job.step}/{job.steps}" if job.steps else "",
            clock(seconds) if seconds else "",
            " ".join([*["CPU"] * job.on_cpu, ",".join(job.gpus)]).strip(),
        )
    return found


def _common(jobs: Sequence[Job]) -> set[str]:
    return set.intersection(*(set(job.words) for job in jobs)) if len(jobs) > 1 else set()


def _telling(job: Job, common: set[str]) -> list[str]:
    """The words by which a job differs from the others."""
    return [word for word in job.words if word not in common]


def _place(job: Job) -> tuple[bool, float, int]:
    """By the metric; those that failed come last, however far they got."""
    score = job.score
    place = math.inf if score is None or math.isnan(score) else -score
    return job.status in ("failed", "timeout"), place, job.number


def _counts(jobs: Sequence[Job]) -> str:
    statuses = Counter(job.status for job in jobs)
    found = [f"{statuses[status]} {status}" for status in _ORDER if statuses[status]]
    return f"{counted(len(jobs))}: {', '.join(found)}"


def counted(jobs: int) -> str:
    return f"{jobs} job{'s' * (jobs != 1)}"


def _status(job: Job) -> str:
    return f"failed ({job.code})" if job.status == "failed" else job.status


def _because(job: Job) -> str:
    return f"  {job.why}" if job.why else ""
