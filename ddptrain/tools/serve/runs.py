"""The runs and sweeps below a folder, as they are now."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from ddptrain.errors import UserError, reason
from ddptrain.observe.lock import LOCK, is_locked
from ddptrain.observe.plain_files import is_plain_file
from ddptrain.text import plain
from ddptrain.tools.report.comparison import NOTHING, facts_of, format_point, metrics
from ddptrain.tools.report.page import page
from ddptrain.tools.report.run import read_runs, runs_below, title_of
from ddptrain.tools.report.run_files import RunFiles, is_run, read_run
from ddptrain.tools.sweep.ledger import LEDGER, read_ledger

_MOST = 24
"""Beside each other."""
_AT_A_TIME = 20
"""Rows that are read before they are shown."""
_FILES = ("metrics.jsonl", "summary.json", "config.yaml", LEDGER)
Stamp = tuple[object, ...]
"""Another one after a change."""


@final
@dataclass(frozen=True, slots=True)
class Row:
    """A run or a sweep in the list; texts for people."""

    path: str
    """Below the folder that is served."""
    version: str
    """Another one after a change."""
    recipe: str
    state: str
    steps: str
    metric: str
    """Its name, last and best value."""
    time: str


@final
class Runs:
    """Looks when it is asked to, from one thread; any thread may ask for what was seen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[Stamp, Row]] = {}
        """By path, the newest first; replaced as a whole."""
        self._pages: dict[tuple[str, ...], tuple[str, str]] = {}
        """Versions and page, by paths."""
        self._writing = threading.Lock()

    def look(self) -> None:
        """Read what has changed."""
        folders = sorted(runs_below(self._folder), key=_begun, reverse=True)
        seen = dict(self._seen)
        for i, (path, row) in enumerate(self._looked_at(folders)):
            seen[path] = row
            if i % _AT_A_TIME == 0:
                self._seen = dict(seen)
        self._seen = seen
        there = [str(path.relative_to(self._folder)) for path in folders]
        self._seen = {path: self._seen[path] for path in there if path in self._seen}

    def rows(self) -> list[dict[str, str]]:
        return [asdict(row) for _, row in self._seen.values()]

    def page(self, chosen: Sequence[str]) -> str | None:
        """The report on runs and sweeps that were seen, the first few of them; None where one was not."""
        seen, paths = self._seen, chosen[:_MOST]
        if not paths or not all(path in seen for path in paths):
            return None
        with self._writing:  # one at a time: a report on a large sweep takes a second
            seen = {**seen, **self._seen}  # while it waited, too
            version = " ".join(seen[path][1].version for path in paths)
            known = self._pages.get(tuple(chosen))
            if known is None or known[0] != version:
                folders = [self._folder / path for path in paths]
                try:
                    runs, notes = read_runs(folders)
                except UserError:  # it was there a moment ago, or its ledger is damaged
                    return None
                if len(chosen) > _MOST:
                    notes.append(f"{len(chosen)} are chosen; these are the first {_MOST}.")
                text = page(runs, title_of(folders, runs), notes) if runs else _NOTHING_YET
                self._pages = {tuple(chosen): (version, text)}  # the last one: several viewers see the same
                return text
            return known[1]

    def _looked_at(self, folders: Sequence[Path]) -> Iterator[tuple[str, tuple[Stamp, Row]]]:
        for folder in folders:
            path, stamp = str(folder.relative_to(self._folder)), _stamp(folder)
            known = self._seen.get(path)
            if known is None or known[0] != stamp:
                yield path, (stamp, _row(folder, path, f"{abs(hash(stamp)):x}"))


_NOTHING_YET = "<!DOCTYPE html><title>sweep</title><p>None of its jobs has begun.</p>"


def _begun(folder: Path) -> float:
    for name in ("command.txt", LEDGER, "config.yaml"):
        try:
            return (folder / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def _stamp(folder: Path) -> Stamp:
    files = []
    for name in _FILES:
        try:
            status = (folder / name).stat()
            files.append((status.st_mtime_ns, status.st_size))
        except OSError:
            files.append((0, 0))
    going_on = (folder / LOCK).is_file() and is_locked(folder)
    if not is_plain_file(folder / LEDGER):
        return (*files, going_on)
    return (
        *files,
        going_on,
        *(_stamp(job) for job in sorted(folder.iterdir()) if is_run(job) and not job.is_symlink()),
    )


def _row(folder: Path, path: str, version: str) -> Row:
    try:
        return (_sweep if is_plain_file(folder / LEDGER) else _run)(folder, path, version)
    except Exception as error:  # whatever a stranger's folder holds, the others are shown
        return Row(plain(path), version, NOTHING, f"can't be read ({plain(reason(error))})", *[NOTHING] * 3)


def _run(folder: Path, path: str, version: str) -> Row:
    run = read_run(folder, path)
    facts = facts_of(run)
    columns = {name: facts[name] for name in ("recipe", "state", "steps", "time")}
    return Row(plain(path), version, metric=_metric(run), **columns)


def _metric(run: RunFiles) -> str:
    if not (every := metrics([run])):
        return NOTHING
    last, best = every[0].scores[0]
    return f"{every[0].title} {format_point(last)}" + (f", best {format_point(best)}" if best else "")


def _sweep(folder: Path, path: str, version: str) -> Row:
    jobs = read_ledger(folder, is_locked(folder))
    counts = Counter(job.status for job in jobs)
    states = ", ".join(f"{count} {status}" for status, count in counts.items())
    return Row(plain(path), version, f"sweep of {len(jobs)} jobs", states, NOTHING, NOTHING, NOTHING)
