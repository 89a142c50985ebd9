"""What a sweep shows: a table of all jobs, live on a terminal, else a line at each change."""

import shlex
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ddptrain.observe.clock import clock
from ddptrain.text import counted, plain, print_tables
from ddptrain.tools.sweep.ledger import Job
from ddptrain.tools.sweep.objectives import objectives_of, pareto_best, ranked

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_COLOURS = {"done": "green", "running": "cyan", "pruned": "dim", "failed": "red", "timeout": "red"}
_ORDER = ("done", "pruned", "running", "queued", "stopped", "new", "timeout", "failed")


class Board:
    """Follows the jobs of one sweep."""

    def __init__(self, common: Collection[str]) -> None:
        """common: words that all jobs have, which are left out."""
        self._common = common
        self._live: Live | None = None

    @contextmanager
    def showing(self) -> Iterator[None]:
        """The table is on the terminal inside, if there is one."""
        if not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(stderr=True), refresh_per_second=2, transient=True)
        self._live.start()
        try:
            yield
        finally:
            with suppress(OSError):  # the terminal is closed
                self._live.stop()

    def say(self, line: str) -> None:
        """On standard error. Whoever looked may have gone: the jobs are then still followed to their end."""
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)

    def refresh(self, jobs: Sequence[Job]) -> None:
        """Draw the table again: something may have changed, if only the clock."""
        if self._live is not None:
            self._live.update(jobs_table(jobs))

    def changed(self, job: Job) -> None:
        """A job has started or ended."""
        if self._live is None:
            value = "" if job.value is None else f"  {job.metric} {job.value:.4f}"
            kind = "node" if job.on != "local" else "slot" if job.on_cpu else "GPU"
            on = f"  on {kind} {','.join(job.gpus)}" if job.gpus and job.status == "running" else ""
            took = f"  {job.seconds:.1f} s" if job.status not in ("queued", "running") else ""
            why = f"  {job.why}" if job.why else ""
            self.say(f"{job.folder}  {_own_words(job, self._common)}  {_status(job)}{value}{took}{on}{why}")


def print_table(jobs: Sequence[Job]) -> None:
    """On standard output, sorted by the metric."""
    print_tables(jobs_table(jobs))
    for job in jobs:
        if job.why:
            print(f"{job.folder}: {plain(job.why)}")


def jobs_table(jobs: Sequence[Job]) -> "Table":
    """All jobs, the best first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    common = common_words(jobs)
    objectives = objectives_of(jobs)
    best = pareto_best(jobs, objectives) if objectives else set()
    title = _by_status(jobs) + (f"; * best: {_ways(objectives)}" if objectives else "")
    table = Table(box=box.SIMPLE, title=Text(plain(title)), title_justify="left", title_style="")
    for name in ("job", "status", "overrides"):
        table.add_column(name, overflow="fold")
    metrics = sorted({job.metric for job in jobs if job.metric})
    several = len(metrics) > 1 and not objectives
    measured = list(objectives) or ["metric" if len(metrics) != 1 else metrics[0]]
    for name in (*measured, "steps", "time", "GPU"):
        table.add_column(Text(plain(name)), justify="right", overflow="fold")
    for job in ranked(jobs):
        seconds = job.seconds + (time.time() - job.began if job.status == "running" else 0)
        values = [job.results.get(name) for name in objectives] or [job.value]
        cells = [
            f"{job.folder}{' *' * (job.number in best)}",
            _status(job),
            _own_words(job, common),
            *("" if value is None else f"{job.metric} " * several + _number(value) for value in values),
            f"{job.step}/{job.steps}" if job.steps else "",
            clock(seconds) if seconds else "",
            " ".join([*["CPU"] * job.on_cpu, ",".join(job.gpus)]).strip(),
        ]
        texts = [Text(plain(cell)) for cell in cells]  # the ledger may be a stranger's
        texts[1].style = _COLOURS.get(job.status, "")
        table.add_row(*texts)
    return table


def common_words(jobs: Sequence[Job]) -> set[str]:
    return set.intersection(*(set(job.words) for job in jobs)) if len(jobs) > 1 else set()


def _own_words(job: Job, common: Collection[str]) -> str:
    """The words by which a job differs from the others."""
    return shlex.join(word for word in job.words if word not in common)


def _ways(objectives: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {way}" for name, way in objectives.items())


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"


def _by_status(jobs: Sequence[Job]) -> str:
    statuses = Counter(job.status for job in jobs)
    counts = [f"{statuses[status]} {status}" for status in _ORDER if statuses[status]]
    return f"{counted(len(jobs), 'job')}: {', '.join(counts)}"


def _status(job: Job) -> str:
    return f"failed ({job.code})" if job.status == "failed" else job.status
