"""Draws docs/images/floors.png from the imports that there are: ``python -m tests.structure.draw_floors``."""

from collections import Counter

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.structure.import_graph import FILES, FLOORS, ROOT, floor_of, imports

LINE, FILL, ARROW = "#2b6cb0", "#ebf4fb", "#90a4b4"


def arrows() -> Counter[tuple[str, str]]:
    """How many imports lead from a floor to another one."""
    pairs = [(floor_of(file), floor_of(other)) for file, others in imports().items() for other in others]
    return Counter(pair for pair in pairs if pair[0] != pair[1])


def draw() -> Figure:
    """The floors one above the other; the thicker a curve, the more imports lead down it."""
    figure = Figure(figsize=(9, 0.62 * len(FLOORS) + 0.4), layout="constrained")
    axes: Axes = figure.add_subplot()
    files = Counter(map(floor_of, FILES))
    for height, floor in enumerate(FLOORS):
        axes.barh(height, 4, height=0.62, color=FILL, edgecolor=LINE)
        axes.text(
            0.15, height, f"{floor}/" if floor != "text" else "errors, text, keys, ...", va="center", size=11
        )
        axes.text(3.85, height, f"{files[floor]} files", va="center", ha="right", size=8, color="#4a5568")
    for (above, below), count in sorted(arrows().items()):
        high, low = FLOORS.index(above), FLOORS.index(below)
        axes.annotate(
            "", xy=(4, low), xytext=(4, high),
            arrowprops={
                "arrowstyle": "-|>", "color": ARROW, "linewidth": 0.5 + count / 16, "alpha": 0.8,
                "connectionstyle": f"arc3,rad=-{0.25 + 0.03 * (high - low):.2f}",
            },
        )  # fmt: skip
    axes.set_xlim(-0.1, 8)
    axes.set_ylim(-0.6, len(FLOORS) - 0.4)
    axes.axis("off")
    return figure


if __name__ == "__main__":
    draw().savefig(ROOT / "docs/images/floors.png", dpi=110)
