"""The parallel coordinates of a sweep: a line for each job, through its settings and its results.

Optuna's own is experimental: one far result leaves nothing else to be seen, and a ``$`` in a value becomes a
formula. The report of a grid would need Optuna.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import quantiles
from typing import Any

from ddptrain.text import counted, fonts_for, replace_file
from ddptrain.tools.sweep.objectives import pareto_front
from ddptrain.tools.sweep.outcomes import Outcomes
from ddptrain.tools.sweep.ranges import Choice, Range

_BEST, _TEXT = "#dd6b20", "#2d3748"
_LONGEST = 22
_MOST = 8
"""Settings that are drawn."""
_DECADES = 100.0
"""Results above 0 that span more than this are drawn by their logarithms."""
_FAR = 3.0
"""What is worse than the middle half by more than so many times its width is drawn at the axis' end."""
_FEW = 8


@dataclass(frozen=True, slots=True)
class _Axis:
    title: str
    places: Sequence[float]
    """Of each job, in [0, 1]."""
    ticks: Sequence[tuple[float, str]]


def draw_parallel(outcomes: Outcomes, importances: Mapping[str, float], path: Path) -> None:
    """Draw it into a PNG: the settings by their importances, then the results, whose better end is up. The
    best jobs are orange; of the others the darker the better. Raises OSError."""
    from matplotlib import colormaps, rc_context
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    shown = sorted(outcomes.ranges, key=lambda each: -importances.get(each.name, 0.0))[:_MOST]
    axes = [_setting(each, [point[each.name] for point in outcomes.points], importances) for each in shown]
    for i, (name, way) in enumerate(outcomes.objectives.items()):
        axes.append(
            _result(f"{_short(name)}\n{way}", [scores[i] for scores in outcomes.scores], way == "min")
        )
    best = pareto_front(dict(enumerate(outcomes.scores)))
    order = sorted(range(len(outcomes.jobs)), key=lambda i: (i in best, outcomes.scores[i]))
    names = "".join([axis.title + text for axis in axes for _, text in axis.ticks])
    with rc_context({"font.family": [font.family for font in fonts_for(names)]}):
        drawing = Figure(figsize=(max(5.0, 2.0 * len(axes)), 4.8))
        plot = drawing.add_subplot()
        lines = [[(x, axis.places[i]) for x, axis in enumerate(axes)] for i in order]
        blues = colormaps["Blues"]([0.25 + 0.65 * rank / len(order) for rank in range(len(order))])
        colours = [_BEST if i in best else (*blues[rank, :3], 0.75) for rank, i in enumerate(order)]
        widths = [2.2 if i in best else 1.1 for i in order]
        plot.add_collection(LineCollection(lines, colors=colours, linewidths=widths))
        for x, axis in enumerate(axes):
            plot.axvline(x, color=_TEXT, linewidth=1.0, zorder=3)
            as_it_is: dict[str, Any] = {"parse_math": False, "color": _TEXT}  # a $ is no formula
            plot.text(x, 1.06, axis.title, ha="center", va="bottom", fontsize=10, **as_it_is)
            for y, text in axis.ticks:
                white: dict[str, Any] = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.0}
                plot.plot([x - 0.015, x + 0.015], [y, y], color=_TEXT, linewidth=1.0, zorder=4)
                plot.text(x + 0.03, y, text, va="center", fontsize=8.5, zorder=5, bbox=white, **as_it_is)
        plot.set(xlim=(-0.15, len(axes) - 0.55), ylim=(-0.04, 1.04))
        plot.axis("off")
        numbers = sorted(outcomes.jobs[i].folder for i in best)
        which = f"job {numbers[0]}" if len(numbers) == 1 else f"the best {len(numbers)}"
        plot.set_title(
            f"{counted(len(order), 'job')}, the darker the better; orange: {which}",
            fontsize=11,
            loc="left",
            pad=46,
        )
        png = BytesIO()
        drawing.savefig(png, format="png", dpi=150, bbox_inches="tight")
    path.parent.mkdir(exist_ok=True)
    replace_file(path, png.getvalue())


def _setting(each: Range, texts: Sequence[str], importances: Mapping[str, float]) -> _Axis:
    title = _short(each.name)
    if each.name in importances:
        title += f"\nimportance {importances[each.name]:.0%}"
    if isinstance(each, Choice):
        places = {text: i / (len(each.texts) - 1) for i, text in enumerate(each.texts)}
        return _Axis(title, [places[text] for text in texts], [(y, _short(t)) for t, y in places.items()])
    numbers = [float(text) for text in texts]
    marked = sorted(set(numbers))
    if len(marked) > _FEW:
        marked = _marks(each.low, each.high, each.log)
    ticks = [(_place(number, each.low, each.high, each.log), f"{number:g}") for number in marked]
    return _Axis(title, [_place(number, each.low, each.high, each.log) for number in numbers], ticks)


def _result(title: str, scores: Sequence[float], is_min: bool) -> _Axis:
    sign = -1 if is_min else 1
    quarter, _, third = quantiles(scores, n=4, method="inclusive")
    worst = min(scores)
    if third > quarter:
        worst = max(worst, quarter - _FAR * (third - quarter))
    low, high = sign * worst, sign * max(scores)
    clipped = [sign * max(score, worst) for score in scores]
    log = min(low, high) > 0 and max(low, high) / min(low, high) >= _DECADES
    if low == high:
        return _Axis(title, [1.0 for _ in scores], [(1.0, f"{high:.4g}")])
    ticks = [
        (_place(mark, low, high, log), f"{mark:.4g}") for mark in _marks(min(low, high), max(low, high), log)
    ]
    if worst > min(scores):
        beyond = "\N{GREATER-THAN OR EQUAL TO}" if is_min else "\N{LESS-THAN OR EQUAL TO}"
        ticks = [(0.0, f"{beyond} {low:.4g}"), *(tick for tick in ticks if tick[0] > 0.06)]
    return _Axis(title, [_place(value, low, high, log) for value in clipped], ticks)


def _place(value: float, low: float, high: float, log: bool) -> float:
    """In [0, 1]; low may be the larger one."""
    if log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low)


def _marks(low: float, high: float, log: bool) -> list[float]:
    """Round numbers from low to high."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    locator = LogLocator(subs=(1.0, 3.0), numticks=12) if log else MaxNLocator(5)
    return [float(mark) for mark in locator.tick_values(low, high) if low <= mark <= high]


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"
