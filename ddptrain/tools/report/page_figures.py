"""What a report draws: curves, where the time went, pictures."""

from collections.abc import Sequence
from html import escape

from ddptrain.observe.clock import clock
from ddptrain.tools.report.comparison import (
    PARTS,
    distinguishing_settings,
    format_value,
    parts_of,
    time_split,
)
from ddptrain.tools.report.curves import Panel, as_svg, span
from ddptrain.tools.report.embedded import Embedded
from ddptrain.tools.report.markup import colour_key, html_table, run_names, run_prefix
from ddptrain.tools.report.run_files import RunFiles

_WORDS = {"data": "waiting for data", "copy": "copying", "all_reduce": "all-reduce", "other": "the rest"}
"""Parts of the time whose name is no word for people."""
_THINNED = (
    " Long curves are thinned: each stretch keeps its lowest and its highest value, so no spike is lost."
)


def curves(runs: Sequence[RunFiles], panels: Sequence[Panel]) -> str:
    """The panels, and what the page's script needs to change them."""
    if not panels:
        return ""
    several = len(runs) > 1
    switches = _legend(runs) if several else ""
    for name, pressed in (("step", "true"), ("epoch", "false")):
        looks = f'class="across switch" aria-pressed="{pressed}"'
        switches += f'<button type="button" {looks} data-across="{name}">against {name}s</button>'
    splits = '<span class="key k0"></span>training &nbsp; <span class="key k1"></span>validation. &nbsp;'
    splits = "Thin lines: training. Bold ones: validation." if several else splits
    thinned = _THINNED if any(panel.is_thinned for panel in panels) else ""
    steps = span(panels)
    log = '<button class="log switch script-only" type="button" aria-pressed="false">log</button>'
    names = [run.name for run in runs]
    figures = "".join(
        f'<figure id="panel-{i}"><div class="panel-head"><h3>{escape(panel.name)}</h3>{log}</div>'
        f"{as_svg(panel, names, steps)}</figure>"
        for i, panel in enumerate(panels)
    )
    return (
        '<div class="controls script-only" role="group" aria-label="What the curves show">'
        f'{switches}</div><p class="soft">{splits}{thinned}</p><div class="panels">{figures}</div>'
    )


def _legend(runs: Sequence[RunFiles]) -> str:
    """A button for each run, which switches it off and on."""
    words = distinguishing_settings(runs)
    return "".join(
        f'<button class="run" type="button" data-run="{i}" aria-pressed="true">{colour_key(i, runs)}'
        f'{escape(run.name)} <span class="soft">{escape(words[i])}</span></button>'
        for i, run in enumerate(runs)
    )


def where_time_went(runs: Sequence[RunFiles]) -> str:
    """A bar for each run, of its own whole time, and the numbers."""
    splits = [time_split(run) for run in runs]
    parts = parts_of(splits)
    if not parts:
        return ""
    several = len(runs) > 1
    bars, rows = [], []
    for run, name, split in zip(runs, run_names(runs), splits, strict=True):
        whole = sum(split.values())
        bars.append(f"<div>{name}</div>" * several + _bar(run, split))
        cells = [
            f"{split[part] / whole:.0%}, {format_value(split[part])} s"
            if part in split and whole > 0
            else None
            for part in parts
        ]
        rows.append((name, [*cells, clock(whole) if split else None]))
    legend = "".join(
        f'<span><span class="key k{_colour(part)}"></span>{escape(_word(part))}</span>' for part in parts
    )
    numbers = html_table("run", [*map(_word, parts), "whole"], rows, "number")
    looks = "split" if several else "split alone"
    return f'<div class="legend">{legend}</div><div class="{looks}">{"".join(bars)}</div>{numbers}'


def _bar(run: RunFiles, split: dict[str, float]) -> str:
    whole = sum(split.values()) or 1.0
    at, pieces = 0.0, []
    for name, seconds in split.items():
        wide = 1000 * seconds / whole
        tip = escape(f"{_word(name)}: {seconds:,.1f} s, {seconds / whole:.1%}")
        place = f'x="{at:.1f}" y="0" width="{wide:.1f}" height="20"'
        pieces.append(f'<rect class="f{_colour(name)}" {place}><title>{tip}</title></rect>')
        at += wide
    shares = ", ".join(f"{_word(name)} {seconds / whole:.0%}" for name, seconds in split.items())
    label = escape(f"{run.name}: {shares or 'not measured'}")
    view = 'viewBox="0 0 1000 20" preserveAspectRatio="none" role="img"'
    return f'<svg {view} aria-label="{label}">{"".join(pieces)}</svg>'


def _colour(part: str) -> int:
    """The last one is grey, for the rest."""
    return PARTS.index(part) if part in PARTS else len(PARTS)


def _word(part: str) -> str:
    return _WORDS.get(part, part)


def pictures(runs: Sequence[RunFiles], embedded: Embedded) -> str:
    """Of several runs, those of one name beside each other."""
    rows = [
        "".join(
            f"<figure>{what}<figcaption>{run_prefix(runs[i], runs)}{escape(name)}</figcaption></figure>"
            for i, what in by_run.items()
        )
        for name, by_run in (*embedded.pictures.items(), *embedded.texts.items())
    ]
    rows = rows if len(runs) > 1 else ["".join(rows)]
    blocks = [f'<div class="pictures">{row}</div>' for row in rows if row]
    if embedded.skipped:
        blocks.append(f'<p class="soft">Not shown: {escape(", ".join(embedded.skipped))}.</p>')
    return "".join(blocks)
