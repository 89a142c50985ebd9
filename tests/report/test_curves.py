"""Curves on a page: thinned without losing what stands out, drawn with what can be read off them."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.tools.report.curves import as_data, as_svg, panels, span, thinned, ticks
from ddptrain.tools.report.run_files import CurvePoint, RunFiles

VALUES = st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=400)


def points_of(values: list[float | None]) -> list[CurvePoint]:
    return [CurvePoint(i, i / 10, value) for i, value in enumerate(values)]


def run_with(name: str, values: list[float | None], split: str = "train") -> RunFiles:
    return RunFiles(Path(name), name, curves={("loss", split): points_of(values)})


@given(VALUES, st.integers(2, 100))
def test_no_extreme_of_any_stretch_is_lost(values: list[float | None], most: int) -> None:
    points = points_of(values)
    kept = thinned(points, most)
    assert kept == sorted(kept, key=lambda point: point.step)
    assert set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    if len(points) <= most:
        assert kept == points
        return
    assert len(kept) <= 3 * (most // 2) + 2
    stretches = most // 2
    for k in range(stretches):
        stretch = points[k * len(points) // stretches : (k + 1) * len(points) // stretches]
        finite = [point.value for point in stretch if point.value is not None]
        here = [point.value for point in kept if point in stretch]
        if finite:
            assert min(finite) in here
            assert max(finite) in here
        if len(finite) < len(stretch):
            assert None in here


def test_ten_thousand_points_become_about_a_thousand() -> None:
    values: list[float | None] = [1.0] * 10_000
    values[7777] = 50.0
    [panel] = panels([run_with("a", values)])
    [series] = panel.series
    assert panel.is_thinned
    assert len(series.points) <= 1002
    assert 50.0 in [point.value for point in series.points]


@given(VALUES)
def test_every_drawing_is_of_finite_numbers(values: list[float | None]) -> None:
    drawn = panels([run_with("a", values), run_with("b", [2.0], "valid")])
    svg = as_svg(drawn[0], ["a", "b"], span(drawn))
    assert not re.search(r'[" ,-](nan|inf)', svg)
    assert svg.count("<g class=") == 2
    assert len(as_data(drawn[0])["series"][0]["value"]) == len(values)


def test_a_curve_breaks_where_it_is_not_finite() -> None:
    drawn = panels([run_with("a", [1.0, 2.0, None, 3.0, 4.0, None, 5.0])])
    svg = as_svg(drawn[0], ["a"], span(drawn))
    assert svg.count("<polyline") == 2
    assert svg.count("<circle") == 5
    [series] = as_data(drawn[0])["series"]
    assert series["value"] == [1, 2, None, 3, 4, None, 5]


def test_nothing_finite_is_said_so() -> None:
    drawn = panels([run_with("a", [None, None])])
    assert "no finite value" in as_svg(drawn[0], ["a"], span(drawn))


@given(
    st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300),
    st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300),
)
def test_ticks_lie_within(one: float, other: float) -> None:
    low, high = sorted((one, other))
    found = ticks(low, high)
    room = (high - low) * 1e-6 + abs(low) * 1e-9
    assert len(found) <= 8
    assert all(low - room <= tick <= high + room for tick in found)


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (95, 105, [96, 98, 100, 102, 104])]
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)
