"""The verb ``report``: runs in a table and on a page."""

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean, nearest
from ddptrain.observe.clock import clock
from ddptrain.observe.lock import is_locked
from ddptrain.observe.plain_files import is_plain_file
from ddptrain.text import plain, print_tables
from ddptrain.tools.report.comparison import (
    NOTHING,
    Metric,
    compare_settings,
    format_point,
    format_value,
    metric_rows,
    metrics,
    overview,
    parts_of,
    ranking,
    short_names,
    time_split,
    verdict_sentences,
)
from ddptrain.tools.report.markup import is_page
from ddptrain.tools.report.page import write_page
from ddptrain.tools.report.run_files import RunFiles, is_run, read_run
from ddptrain.tools.sweep.board import print_table
from ddptrain.tools.sweep.ledger import LEDGER, Job, read_ledger
from ddptrain.tools.sweep.objectives import ranked
from ddptrain.tools.sweep.outcomes import importances, outcomes_of
from ddptrain.tools.sweep.parallel import draw_parallel
from ddptrain.tools.trackers.service import is_installed

_Row = tuple[str, Sequence[str]]
_DEEPEST = 6
"""Folders below the one that is named."""
_MOST_OF_A_SWEEP = 24
_FEW = 12
"""Differences that the terminal shows."""


def run(folders: Sequence[Path], settings: Mapping[str, str]) -> None:
    """Print a table of these runs or sweeps and write a page on them.

    settings: ``out``, the page's file. Raises UserError for a folder that is neither, and where the page
    can't be written.
    """
    folders = [folder for given in folders for folder in _matching(given)]
    # an earlier page is named by runs/<recipe>/* too
    folders = [path for path in folders if not (path.suffix == ".html" and path.is_file())]
    if "to" in settings:
        _send(folders, settings)
        return
    _check(folders, settings)
    folders = [folder.parent if folder.name == LEDGER else folder for folder in folders]
    runs, notes = read_runs(folders)
    page = _page_for(folders, runs, settings.get("out"))
    sweeps = [folder for folder in folders if _is_sweep(folder)]
    plots: list[Path] = []
    for folder in sweeps:
        if not (jobs := read_ledger(folder, is_locked(folder))):
            raise UserError(f"report {folder}: holds no sweep ({LEDGER}).")
        print_table(jobs)
        plots += _print_outcomes(folder, jobs)
    if len(sweeps) < len(folders):
        _print(runs)
    if runs:
        try:
            page.parent.mkdir(parents=True, exist_ok=True)
            write_page(runs, title_of(folders, runs), notes, page, plots)
        except OSError as error:
            problem = f"{page} can't be written ({error.strerror})"
            raise UserError(f"report: {problem}. Name another file: out=<file.html>") from error
        print(f"page  {page}")


def read_runs(folders: Sequence[Path]) -> tuple[list[RunFiles], list[str]]:
    """The runs that a report on these runs and sweeps shows, and what else is to be known. Raises UserError
    for a folder that is neither."""
    runs_by_folder = {folder: _runs_in(folder) for folder in folders}
    notes = [
        f"{plain(folder)} has {len(inside)} jobs that have begun; these are the best {_MOST_OF_A_SWEEP}."
        for folder, inside in runs_by_folder.items()
        if len(inside) > _MOST_OF_A_SWEEP
    ]
    paths = (path.resolve() for inside in runs_by_folder.values() for path in inside[:_MOST_OF_A_SWEEP])
    chosen = list(dict.fromkeys(paths))
    return [read_run(path, name) for path, name in zip(chosen, short_names(chosen), strict=True)], notes


def _print_outcomes(folder: Path, jobs: Sequence[Job]) -> list[Path]:
    """What the settings did: their importances, and a picture in the sweep's folder, which is returned."""
    if (outcomes := outcomes_of(jobs)) is None:
        return []
    shares: dict[str, float] = {}
    if is_installed("optuna"):
        shares = importances(outcomes)
    elif outcomes.have_importances:
        print("importance  needs optuna: pip install 'ddptrain[optuna]'")
    if shares:
        text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        print(f"importance  {plain(text)}  (PED-ANOVA, {len(outcomes.jobs)} jobs)")
    path = folder / "plots" / "parallel.png"
    if path.parent.is_symlink():
        print(f"plot  {path.parent} is a link, which may lead anywhere: nothing is drawn")
        return []
    try:
        draw_parallel(outcomes, shares, path)
    except OSError as error:  # another's folder
        print(f"plot  {path} can't be written ({error.strerror})")
        return []
    print(f"plot  {path}")
    return [path]


def _send(folders: Sequence[Path], settings: Mapping[str, str]) -> None:
    from ddptrain.tools.trackers.send import send_once

    for name in settings:
        if name not in ("to", "project"):
            hint = did_you_mean(name, ["run", "to", "project"])
            raise UserError(f"{name}: report ... to={settings['to']} takes no such word.{hint}")
    for folder in folders:
        if not is_run(folder):
            raise UserError(f"report {plain(folder)}: holds no run; its folder has metrics.jsonl.")
        print(send_once(folder, settings["to"], settings.get("project")))
    if not folders:
        raise UserError(f"report to={settings['to']}: say which run: run=<folder>")


def _check(folders: Sequence[Path], settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        if name != "out":
            hint = did_you_mean(name, ["out"])
            raise UserError(f"{name}={value}: report takes folders, and out=<file.html>.{hint}")
    if not settings.get("out", ".html").endswith(".html"):
        raise UserError(f"out={settings['out']}: name a file that ends in .html.")
    if not folders:
        newest = _newest(Path("runs"))
        hint = f" For example: report {newest}" if newest else ""
        raise UserError(
            f"report: name a run's folder, several, or a sweep's: report runs/<recipe>/<time>-<id>.{hint}"
        )


def _matching(given: Path) -> list[Path]:
    """The folder itself, or the runs and sweeps below it where it is none; of a pattern that the shell has
    left as it is, those that match it. Raises UserError where none does."""
    if not re.search(r"[*?[]", str(given)) or os.path.lexists(given):
        inside = [] if is_run(given) or _is_sweep(given) else sorted(runs_below(given))
        return [path for path in inside if not _is_sweep(path.parent)] or [given]
    matches = [Path(name) for name in sorted(glob.glob(str(given)))]
    folders = [path for path in matches if is_run(path) or _is_sweep(path)]
    if not folders:
        below = any(is_run(path) for folder in matches for path in _entries(folder))
        hint = f" Did you mean report '{given / '*'}'?" if below else ""
        raise UserError(f"report '{given}': no run's and no sweep's folder matches this pattern.{hint}")
    return folders


def runs_below(folder: Path) -> Iterator[Path]:
    """The runs and sweeps in a folder, or in folders of it; a sweep's jobs too."""
    for place, inside, _ in os.walk(folder):
        here = Path(place)
        inside[:] = [name for name in inside if not name.startswith(".")]
        if _is_sweep(here) or is_run(here):
            yield here
        if is_run(here) or len(here.relative_to(folder).parts) == _DEEPEST:
            inside.clear()


def _is_sweep(folder: Path) -> bool:
    return is_plain_file(folder / LEDGER)


def _runs_in(folder: Path) -> list[Path]:
    """The run that the folder is, or those of the sweep that it is. Raises UserError where it is neither."""
    if _is_sweep(folder):
        paths = (folder / job.folder for job in ranked(read_ledger(folder, live=False)))
        return [path for path in paths if is_run(path) and not path.is_symlink()]
    if is_run(folder):
        return [folder]
    if not folder.exists():
        beside = [path.name for path in _entries(folder.parent) if path.is_dir()]
        near = nearest(folder.name, beside)
        hint = f" Did you mean report {folder.parent / near}?" if near else ""
        raise UserError(f"report {folder}: there is no such folder.{hint}")
    hint = f" Did you mean report {folder.parent}?" if folder.is_file() and is_run(folder.parent) else ""
    raise UserError(
        f"report {folder}: holds no run (config.yaml, metrics.jsonl), and no sweep ({LEDGER}).{hint}"
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _newest(folder: Path) -> Path | None:
    """The run that was started last, of those in a folder or one or two folders further in."""
    configs = [path for depth in ("*", "*/*", "*/*/*") for path in folder.glob(f"{depth}/config.yaml")]
    return max(configs, key=lambda path: path.stat().st_mtime).parent if configs else None


def title_of(folders: Sequence[Path], runs: Sequence[RunFiles]) -> str:
    recipes = ", ".join(dict.fromkeys(run.config.get("recipe", run.name) for run in runs))
    if len(folders) == 1 and _is_sweep(folders[0]):
        return f"{recipes}: the sweep {folders[0].resolve().name}"
    return f"{recipes}: {runs[0].name}" if len(runs) == 1 else f"{recipes}: {len(runs)} runs"


def _page_for(folders: Sequence[Path], runs: Sequence[RunFiles], out: str | None) -> Path:
    """Where the page goes: into the one folder, else into the nearest that holds all of the runs. Raises
    UserError where it would replace something else."""
    place = folders[0]
    if len(folders) > 1:
        common = Path(os.path.commonpath([run.folder.parent for run in runs] or [Path("/")]))
        place = Path() if common == Path(common.anchor) else common
    page = place / "report.html" if out is None else Path(out)
    if page.is_file() and not page.is_symlink() and not is_page(page):  # a link is replaced, not followed
        raise UserError(f"{page}: exists already, and is no report. Name another file: out=<file.html>")
    return page


def _print(runs: Sequence[RunFiles]) -> None:
    """On standard output."""
    titles, facts = overview(runs)
    rows = [(run.name, cells) for run, cells in zip(runs, facts, strict=True)]
    first = _table("", "run", titles, rows, numbers=False)
    print_tables(first, *_differences(runs), *_metrics(runs), *_times(runs))
    notes = {f"{run.name}: {note}": [""] for run in runs for note in run.notes}
    for text, names in (notes | verdict_sentences(runs)).items():
        print(f"{', '.join(names)}: {text}" if len(runs) > 1 and names[0] else text)


def _table(title: str, corner: str, columns: Sequence[str], rows: Sequence[_Row], numbers: bool) -> Table:
    table = Table(box=box.SIMPLE, title=title, title_justify="left", title_style="bold")
    table.add_column(Text(corner), overflow="fold")
    for name in columns:
        table.add_column(Text(name), overflow="fold", justify="right" if numbers else "left")
    for name, cells in rows:
        table.add_row(Text(name), *map(Text, cells))
    return table


def _by_run(title: str, corner: str, names: Sequence[str], rows: Sequence[_Row], numbers: bool) -> Table:
    """Rows with a cell for each run; turned where there are more runs than rows."""
    if len(names) <= len(rows):
        return _table(title, corner, names, rows, numbers)
    turned = [(name, [cells[i] for _, cells in rows]) for i, name in enumerate(names)]
    return _table(title, "run", [name for name, _ in rows], turned, numbers)


def _differences(runs: Sequence[RunFiles]) -> list[Table]:
    """What differs in config and environment."""
    every = [
        *compare_settings([run.config for run in runs]),
        *compare_settings([run.environment for run in runs]),
    ]
    rows = [(row.key, [format_value(value, 30) for value in row.values]) for row in every if row.differs]
    if not rows:
        return []
    title = "what differs" if len(rows) <= _FEW else f"what differs (the first {_FEW} of {len(rows)})"
    return [_by_run(title, "setting", [run.name for run in runs], rows[:_FEW], numbers=False)]


def _metrics(runs: Sequence[RunFiles]) -> list[Table]:
    """The last and the best value of each metric; of several runs, the best run first."""
    every, order = metrics(runs), ranking(runs)
    if not every:
        return []
    if len(runs) == 1:
        return [_table("metrics", "metric", ["last", "best", "at step"], metric_rows(every), numbers=True)]
    rows = [(metric.title, [_cell(metric, i) for i in order]) for metric in every]
    names = [runs[i].name for i in order]
    return [_by_run("metrics: last, best, * the best run", "metric", names, rows, numbers=True)]


def _cell(metric: Metric, run: int) -> str:
    last, best = metric.scores[run]
    both = format_point(last) if best is None else f"{format_point(last)}, {format_point(best)}"
    return f"{both}{'*' if run in metric.winners else ' '}"


def _times(runs: Sequence[RunFiles]) -> list[Table]:
    splits = [time_split(run) for run in runs]
    parts = parts_of(splits)
    if not parts:
        return []
    rows = []
    for run, split in zip(runs, splits, strict=True):
        whole = sum(split.values())
        cells = [f"{split[part] / whole:.0%}" if part in split and whole > 0 else NOTHING for part in parts]
        rows.append((run.name, [*cells, clock(whole) if split else NOTHING]))
    titles = [*(part.replace("_", "-") for part in parts), "whole"]
    return [_table("where the time went", "run", titles, rows, numbers=True)]
