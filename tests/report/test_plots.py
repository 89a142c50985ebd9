"""plots/*.png: what is drawn of lines and figures, and that odd ones are drawn at all."""

import math
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.observe.drawing import draw_curves, draw_lines, draw_matrix, moving_median


def lines_of(count: int, **values: Any) -> list[dict[str, Any]]:
    """``values``: functions of a share of the run."""
    return [
        {"step": i, "epoch": i / 10, "samples": 64 * i, "split": "train"}
        | {name: value((i + 1) / count) for name, value in values.items()}
        for i in range(count)
    ]


def drawn(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return {axes.get_title("left"): axes for axes in draw_curves(lines).axes}


def test_a_noisy_curve_is_drawn_faintly_below_its_median() -> None:
    dice = random.Random(0)
    axes = drawn(lines_of(500, loss=lambda x: 2 - x + dice.random(), lr=lambda x: 1 - x))
    raw, smooth = axes["loss"].lines
    assert raw.get_alpha() < 0.5
    assert smooth.get_label() == "train, median of 17"
    assert len(axes["lr"].lines) == 1


def test_a_loss_over_decades_has_a_logarithmic_axis() -> None:
    axes = drawn(
        lines_of(50, loss=lambda x: math.exp(-9 * x), lr=lambda x: math.exp(-9 * x), wide=lambda x: x)
    )
    assert axes["loss"].get_yscale() == "log"
    assert axes["lr"].get_yscale() == "linear"
    assert drawn(lines_of(50, loss=lambda x: 1 - x))["loss"].get_yscale() == "linear"


def test_panels_begin_with_the_loss_and_show_the_same_epochs() -> None:
    lines = lines_of(50, lr=lambda x: x, loss=lambda x: 1 - x)
    lines.append({"step": 50, "epoch": 5.0, "samples": 1, "split": "valid", "accuracy": 0.5, "AP/owl": 0.1})
    axes = drawn(lines)
    assert list(axes) == ["loss", "accuracy", "lr"]
    assert len({each.get_xlim() for each in axes.values()}) == 1


@pytest.mark.parametrize("value", [None, 0.0, -1.0, 1e100])
def test_odd_values_are_drawn(value: float | None, tmp_path: Path) -> None:
    lines = lines_of(100, loss=lambda x: value if x > 0.5 else 2.0)
    draw_curves(lines).savefig(tmp_path / "a.png")
    draw_curves(lines[-1:]).savefig(tmp_path / "b.png")


def test_ten_thousand_lines_are_soon_drawn(tmp_path: Path) -> None:
    dice = random.Random(0)
    lines = lines_of(
        10_000, loss=lambda x: dice.random(), lr=lambda x: 1 - x, grad_norm=lambda x: dice.random()
    )
    draw_curves(lines[:2])  # imports matplotlib
    began = time.process_time()
    draw_curves(lines).savefig(tmp_path / "curves.png", dpi=200)
    assert time.process_time() - began < 10


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=80), st.integers(1, 40))
def test_the_moving_median(values: list[float], half: int) -> None:
    for i, found in moving_median(values, half):
        window = [value for value in values[max(0, i - half) : i + half + 1] if math.isfinite(value)]
        assert min(window) <= found <= max(window)
        assert sum(value < found for value in window) <= len(window) / 2
        assert sum(value > found for value in window) <= len(window) / 2


def test_a_matrix_says_percent_of_each_true_class() -> None:
    drawing = draw_matrix([[3, 1], [0, 999]], ["cat", "dog"])
    axes = drawing.axes[0]
    assert [text.get_text() for text in axes.texts] == ["75", "3", "25", "1", "100", "999"]
    assert axes.get_title("left") == "1,002 of 1,003 right (99.9%)"


@pytest.mark.parametrize("size", [1, 12, 25, 200])
def test_any_number_of_classes(size: int, tmp_path: Path) -> None:
    counts = [[int(i == j) for j in range(size)] for i in range(size)]
    drawing = draw_matrix(counts, [f"a class with a long name {i}" for i in range(size)])
    drawing.savefig(tmp_path / "matrix.png")
    axes = drawing.axes[0]
    assert len(axes.get_xticklabels()) <= 60
    assert bool(axes.texts) == (size <= 25)


def test_a_matrix_of_nothing(tmp_path: Path) -> None:
    draw_matrix([[0, 0], [0, 0]], ["a", "b"]).savefig(tmp_path / "matrix.png")


def test_curves_tell_their_area() -> None:
    lines = {"IoU 0.50": [(0.0, 1.0), (1.0, 1.0)], "IoU 0.90": [(0.0, 1.0), (1.0, 0.0)], "none": []}
    axes = draw_lines(lines, "recall", "precision").axes[0]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()][:2] == [
        "IoU 0.50  (area 1.000)",
        "IoU 0.90  (area 0.500)",
    ]
