"""What tells an exported list of boxes from eager's: the check before an export is called done."""

import math

import pytest
import torch
from torch import Tensor

from ddptrain.api.recipe import relative_difference
from ddptrain.recipes.detection.deploy import difference_of_lists

LEAST = 0.25


def listed(*rows: tuple[float, ...], most: int = 5) -> Tensor:
    """float32 (1, most, 6): x1, y1, x2, y2, score, class."""
    table = torch.zeros(1, most, 6)
    table[0, : len(rows)] = torch.tensor(rows).view(-1, 6)
    return table


CAT = (10.0, 10.0, 50.0, 50.0, 0.9, 0.0)
DOG = (20.0, 60.0, 90.0, 100.0, 0.6, 1.0)


def changed(row: tuple[float, ...], place: int, value: float) -> tuple[float, ...]:
    return (*row[:place], value, *row[place + 1 :])


def test_equal_lists_differ_by_nothing() -> None:
    assert difference_of_lists(listed(CAT, DOG), listed(CAT, DOG), LEAST) == 0


def test_two_empty_lists_compare_nothing() -> None:
    assert difference_of_lists(listed(), listed(), LEAST) is None


def test_nor_do_two_answers_in_one_place() -> None:
    """Rounding may decide which of two nearly equal ones gets it."""
    assert difference_of_lists(listed(CAT, most=1), listed(DOG, most=1), LEAST) is None
    difference = difference_of_lists(listed(CAT, most=1), listed(changed(CAT, 1, 10.001), most=1), LEAST)
    assert difference is not None
    assert 0 < difference < 1e-4


@pytest.mark.parametrize(
    ("theirs", "least"),
    [
        ((CAT,), 1e-3),
        ((), 1e-3),
        ((CAT, DOG, (0.0, 60.0, 20.0, 80.0, 0.5, 1.0)), 1e-3),
        ((CAT, changed(DOG, 0, 30.0)), 0.09),
        ((changed(CAT, 0, math.nan), DOG), math.nan),
        ((CAT, changed(DOG, 0, math.nan)), math.nan),
        ((CAT, changed(DOG, 4, 0.5)), 0.09),
        ((CAT, changed(DOG, 5, 2.0)), 1.0),
    ],
    ids=[
        "one missing",
        "all missing",
        "one too many",
        "a side",
        "NaN",
        "NaN in the last",
        "a score",
        "a class",
    ],
)
def test_a_wrong_list_is_seen(theirs: tuple[tuple[float, ...], ...], least: float) -> None:
    """By either side."""
    for pair in ((listed(CAT, DOG), listed(*theirs)), (listed(*theirs), listed(CAT, DOG))):
        difference = difference_of_lists(*pair, LEAST)
        assert difference is not None
        assert not difference < least
        assert math.isnan(difference) == math.isnan(least)


def test_rounding_is_not_a_difference() -> None:
    """The order of equals, which of two equally sure doubles stays, and who just reaches the least score."""
    twin = changed(CAT, 0, 12.0)
    assert difference_of_lists(listed(CAT, twin, DOG), listed(twin, CAT, DOG), LEAST) == 0
    edge = changed(DOG, 4, LEAST + 1e-7)
    assert difference_of_lists(listed(CAT, edge), listed(CAT), LEAST) == 0
    nudged = changed(CAT, 1, 10.0001)
    difference = difference_of_lists(listed(nudged, DOG), listed(CAT, DOG), LEAST)
    assert difference is not None
    assert 0 < difference < 1e-5


def test_a_tensor_that_is_no_number_is_no_match() -> None:
    ours = torch.tensor([1.0, 2.0])
    assert relative_difference(ours, torch.tensor([1.0, 2.02])) == pytest.approx(0.01)
    assert math.isnan(relative_difference(ours, torch.tensor([1.0, math.nan])))
