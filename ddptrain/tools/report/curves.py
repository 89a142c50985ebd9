"""Curves for a page: thinned, as SVG that needs no JavaScript, and as data for the script that redraws it."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from ddptrain.tools.report.run_files import CurvePoint, RunFiles

_MOST_POINTS = 1000  # Of a series
_MOST_IN_ALL = 12_000  # Of all runs' series of one name and split
_FEW = 30  # Points up to which each has a mark
_LARGEST = 1e300
COLOURS = 10
WIDTH, HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 42


class Series(NamedTuple):
    run: int
    split: str
    points: list[CurvePoint]


class Panel(NamedTuple):
    """All curves of one name."""

    name: str
    series: list[Series]
    is_thinned: bool


def panels(runs: Sequence[RunFiles]) -> list[Panel]:
    """One for each name that any run has logged: the loss and what is validated first."""
    names = dict.fromkeys(name for run in runs for name, split in run.curves if split == "valid")
    names |= dict.fromkeys(name for run in runs for name, _ in run.curves)
    most = max(100, min(_MOST_POINTS, _MOST_IN_ALL // len(runs)))
    curve_panels = []
    for name in sorted(names, key=lambda name: name != "loss"):
        whole = [
            Series(i, split, points)
            for i, run in enumerate(runs)
            for (logged, split), points in run.curves.items()
            if logged == name
        ]
        series = [Series(run, split, _drawable(thinned(points, most))) for run, split, points in whole]
        curve_panels.append(Panel(name, series, is_thinned=any(len(points) > most for _, _, points in whole)))
    return curve_panels


def thinned(points: Sequence[CurvePoint], most: int) -> list[CurvePoint]:
    """About so many of the points, in their order: of each of ``most / 2`` stretches the lowest and the
    highest, so that no spike is lost, and the first value of it that is not finite; and both ends."""
    if len(points) <= most:
        return list(points)
    kept = {0, len(points) - 1}
    stretches = max(1, most // 2)
    for k in range(stretches):
        stretch = range(k * len(points) // stretches, (k + 1) * len(points) // stretches)
        finite = [i for i in stretch if points[i].value is not None]
        if finite:
            kept.add(min(finite, key=lambda i: points[i].value or 0.0))
            kept.add(max(finite, key=lambda i: points[i].value or 0.0))
        if len(finite) < len(stretch):
            kept.add(next(i for i in stretch if points[i].value is None))
    return [points[i] for i in sorted(kept)]


def _drawable(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Within numbers whose differences are numbers, too."""
    return [
        point if point.value is None else point._replace(value=max(-_LARGEST, min(_LARGEST, point.value)))
        for point in points
    ]


def as_data(panel: Panel) -> dict[str, Any]:
    """For the page's script: columns of numbers, each with the digits that can be seen."""
    series = [
        {
            "run": run,
            "split": split,
            "step": [_digits(point.step, 9) for point in points],
            "epoch": [_digits(point.epoch, 6) for point in points],
            "value": [_digits(point.value, 6) for point in points],
        }
        for run, split, points in panel.series
    ]
    return {"name": panel.name, "series": series}


def span(panels: Sequence[Panel]) -> list[float]:
    """All steps that panels show, so that they show the same."""
    return [point.step for panel in panels for series in panel.series for point in series.points]


def as_svg(panel: Panel, names: Sequence[str], steps: Sequence[float]) -> str:
    """The curves against steps, both axes linear. Coordinates and classes are the page's script's, too.

    steps: from the least to the greatest of these goes the axis.
    """
    values = [point.value for s in panel.series for point in s.points if point.value is not None]
    label = f"{panel.name} against steps, {len(panel.series)} curves: {_curve_ends(panel, names)}"
    head = f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
    if not values:
        return (
            f'{head}<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no finite value</text></svg>'
        )
    across = _Axis(steps, _LEFT, WIDTH - _RIGHT)
    up = _Axis(values, HEIGHT - _BOTTOM, _TOP)
    elements = [head]
    for tick in up.ticks:
        y = up.at(tick)
        elements.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        elements.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(tick)}</text>')
    for tick in across.ticks:
        elements.append(
            f'<text x="{across.at(tick):.1f}" y="{HEIGHT - 24}" text-anchor="middle">{_tick(tick)}</text>'
        )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    elements.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    for series in panel.series:
        elements.append(_lines(series, across, up, several=len(names) > 1))
    return "".join([*elements, "</svg>"])


def classes(run: int, split: str, several: bool) -> str:
    """By colour: the run, or the split where there is one run only."""
    colour = run if several else int(split == "valid")
    return f"c{colour % COLOURS} d{colour // COLOURS % 3} {'valid' if split == 'valid' else 'train'}"


class _Axis:
    """A linear scale from values to pixels, with a little room."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        if low == high:
            room = abs(low) * 0.05 or 1.0
            low, high = low - room, high + room
        self._low, self._span = low, (high - low) or 1.0
        self._start, self._end = start, end
        self.ticks = ticks(low, high)

    def at(self, value: float) -> float:
        share = (value - self._low) / self._span
        return self._start + share * (self._end - self._start)


def ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers between two."""
    span = high - low
    if not (span / 4 > 0 and math.isfinite(span)):
        return [low]
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next((unit * k for k in (1, 2, 5, 10) if span / (unit * k) <= 6), unit * 10)
    if step == 0:
        return [low]
    first = math.ceil(low / step)
    return [(first + k) * step for k in range(8) if (first + k) * step <= high + step * 1e-9]


def _lines(series: Series, across: _Axis, up: _Axis, several: bool) -> str:
    """A curve breaks where a value is not finite."""
    pieces: list[list[str]] = [[]]
    for point in series.points:
        if point.value is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{across.at(point.step):.1f},{up.at(point.value):.1f}")
    name = classes(series.run, series.split, several)
    elements = [f'<polyline points="{" ".join(piece)}"/>' for piece in pieces if len(piece) > 1]
    marked = len(series.points) <= _FEW
    for place in (place for piece in pieces for place in piece if marked or len(piece) == 1):
        x, _, y = place.partition(",")
        elements.append(f'<circle cx="{x}" cy="{y}" r="2.2"/>')
    return f'<g class="series {name}">{"".join(elements)}</g>'


def _curve_ends(panel: Panel, names: Sequence[str]) -> str:
    """The ends of the curves, for those who can't see them."""
    ends = []
    for run, split, points in panel.series[:8]:
        value = points[-1].value
        ends.append(f"{names[run]} {split} ends at {'no finite value' if value is None else f'{value:.4g}'}")
    return ", ".join(ends)


def _tick(value: float) -> str:
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if limit <= size < 1e12:
            return f"{value / limit:.4g}{letter}"
    if 0 < size < 1e-3 or size >= 1e12:
        digits, _, exponent = f"{value:.3e}".partition("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:.6g}"


def _digits(value: float | None, count: int) -> float | None:
    if value is None:
        return None
    short = float(f"{value:.{count}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
