"""The page on one run, or on several side by side: one HTML file that loads nothing.

What it shows may be a stranger's: `markup` escapes every text, and lets no script run but the page's own.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from ddptrain.text import plain, replace_file
from ddptrain.tools.report import comparison
from ddptrain.tools.report.comparison import Metric, format_point
from ddptrain.tools.report.curves import HEIGHT, WIDTH, as_data, panels
from ddptrain.tools.report.embedded import embed, embed_picture
from ddptrain.tools.report.markup import Html, document, folded, html_table, run_names, run_prefix, section
from ddptrain.tools.report.page_figures import curves, pictures, where_time_went
from ddptrain.tools.report.run_files import RunFiles

_FEW = 3  # Runs up to which each has its place on the page for what one seldom reads
_WIDE = 1400  # Pixels
_PICTURES = 8_000_000  # Characters of pictures in one page


def write_page(
    runs: Sequence[RunFiles], title: str, notes: Sequence[str], path: Path, above: Sequence[Path] = ()
) -> None:
    """Whole or not at all: it may be looked at while it is written. Raises OSError."""
    replace_file(path, page(runs, title, notes, above))


def page(runs: Sequence[RunFiles], title: str, notes: Sequence[str], above: Sequence[Path] = ()) -> str:
    """``notes``: what else is to be known, above all. ``above``: pictures (PNG) of all jobs of a sweep."""
    curve_panels, title = panels(runs), plain(title)
    embedded = embed(runs, _PICTURES)
    sections = [
        _head(runs, title, notes),
        section("Settings and results", "".join(embed_picture(path, _WIDE) or "" for path in above)),
        section("What differs", _differing(runs)) if len(runs) > 1 else "",
        section("Metrics", _metrics(runs)),
        section("Curves", curves(runs, curve_panels)),
        section("Where the time went", where_time_went(runs)),
        section("Devices", _devices(runs)),
        section("Pictures and texts", pictures(runs, embedded)),
        section("Evaluation in detail", _details(runs)),
        section("Configuration", _configuration(runs)),
        section("Environment", _same(runs, [run.environment for run in runs])),
        section("Repeat it", _commands(runs)),
    ]
    data = {
        "runs": [run.name for run in runs],
        "width": WIDTH,
        "height": HEIGHT,
        "panels": [*map(as_data, curve_panels)],
    }
    return document(title, "\n".join(filter(None, sections)), data)


def _head(runs: Sequence[RunFiles], title: str, notes: Sequence[str]) -> str:
    lines = [f'<p class="note">{escape(note)}</p>' for note in notes]
    lines += [
        f'<p class="note">{run_prefix(run, runs)}{escape(note)}</p>' for run in runs for note in run.notes
    ]
    for text, names in comparison.verdict_sentences(runs).items():
        of = f"<strong>{escape(', '.join(names))}</strong>: " if len(runs) > 1 else ""
        lines.append(f'<p class="verdict">{of}{escape(text)}</p>')
    titles, facts = comparison.overview(runs)
    first = html_table("run", titles, list(zip(run_names(runs), facts, strict=True)), "fact")
    return f"<header><h1>{escape(title)}</h1></header>{''.join(lines)}{first}"


def _differing(runs: Sequence[RunFiles]) -> str:
    rows = [row for row in comparison.compare_settings([run.config for run in runs]) if row.differs]
    around = [row for row in comparison.compare_settings([run.environment for run in runs]) if row.differs]
    rows += [row._replace(key=f"{row.key} (environment)") for row in around]
    if not rows:
        return '<p class="soft">Nothing: the same configuration, in the same environment.</p>'
    names = run_names(runs)
    if len(runs) <= len(rows):
        return html_table("setting", names, rows, "differs")
    turned = [(name, [row.values[i] for row in rows]) for i, name in enumerate(names)]
    return html_table("run", [row.key for row in rows], turned, "differs")


def _same(runs: Sequence[RunFiles], settings: Sequence[Mapping[str, str]]) -> str:
    same = [(row.key, row.values[:1]) for row in comparison.compare_settings(settings) if not row.differs]
    title = f"the same in all runs ({len(same)})" if len(runs) > 1 else f"all {len(same)} settings"
    return folded(title, html_table("setting", ["value"], same)) if same else ""


def _configuration(runs: Sequence[RunFiles]) -> str:
    files = [
        folded(f"{run.name}/config.yaml", f'<pre tabindex="0">{escape(run.config_text)}</pre>')
        for run in runs
        if run.config_text
    ]
    whole = (
        "".join(files) if len(files) <= _FEW else folded(f"config.yaml of {len(files)} runs", "".join(files))
    )
    return _same(runs, [run.config for run in runs]) + whole


def _metrics(runs: Sequence[RunFiles]) -> str:
    metrics = comparison.metrics(runs)
    if not metrics:
        return '<p class="soft">There are none yet.</p>'
    if len(runs) == 1:
        rows = comparison.metric_rows(metrics)
        return html_table("metric", ["last", "best", "at step"], rows, "number")
    columns = [title for metric in metrics for title in (metric.title, "best")]
    names = run_names(runs)
    rows = [
        (names[i], [cell for metric in metrics for cell in _last_and_best(metric, i)])
        for i in comparison.ranking(runs)
    ]
    return html_table("run", columns, rows, "number") + _directions(metrics)


def _last_and_best(metric: Metric, run: int) -> list[str]:
    last, best = metric.scores[run]
    text = format_point(best)
    return [
        format_point(last),
        Html(f'<span class="best">{text}</span>') if run in metric.winners else text,
    ]


def _directions(metrics: Sequence[Metric]) -> str:
    """What the order and the stars stand on."""
    known = {True: "higher is better", False: "lower is better"}
    first = metrics[0].higher_is_better
    said = "" if first is None else f"Sorted by {metrics[0].title}: {known[first]}. "
    said += "Of each metric its last and its best value; ★ marks the best run."
    unknown = ", ".join(metric.title for metric in metrics if metric.higher_is_better is None)
    said += f" Not marked, for it is not known which way is better: {unknown}." if unknown else ""
    return f'<p class="soft">{escape(said)}</p>'


def _devices(runs: Sequence[RunFiles]) -> str:
    devices = [(run, name, facts) for run in runs for name, facts in comparison.devices(run).items()]
    columns = list(dict.fromkeys(column for _, _, facts in devices for column in facts))
    several = len(runs) > 1
    rows = [
        (f"{run.name}: {name}" if several else name, [facts.get(column) for column in columns])
        for run, name, facts in devices
    ]
    every = html_table("device", columns, rows, "number") if rows else ""
    return (
        every if len(runs) <= _FEW or not rows else folded(f"{len(rows)} devices of {len(runs)} runs", every)
    )


def _details(runs: Sequence[RunFiles]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.details)
    rows = [(name, [format_point(run.details.get(name)) for run in runs]) for name in names]
    return (
        folded(f"last values of {len(rows)} names", html_table("name", run_names(runs), rows, "number"))
        if rows
        else ""
    )


def _commands(runs: Sequence[RunFiles]) -> str:
    blocks = []
    for name, run in zip(run_names(runs), runs, strict=True):
        if run.command:
            text = f'<pre tabindex="0" aria-label="command">{escape(run.command)}</pre>'
            copy = '<button class="copy script-only" type="button">copy</button>'
            title = f"<p>{name}</p>" if len(runs) > 1 else ""
            blocks.append(f'{title}<div class="command">{text}{copy}</div>')
    every = "".join(blocks)
    return every if len(blocks) <= _FEW else folded(f"the commands of {len(blocks)} runs", every)
