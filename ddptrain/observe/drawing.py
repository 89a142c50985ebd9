"""Draws figures with matplotlib, in a process beside the training (`ddptrain.observe.drawer`)."""

import contextlib
import io
import math
import os
import select
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from ddptrain.observe.metrics_file import POSITION, read_lines
from ddptrain.text import fonts_for, letters_without_font

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

Counts = Sequence[Sequence[int]]
Lines = Mapping[str, Sequence[tuple[float, float]]]

_BLUE, _ORANGE = "#2b6cb0", "#dd6b20"
_DPI = 150
_MARKED = 20
"""Up to so many points each has a marker."""
_MANY = 60
"""From so many points on a noisy curve is smoothed."""
_DECADES = 100.0
"""The ratio of largest to smallest value from which an axis is logarithmic, for these:"""
_LOGARITHMIC = ("loss", "perplexity", "grad_norm")
_NUMBERED, _LABELS = 25, 60
"""A confusion matrix shows numbers up to so many classes, and at most so many class names."""
_IN_A_LEGEND = 8
_DASHES = ("-", "--", ":", "-.")
"""There are ten colours."""


def draw_curves(lines: Sequence[dict[str, Any]]) -> "Drawing":
    """Every logged value against epochs, training and validation of one name in one panel: the loss first,
    then the metrics of validation. A loss that spans decades has a logarithmic axis."""
    validated = {name for line in lines if line["split"] == "valid" for name in line}
    logged = dict.fromkeys(name for line in lines for name in line)
    names = [name for name in logged if name not in POSITION and "/" not in name]
    names.sort(key=lambda name: (name != "loss", name not in validated))
    columns = 2 if len(names) in (2, 4) else min(3, len(names))
    rows = -(-len(names) // columns)
    drawing = _new(4.2 * columns, 3.1 * rows)
    first, last = min(line["epoch"] for line in lines), max(line["epoch"] for line in lines)
    room = 0.03 * (last - first) or 0.5
    for i, name in enumerate(names):
        axes = drawing.add_subplot(rows, columns, i + 1)
        for split, colour in (("train", _BLUE), ("valid", _ORANGE)):
            points = [
                (line["epoch"], line[name]) for line in lines if line["split"] == split and name in line
            ]
            if points:
                _draw_curve(axes, points, split, colour)
        _style(axes, name)
        axes.set_xlim(first - room, last + room)
        _scale(axes, name, [line[name] for line in lines if line.get(name) is not None])
    drawing.tight_layout()
    return drawing


def _draw_curve(axes: "Axes", points: Sequence[tuple[float, float | None]], label: str, colour: str) -> None:
    """Draw a noisy curve faintly, with its moving median on top. Values that are not finite are gaps."""
    epochs = [epoch for epoch, _ in points]
    values = [math.nan if value is None else value for _, value in points]
    mark = "o" if len(points) <= _MARKED else None
    if not _is_noisy(values):
        axes.plot(epochs, values, color=colour, label=label, marker=mark, markersize=3.5, linewidth=1.5)
        return
    half = max(1, len(values) // 60)
    axes.plot(epochs, values, color=colour, alpha=0.25, linewidth=0.8)
    smooth = [(epochs[i], value) for i, value in moving_median(values, half)]
    label = f"{label}, median of {2 * half + 1}"
    axes.plot(*zip(*smooth, strict=True), color=colour, label=label, linewidth=1.8)


def moving_median(values: Sequence[float], half: int) -> list[tuple[int, float]]:
    """(index, median) of up to ``half`` values on either side, without nan, at about a thousand indices."""
    places = sorted({*range(0, len(values), max(1, len(values) // 1000)), len(values) - 1})
    windows = [(i, values[max(0, i - half) : i + half + 1]) for i in places]
    known = [(i, [value for value in window if math.isfinite(value)]) for i, window in windows]
    return [(i, median(window)) for i, window in known if window]


def _is_noisy(values: Sequence[float]) -> bool:
    """Whether a curve's total variation is over four times its range; on a log scale if all are positive."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < _MANY:
        return False
    if min(known) > 0:
        known = [math.log(value) for value in known]
    way = sum(abs(after - before) for before, after in pairwise(known))
    return way > 4 * (max(known) - min(known))


def _style(axes: "Axes", name: str) -> None:
    axes.set_title(name, fontsize=11, loc="left")
    axes.set_xlabel("epoch", fontsize=10)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


def _scale(axes: "Axes", name: str, values: Sequence[float]) -> None:
    spans = values and min(values) > 0 and max(values) / min(values) >= _DECADES
    if spans and any(word in name for word in _LOGARITHMIC):
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=True)


def draw_lines(lines: Lines, x: str, y: str) -> "Drawing":
    """Lines, with the area under those from 0 to 1 in the legend (of precision over recall: about the average
    precision)."""
    crowded = len(lines) > _IN_A_LEGEND
    drawing = _new(7.5 if crowded else 5.5, 4.6)
    axes = drawing.add_subplot()
    for i, (name, points) in enumerate(lines.items()):
        area = sum((right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in pairwise(points))
        spans = points and (points[0][0], points[-1][0]) == (0, 1)
        axes.plot(
            *zip(*points, strict=True),
            label=f"{name}  (area {area:.3f})" if spans else name,
            linewidth=1.6,
            linestyle=_DASHES[i // 10 % 4],
        )
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.set_xlabel(x, fontsize=10)
    axes.set_ylabel(y, fontsize=10)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if crowded:
        columns = -(-len(lines) // 30)
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1), ncols=columns)
    else:
        axes.legend(frameon=False, fontsize=9)
    drawing.tight_layout()
    return drawing


def draw_matrix(counts: Counts, classes: Sequence[str]) -> "Drawing":
    """A confusion matrix: percent of each true class, and counts if there is room."""
    size = len(classes)
    totals = [max(sum(row), 1) for row in counts]
    shares = [[100 * n / total for n in row] for row, total in zip(counts, totals, strict=True)]
    side = max(4.5, min(0.5 * size + 2, 12))
    drawing = _new(side + 0.8, side)
    axes = drawing.add_subplot()
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100, interpolation="nearest")
    bar = drawing.colorbar(picture, ax=axes, fraction=0.045, pad=0.03)
    bar.set_label("percent of the true class", fontsize=10)
    bar.ax.tick_params(labelsize=9)
    every = -(-size // _LABELS)
    letters = 10 if size <= 12 else 8 if size <= _NUMBERED else 6
    names = [str(name)[:24] for name in classes][::every]
    turned = 90 if size > _NUMBERED else 45 if max(map(len, names)) > 2 else 0
    axes.set_xticks(range(0, size, every), names, rotation=turned, fontsize=letters)
    for label in axes.get_xticklabels() if turned == 45 else ():
        label.set(ha="right", rotation_mode="anchor")
    axes.set_yticks(range(0, size, every), names, fontsize=letters)
    if size <= _NUMBERED:
        _write_numbers(axes, counts, shares)
    correct, whole = sum(counts[i][i] for i in range(size)), sum(map(sum, counts))
    axes.set_title(f"{correct:,} of {whole:,} right ({correct / max(whole, 1):.1%})", fontsize=11, loc="left")
    axes.set_xlabel("predicted", fontsize=10)
    axes.set_ylabel("true", fontsize=10)
    drawing.tight_layout()
    return drawing


def _write_numbers(axes: "Axes", counts: Counts, shares: Sequence[Sequence[float]]) -> None:
    roomy = len(counts) <= 12
    for true, row in enumerate(counts):
        for predicted, count in enumerate(row):
            if count:
                share = shares[true][predicted]
                percent = "<1" if share < 0.5 else f"{share:.0f}"
                colour = "white" if share > 50 else "black"
                up = 0.12 if roomy else 0
                place: dict[str, Any] = {"ha": "center", "va": "center", "color": colour}
                axes.text(predicted, true - up, percent, fontsize=9 if roomy else 6.5, **place)
                if roomy:
                    axes.text(predicted, true + 0.24, f"{count:,}", fontsize=5.5, **place)


def _new(width: float, height: float) -> "Drawing":
    from matplotlib.figure import Figure as Drawing  # not pyplot: no window, no global state

    return Drawing(figsize=(width, height), dpi=110)


def _png(drawing: "Drawing") -> bytes:
    written = io.BytesIO()
    drawing.savefig(
        written,
        format="png",
        dpi=_DPI,
        bbox_inches="tight",  # else what stands left of long names is cut off
        pad_inches=0.1,
        pil_kwargs={"compress_level": 1},
    )
    return written.getvalue()


class RenderedFigure(NamedTuple):
    """What is answered to a request. lacking: letters of its names that no font of the machine has. seconds:
    of a core, that it took."""

    png: bytes
    error: str = ""
    lacking: str = ""
    seconds: float = 0.0


def _render(request: tuple[Any, ...]) -> RenderedFigure:
    from matplotlib import rc_context

    kind, *arguments = request
    if kind == "curves":
        lines = read_lines(Path(arguments[0]))
        return RenderedFigure(_png(draw_curves(lines)) if lines else b"")
    names = [*map(str, arguments[0] if kind == "lines" else arguments[1])]
    lacking = letters_without_font("".join(names))
    names = [f"#{i}" if set(name) & set(lacking) else name for i, name in enumerate(names)]
    families = [font.family for font in fonts_for("".join(names))]
    with rc_context({"font.family": families, "text.parse_math": False}):  # a $ in a name is no formula
        if kind == "lines":
            drawing = draw_lines(dict(zip(names, arguments[0].values(), strict=True)), *arguments[1:])
        else:
            drawing = draw_matrix(arguments[0], names)
        return RenderedFigure(_png(drawing), lacking=lacking)


def main(descriptor: int) -> None:
    """Draw the requests that arrive on a connection, until it is closed."""
    os.nice(5)
    threading.Thread(target=_end_when_closed, args=[descriptor], daemon=True).start()
    line: Connection[Any, Any] = Connection(descriptor)
    _png(draw_matrix([[1, 0], [0, 1]], ["a", "b"]))  # loads fonts
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = line.recv()
            began = time.process_time()
            try:
                answer = _render(request)
            except Exception as error:
                answer = RenderedFigure(b"", f"{type(error).__name__}: {error}")
            answer = answer._replace(seconds=time.process_time() - began)
            line.send(tuple(answer))  # here this module is __main__, which the rank's is not


def _end_when_closed(descriptor: int) -> None:
    """Also while matplotlib is loading, which takes seconds on a busy machine."""
    poller = select.poll()
    poller.register(descriptor, 0)  # a hangup is told whatever is asked for
    poller.poll()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
