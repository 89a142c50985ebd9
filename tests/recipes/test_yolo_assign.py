"""Which anchor learns which object, against loops over objects and anchors (arXiv 2108.07755, 3.3)."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddptrain.errors import UserError
from ddptrain.recipes.yolo.assign import Assigned, TaskAligned

Box = tuple[float, ...]


class Case(NamedTuple):
    """The assigner's arguments, after ``self``."""

    scores: Tensor
    predicted: Tensor
    points: Tensor
    strides: Tensor
    boxes: Tensor
    labels: Tensor


class Slow(NamedTuple):
    """One picture's answer."""

    target: list[int | None]
    weight: list[float]
    apart: bool
    """No choice hung on two numbers that float32 can't tell apart; two equal boxes may be equally good."""
    unique: bool
    """Nor on two equal ones."""


def overlap(a: Box, b: Box) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return width * height / union if union > 0 else 0.0


def lies_in(point: Box, box: Box, finest: float) -> bool:
    """Or on its edge; a side thinner than the finest stride counts as long as that, about its middle."""
    for axis in (0, 1):
        low, high = box[axis], box[axis + 2]
        if high - low < finest:
            low, high = (low + high) / 2 - finest / 2, (low + high) / 2 + finest / 2
        if not low <= point[axis] <= high:
            return False
    return True


def slow(case: Case, picture: int, rule: TaskAligned) -> Slow:
    scores, predicted = case.scores[picture].tolist(), case.predicted[picture].tolist()
    boxes, labels = case.boxes[picture].tolist(), case.labels[picture].tolist()
    points, finest = case.points.tolist(), min(case.strides.tolist())
    apart = unique = True
    wanted: dict[int, list[int]] = {}
    alignment: dict[tuple[int, int], float] = {}
    for j, (box, label) in enumerate(zip(boxes, labels, strict=True)):
        if label < 0:
            continue
        for i, point in enumerate(points):
            if lies_in(point, box, finest):
                fit = overlap(box, predicted[i])
                value = scores[i][label] ** rule.alpha * fit**rule.beta if fit > 0 else 0.0
                apart &= value == 0 or value > 1e-30  # below that float32 loses it
                alignment[i, j] = value
        positive = [i for i, of in alignment if of == j and alignment[i, j] > 0]
        best = sorted(positive, key=lambda i: -alignment[i, j])
        if len(best) > rule.most:
            apart &= alignment[best[rule.most], j] < alignment[best[rule.most - 1], j] * (1 - 1e-5)
        for i in best[: rule.most]:
            wanted.setdefault(i, []).append(j)
    target: list[int | None] = [None] * len(points)
    for i, objects in wanted.items():
        fits = {j: overlap(boxes[j], predicted[i]) for j in objects}
        ranked = sorted(objects, key=lambda j: -fits[j])
        target[i] = ranked[0]
        if len(ranked) > 1:
            first, second = (fits[j] for j in ranked[:2])
            unique &= first != second
            apart &= first == second or second < first * (1 - 1e-6)
    weight = [0.0] * len(points)
    for j in range(len(boxes)):
        own = [i for i, of in enumerate(target) if of == j]
        if own:
            most_aligned = max(alignment[i, j] for i in own)
            best_fit = max(overlap(boxes[j], predicted[i]) for i in own)
            for i in own:
                weight[i] = alignment[i, j] / most_aligned * best_fit
    return Slow(target, weight, apart, unique)


def grid(height: int, width: int) -> tuple[Tensor, Tensor]:
    points = [
        ((x + 0.5) * stride, (y + 0.5) * stride, float(stride))
        for stride in (8, 16, 32)
        for y in range(height // stride)
        for x in range(width // stride)
    ]
    return torch.tensor(points)[:, :2], torch.tensor(points)[:, 2]


# quarters of a pixel: their products are exact in float32, so an anchor on a box's edge is on it in both
quarters = st.integers(-80, 400).map(lambda q: q / 4)
lengths = st.one_of(
    st.just(0.0), st.integers(1, 20).map(lambda q: q / 4), st.integers(20, 600).map(lambda q: q / 4)
)


@st.composite
def objects(draw: Any, classes: int, most: int) -> list[tuple[list[float], int]]:
    found = []
    for _ in range(draw(st.integers(0, most))):
        if found and draw(st.integers(0, 4)) == 0:
            box = draw(st.sampled_from(found))[0]
        else:
            x, y, w, h = draw(quarters), draw(quarters), draw(lengths), draw(lengths)
            box = [x, y, x + w, y + h]
        found.append((box, draw(st.integers(0, classes - 1))))
    return found


@st.composite
def cases(draw: Any) -> Case:
    classes = draw(st.sampled_from([1, 3, 200]))
    points, strides = grid(*draw(st.sampled_from([(32, 32), (32, 64), (64, 32)])))
    pictures = draw(st.lists(objects(classes, draw(st.sampled_from([1, 4, 30]))), min_size=1, max_size=3))
    k = max(map(len, pictures)) + draw(st.integers(0, 1))
    boxes, labels = torch.zeros(len(pictures), k, 4), torch.full((len(pictures), k), -1)
    if draw(st.booleans()):
        boxes[:] = torch.tensor([0.0, 0.0, 31.0, 30.0])  # what a row without an object holds is nothing
    for i, picture in enumerate(pictures):
        for j, (box, label) in enumerate(picture):
            boxes[i, j], labels[i, j] = torch.tensor(box), label
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    shape = (len(pictures), len(points))
    far = torch.rand(*shape, 4, generator=generator) * torch.rand(*shape, 1, generator=generator) * 6
    far *= torch.rand(*shape, 1, generator=generator) > 0.1  # some anchors see a box without area
    reach = (far * strides[:, None] * 4).round() / 4
    predicted = torch.cat([points - reach[..., :2], points + reach[..., 2:]], dim=-1)
    scores = torch.rand(*shape, classes, generator=generator) ** 4
    return Case(scores, predicted, points, strides, boxes, labels)


rules = st.builds(
    lambda most, powers: TaskAligned(most, *powers),
    st.sampled_from([1, 2, 10, 1000]),
    st.sampled_from([(0.5, 6.0), (1.0, 1.0), (1.0, 0.0), (0.0, 2.0)]),
)


@settings(deadline=None, max_examples=150)
@given(cases(), rules)
def test_each_anchor_learns_what_the_paper_says(case: Case, rule: TaskAligned) -> None:
    expected = [slow(case, i, rule) for i in range(len(case.labels))]
    assume(all(one.apart for one in expected))
    found = rule(*case)
    assert found.target.dtype == torch.int64
    assert found.weight.dtype == torch.float32
    torch.testing.assert_close(
        found.weight, torch.tensor([one.weight for one in expected]), rtol=1e-4, atol=1e-7
    )
    for i, one in enumerate(expected):
        for anchor, weight in enumerate(found.weight[i].tolist()):
            if weight > 0:
                target = int(found.target[i, anchor])
                assert target == one.target[anchor] or not one.unique


@settings(deadline=None, max_examples=60)
@given(cases(), rules)
def test_what_holds_whatever_the_numbers(case: Case, rule: TaskAligned) -> None:
    target, weight = rule(*case)
    assert target.shape == weight.shape == case.scores.shape[:2]
    assert ((weight >= 0) & (weight <= 1)).all()
    if not case.labels.shape[1]:
        assert not weight.any()
        return
    assert ((target >= 0) & (target < case.labels.shape[1])).all()
    finest = float(case.strides.min())
    for i in range(len(case.labels)):
        learnt = torch.nonzero(weight[i])[:, 0].tolist()
        for anchor in learnt:
            row = int(target[i, anchor])
            assert case.labels[i, row] >= 0
            assert lies_in(case.points[anchor].tolist(), case.boxes[i, row].tolist(), finest)
        for row in range(case.labels.shape[1]):
            own = [anchor for anchor in learnt if target[i, anchor] == row]
            assert len(own) <= rule.most
            if own:
                fits = [overlap(case.boxes[i, row].tolist(), case.predicted[i, a].tolist()) for a in own]
                assert math.isclose(float(weight[i, own].max()), max(fits), rel_tol=1e-5)


@settings(deadline=None, max_examples=60)
@given(cases(), rules, st.randoms(use_true_random=False))
def test_the_order_of_the_objects_does_not_matter(case: Case, rule: TaskAligned, random: Any) -> None:
    assume(all(one.unique and one.apart for i in range(len(case.labels)) for one in [slow(case, i, rule)]))
    order = list(range(case.labels.shape[1]))
    random.shuffle(order)  # rows without an object come to lie between others
    turned = case._replace(boxes=case.boxes[:, order], labels=case.labels[:, order])
    found, other = rule(*case), rule(*turned)
    assert torch.equal(found.weight, other.weight)
    learnt = found.weight > 0
    if order:
        assert torch.equal(found.target[learnt], torch.tensor(order)[other.target[learnt]])


@settings(deadline=None, max_examples=40)
@given(cases(), rules)
def test_pictures_of_a_batch_know_nothing_of_each_other(case: Case, rule: TaskAligned) -> None:
    together = rule(*case)
    for i in range(len(case.labels)):
        one, rows = slice(i, i + 1), int((case.labels[i] >= 0).sum())
        alone = rule(
            case.scores[one], case.predicted[one], case.points, case.strides,
            case.boxes[one, :rows], case.labels[one, :rows],
        )  # fmt: skip
        learnt = together.weight[one] > 0
        assert torch.equal(alone.weight, together.weight[one])
        assert torch.equal(alone.target[learnt], together.target[one][learnt])


def answered(box: list[float], rule: TaskAligned, sees: list[float] | None = None) -> Assigned:
    """One object on a picture of 32x32, on which each anchor sees `sees`, or what is there."""
    points, strides = grid(32, 32)
    predicted = torch.tensor(sees or box).expand(1, len(points), 4)
    scores = torch.linspace(0.3, 0.6, len(points))[None, :, None]
    return rule(
        scores, predicted, points, strides, torch.tensor([[box]]), torch.zeros(1, 1, dtype=torch.int64)
    )


def test_an_object_between_the_points_is_seen_from_those_around_it() -> None:
    """2x2 pixels around (9, 9): no point lies within; as thick as the finest stride it reaches (12, 12)."""
    weight = answered([8.0, 8.0, 10.0, 10.0], TaskAligned()).weight[0]
    assert [grid(32, 32)[0][i].tolist() for i in torch.nonzero(weight)[:, 0]] == [[12, 12], [8, 8]]
    assert float(weight.max()) == 1


def test_objects_without_area_and_such_answers_teach_nothing() -> None:
    for box, sees in (([8.0, 8.0, 8.0, 20.0], None), ([4.0, 4.0, 20.0, 20.0], [12.0, 12.0, 12.0, 12.0])):
        weight = answered(box, TaskAligned(), sees).weight
        assert weight.isfinite().all()
        assert not weight.any()


def test_an_object_takes_its_best_aligned_anchors() -> None:
    """All see it equally well: the surest are taken, the finest map's are the least sure here."""
    points, _ = grid(32, 32)
    weight = answered([-50.0, -50.0, 90.0, 90.0], TaskAligned(most=3)).weight[0]
    assert torch.nonzero(weight)[:, 0].tolist() == [len(points) - 3, len(points) - 2, len(points) - 1]
    scores = torch.linspace(0.3, 0.6, len(points))[-3:]
    torch.testing.assert_close(weight[-3:], (scores / scores[-1]).sqrt())


@pytest.mark.parametrize(("name", "value"), [("most", 0), ("alpha", -0.1), ("beta", -1.0)])
def test_what_a_user_asks_is_checked(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"task.assigner.{name}={value}"):
        TaskAligned(**{name: value})
