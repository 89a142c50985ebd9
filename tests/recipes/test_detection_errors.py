"""What a detector does wrong: in pairs, counts and curves, against cases that can be counted by hand."""

import pytest
from boxed import CLASSES, found_of, scenes_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.recipes.detection.errors import against_score, by_size, confusion, matched, worst

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
        (2, LEFT, 0.9, DOG),  # in a crowd of its class: neither for nor against
        (2, LEFT, 0.8, CAT),
        (3, LEFT, 0.9, CAT),
    ]
    of_pictures = list(matched(scenes_of(pictures), found_of(found)))
    counts = confusion(of_pictures, CLASSES)
    assert counts.classes == [*CLASSES, "background"]
    assert counts.counts == [
        [1, 0, 0, 1],  # cats: one found, one missed
        [0, 0, 1, 0],
        [0, 0, 0, 1],
        [2, 1, 1, 0],
    ]
    assert [one.mistakes for one in of_pictures] == [2, 3, 1, 1]
    assert [one.wrong.tolist() for one in of_pictures] == [[False, True, True], [True], [False, True], [True]]
    assert [one.found.tolist() for one in of_pictures] == [[True, False], [False, False], [], []]
    assert worst(of_pictures, 2) == [1, 0]
    assert worst(of_pictures, 9) == [1, 0, 2, 3]


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
    curves = against_score(scenes_of(pictures), found_of(found)).lines
    [f1] = [dict(line) for name, line in curves.items() if name.startswith("F1")]
    for step in range(1, 100):
        reached = [right for percent, right in scored if percent >= step]
        assert dict(curves["recall"])[step / 100] == pytest.approx(sum(reached) / len(scored))
        assert f1[step / 100] == pytest.approx(2 * sum(reached) / (len(reached) + len(scored)))
        precision = dict(curves["precision"]).get(step / 100)
        assert precision == (pytest.approx(sum(reached) / len(reached)) if reached else None)


def test_wrong_detections_below_the_right_ones_count_against_a_low_score() -> None:
    """COCO's precision is 1 there. A second one on an object is wrong, one in a crowd is not."""
    pictures = [[(LEFT, CAT, False), (RIGHT, CAT, True)], [(LEFT, DOG, False)]]
    found = [
        (0, LEFT, 0.9, CAT),
        (0, shifted(LEFT, 2), 0.4, CAT),
        (0, RIGHT, 0.8, CAT),
        (0, RIGHT, 0.3, DOG),  # another class's crowd
        (1, LEFT, 0.6, DOG),
    ]
    curves = against_score(scenes_of(pictures), found_of(found)).lines
    assert set(curves) == {"precision", "recall", "F1 (best 1.00 at 0.41)"}
    precision, recall = dict(curves["precision"]), dict(curves["recall"])
    assert [precision[score] for score in (0.2, 0.35, 0.5, 0.7)] == [0.5, 0.75, 1, 1]
    assert [recall[score] for score in (0.2, 0.5, 0.7)] == [1, 1, 0.5]
    assert 0.95 not in precision
    assert recall[0.95] == 0
