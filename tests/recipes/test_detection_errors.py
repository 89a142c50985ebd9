"""What a detector does wrong: in pairs, counts and curves, against cases that can be counted by hand."""

import pytest
import torch
from boxed import CLASSES, found_of, scenes_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.recipes.detection.errors import against_score, by_size, confusion, matched, worst
from ddptrain.recipes.detection.score import coco_scores

CAT, DOG, OWL = range(3)
LEFT, RIGHT, SMALL = [0.0, 0.0, 40.0, 40.0], [50.0, 0.0, 90.0, 40.0], [42.0, 42.0, 48.0, 48.0]


def shifted(box: list[float], by: float) -> list[float]:
    return [box[0] + by, box[1], box[2] + by, box[3]]


def test_objects_and_what_they_were_taken_for() -> None:
    pictures = [
        [(LEFT, CAT, False), (RIGHT, DOG, False)],
        [(LEFT, CAT, False), (SMALL, OWL, False)],
        [(LEFT, DOG, True)],
        [],
    ]
    found = [
        (0, LEFT, 0.9, CAT),
        (0, RIGHT, 0.8, OWL),  # another class
        (0, shifted(RIGHT, -5), 0.7, DOG),  # less near to the same object
        (1, LEFT, 0.2, CAT),  # not sure enough, so it is missed
        (1, shifted(SMALL, 4), 0.9, OWL),  # too far off
        (2, LEFT, 0.9, CAT),  # in a crowd: neither for nor against
        (3, LEFT, 0.9, CAT),
    ]
    of_pictures = list(matched(scenes_of(pictures), found_of(found)))
    counts = confusion(of_pictures, CLASSES)
    assert counts.classes == [*CLASSES, "background"]
    assert counts.counts == [
        [1, 0, 0, 1],  # cats: one found, one missed
        [0, 0, 1, 0],
        [0, 0, 0, 1],
        [1, 1, 1, 0],
    ]
    assert [one.mistakes for one in of_pictures] == [2, 3, 0, 1]
    assert worst(of_pictures, 2) == [1, 0]
    assert worst(of_pictures, 9) == [1, 0, 3]


def test_small_objects_come_first() -> None:
    pictures = [[(SMALL, CAT, False), (RIGHT, DOG, False)] for _ in range(10)]
    found = [(i, RIGHT, 0.9, DOG) for i in range(10)] + [(0, SMALL, 0.9, CAT)]
    [points] = by_size(list(matched(scenes_of(pictures), found_of(found)))).lines.values()
    assert len(points) == 10
    assert [share for _, share in points] == [0.5, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert points[0][0] == pytest.approx(6 / (90 * 50) ** 0.5)


def test_a_set_without_anything_to_match() -> None:
    of_pictures = list(matched(scenes_of([[], []]), found_of([])))
    assert by_size(of_pictures).lines == {"found": []}
    assert confusion(of_pictures, CLASSES).counts == [[0] * 4] * 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 99), st.booleans()), min_size=1, max_size=12, unique_by=lambda one: one[0]
    )
)
def test_curves_against_the_score_are_counted_by_hand(scored: list[tuple[int, bool]]) -> None:
    """Detections on objects and beside them, each with a score of its own."""
    pictures = [[(LEFT, CAT, False)] for _ in scored]
    found = [
        (i, LEFT if right else [60.0, 10.0, 80.0, 30.0], (percent + 0.5) / 100, CAT)
        for i, (percent, right) in enumerate(scored)
    ]
    curves = coco_scores(scenes_of(pictures), CLASSES, found_of(found)).curves["against_score"].lines
    for step, recall in curves["recall"]:
        expected = sum(right and (percent + 0.5) / 100 >= step for percent, right in scored) / len(scored)
        assert expected - 0.01 - 1e-6 <= recall <= expected + 1e-6  # the tables know recalls by hundredths


def test_the_best_score_is_told() -> None:
    """From 0.5 on all are right; below half of them."""
    scores = torch.tensor([[0.9], [0.5], [0.3], [0.0]])
    curves = against_score(
        torch.tensor([[1.0], [1.0], [0.5], [0.0]]), torch.tensor([0.0, 0.5, 0.6, 1.0]), scores
    )
    [f1] = [name for name in curves.lines if name.startswith("F1")]
    assert f1 == "F1 (best 0.67 at 0.31)"
    assert dict(curves.lines["precision"])[0.2] == 0.5
    assert dict(curves.lines["recall"])[0.95] == 0
    assert 0.95 not in dict(curves.lines["precision"])
