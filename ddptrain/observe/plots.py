"""plots/: the run's curves and its newest figures, for those who would rather look."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ddptrain.observe.jsonl import read_lines
from ddptrain.observe.observer import End, Evaluated, Log, Observer, Saved, Start
from ddptrain.protocols import ConfusionMatrix, Curves, Figure, Picture, TextSample

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_POSITION = ("step", "epoch", "samples", "split")
_BLUE, _ORANGE, _GREY = "#2b6cb0", "#dd6b20", "#718096"


@final
class Plots(Observer):
    """Writes pictures and texts at each evaluation; draws the rest when the run ends, curves from
    metrics.jsonl, so a resumed run shows all of itself."""

    def __init__(self, metrics: Path, folder: Path) -> None:
        self._metrics = metrics
        self._folder = folder
        self._figures: dict[str, Figure] = {}

    def start(self, event: Start) -> None:
        pass

    def log(self, event: Log) -> None:
        pass

    def evaluated(self, event: Evaluated) -> None:
        self._figures = dict(event.figures)
        self._folder.mkdir(exist_ok=True)
        for name, figure in event.figures.items():
            if isinstance(figure, TextSample):
                (self._folder / f"{name}.txt").write_text(figure.text, errors="replace")
            elif isinstance(figure, Picture):
                write_picture(figure, self._folder / f"{name}.png")

    def saved(self, event: Saved) -> None:
        pass

    def end(self, event: End) -> None:
        lines = read_lines(self._metrics)
        if not lines:
            return
        self._folder.mkdir(exist_ok=True)
        _saved(draw_curves(lines), self._folder / "curves.png")
        for name, figure in self._figures.items():
            if isinstance(figure, ConfusionMatrix | Curves):
                _saved(draw_figure(figure), self._folder / f"{name}.png")


def draw_curves(lines: Sequence[dict[str, Any]]) -> "Drawing":
    """Every logged value against epochs, training and validation of one name in one panel."""
    seen = dict.fromkeys(name for line in lines for name in line)
    names = [name for name in seen if name not in _POSITION and "/" not in name]
    columns = 2 if len(names) in (2, 4) else min(3, len(names))
    rows = -(-len(names) // columns)
    drawing = _new(4.2 * columns, 3.1 * rows)
    for i, name in enumerate(names):
        axes = drawing.add_subplot(rows, columns, i + 1)
        for split, colour in (("train", _BLUE), ("valid", _ORANGE)):
            points = [(x["epoch"], x[name]) for x in lines if x["split"] == split and x.get(name) is not None]
            if points:
                mark = "o" if len(points) <= 20 else None
                axes.plot(*zip(*points, strict=True), color=colour, label=split, marker=mark, markersize=3)
        axes.set_title(name, fontsize=11, loc="left")
        axes.set_xlabel("epoch", color=_GREY)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    drawing.tight_layout()
    return drawing


def write_picture(picture: Picture, path: Path) -> None:
    """As PNG, whole or not at all: it may be looked at while it is written."""
    from torchvision.transforms.v2.functional import to_pil_image

    aside = path.with_suffix(".tmp")
    to_pil_image(picture.pixels).save(aside, format="PNG")
    aside.replace(path)


def draw_figure(figure: ConfusionMatrix | Curves) -> "Drawing":
    """A figure of numbers, drawn."""
    return _drawn_curves(figure) if isinstance(figure, Curves) else _drawn_matrix(figure)


def _drawn_curves(curves: Curves) -> "Drawing":
    drawing = _new(6.0, 5.0)
    axes = drawing.add_subplot()
    for name, points in curves.lines.items():
        axes.plot(*zip(*points, strict=True), label=name)
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel=curves.x, ylabel=curves.y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    drawing.tight_layout()
    return drawing


def _drawn_matrix(matrix: ConfusionMatrix) -> "Drawing":
    """Shares of each true class by prediction; numbers are counts where there are few classes."""
    size = len(matrix.classes)
    totals = [max(sum(row), 1) for row in matrix.counts]
    shares = [[n / total for n in row] for row, total in zip(matrix.counts, totals, strict=True)]
    side = max(4.5, min(0.5 * size + 2, 14))
    drawing = _new(side + 0.8, side)
    axes = drawing.add_subplot()
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    drawing.colorbar(picture, ax=axes, shrink=0.8, label="share of the true class")
    if size <= 25:
        axes.set_xticks(range(size), matrix.classes, rotation=45, ha="right", fontsize=9)
        axes.set_yticks(range(size), matrix.classes, fontsize=9)
        for true, row in enumerate(matrix.counts):
            for predicted, count in enumerate(row):
                if count:
                    shade = "white" if shares[true][predicted] > 0.5 else "black"
                    axes.text(predicted, true, str(count), ha="center", va="center", color=shade, fontsize=7)
    correct = sum(matrix.counts[i][i] for i in range(size))
    axes.set_title(f"{correct:,} of {sum(map(sum, matrix.counts)):,} right", fontsize=11, loc="left")
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    drawing.tight_layout()
    return drawing


def _new(width: float, height: float) -> "Drawing":
    from matplotlib.figure import Figure as Drawing  # not pyplot: no window, nothing global

    return Drawing(figsize=(width, height), dpi=110)


def _saved(drawing: "Drawing", path: Path) -> None:
    drawing.savefig(path)
