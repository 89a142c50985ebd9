"""Boxes, distances and how they are scored and sorted out, against loops and the papers' formulas."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.ops import box_iou, complete_box_iou_loss

from ddptrain.data.detection.letterbox import letterbox
from ddptrain.recipes.detection.detections import candidates, suppressed
from ddptrain.recipes.yolo.boxes import (
    boxes_at,
    decoded,
    detections,
    distance_loss,
    distances_from,
    expected_distances,
)
from ddptrain.recipes.yolo.model import Raw

Box = list[float]


def shares(logits: list[float]) -> list[float]:
    most = max(logits)
    powers = [math.exp(value - most) for value in logits]
    return [power / sum(powers) for power in powers]


def mean_bin(logits: list[float]) -> float:
    return sum(i * share for i, share in enumerate(shares(logits)))


def overlap(a: Box, b: Box) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    return width * height / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height)


def ciou_loss(a: Box, b: Box) -> float:
    """1 - IoU + rho^2 / c^2 + alpha v (arXiv 1911.08287, equations 6 to 11)."""
    iou = overlap(a, b)
    centres = [((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) for box in (a, b)]
    diagonal = math.hypot(max(a[2], b[2]) - min(a[0], b[0]), max(a[3], b[3]) - min(a[1], b[1]))
    turn = math.atan2(b[2] - b[0], b[3] - b[1]) - math.atan2(a[2] - a[0], a[3] - a[1])
    v = 4 / math.pi**2 * turn**2
    alpha = v / (1 - iou + v) if v else 0.0
    return 1 - iou + (math.dist(*centres) / diagonal) ** 2 + alpha * v


logits_of = st.integers(2, 20).flatmap(
    lambda bins: st.lists(st.floats(-50, 50, width=32), min_size=bins, max_size=bins)
)


@settings(deadline=None, max_examples=80)
@given(logits_of)
def test_the_expected_distance_is_the_mean_of_the_bins(logits: list[float]) -> None:
    found = expected_distances(torch.tensor([logits, logits[::-1]]))
    expected = torch.tensor([mean_bin(logits), mean_bin(logits[::-1])])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=80)
@given(logits_of, st.floats(-5, 30, width=32))
@example([0.0, 1.0, 2.0], 2.0)
@example([0.0, 1.0, 2.0], 0.0)
def test_the_distance_loss_is_the_papers(logits: list[float], distance: float) -> None:
    """-((y_(i+1) - y) log S_i + (y - y_i) log S_(i+1)), in float64."""
    clipped = min(max(distance, 0.0), len(logits) - 1.0)
    most = max(logits)
    total = most + math.log(sum(math.exp(value - most) for value in logits))
    expected = sum(
        (total - value) * max(0.0, 1 - abs(clipped - i)) for i, value in enumerate(logits)
    )  # a bin further than 1 away has no part in it
    found = distance_loss(*(torch.tensor([of], dtype=torch.float64) for of in (logits, distance)))
    assert found.shape == (1,)
    torch.testing.assert_close(float(found), expected, rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 20), st.floats(0, 1), st.integers(0, 2**20))
def test_the_distance_loss_is_least_where_the_two_bins_share_the_distance(
    bins: int, where: float, seed: int
) -> None:
    distance = where * (bins - 1)
    below = min(int(distance), bins - 2)
    right = torch.full((bins,), -1e4, dtype=torch.float64)
    right[below : below + 2] = torch.tensor([1 - distance + below, distance - below]).clamp(min=1e-12).log()
    asked = torch.tensor(distance, dtype=torch.float64)
    torch.testing.assert_close(float(expected_distances(right)), distance, rtol=1e-6, atol=1e-6)
    right.requires_grad_()
    least = distance_loss(right, asked)
    least.backward()
    least = least.detach()
    assert right.grad is not None
    assert right.grad.abs().max() < 1e-6
    step = torch.randn(100, bins, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert (distance_loss(right.detach() + step, asked.expand(100)) >= float(least) - 1e-9).all()
    assert (distance_loss(step, asked.expand(100)) >= float(least) - 1e-9).all()


def test_gradients_are_those_of_the_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    far = torch.rand(3, 4, dtype=torch.float64, generator=generator) * 7 - 1
    far[0] = torch.tensor([0.0, 5.0, 2.0, 4.5])
    points = torch.tensor([[4.0, 4.0], [12.0, 4.0], [4.0, 12.0]], dtype=torch.float64)

    def squares(values: Tensor) -> Tensor:
        return distances_from(points, boxes_at(points, expected_distances(values) * 8)).pow(2)

    assert torch.autograd.gradcheck(expected_distances, logits)
    assert torch.autograd.gradcheck(lambda values: distance_loss(values, far), logits)
    assert torch.autograd.gradcheck(squares, logits)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(*[st.integers(-2000, 2000)] * 6), min_size=1, max_size=9))
def test_distances_and_boxes_are_each_others_inverse(rows: list[tuple[int, ...]]) -> None:
    """In quarters of a pixel, which float32 holds exactly."""
    numbers = torch.tensor(rows) / 4
    points, distances = numbers[:, :2], numbers[:, 2:]
    boxes = boxes_at(points, distances)
    for (x, y, left, top, right, bottom), box in zip(numbers.tolist(), boxes.tolist(), strict=True):
        assert box == [x - left, y - top, x + right, y + bottom]
    assert torch.equal(distances_from(points, boxes), distances)
    assert torch.equal(boxes_at(points, distances_from(points, boxes[None])), boxes[None])


sides = st.floats(0.01, 500)
spots = st.floats(-1000, 1000)
some_boxes = st.builds(lambda x, y, w, h: [x, y, x + w, y + h], spots, spots, sides, sides)


@settings(deadline=None, max_examples=100)
@given(some_boxes, some_boxes)
@example([0.0, 0.0, 4.0, 8.0], [0.0, 0.0, 4.0, 8.0])
@example([0.0, 0.0, 500.0, 0.01], [999.0, 999.0, 999.01, 1499.0])
def test_torchvisions_losses_are_the_papers(a: Box, b: Box) -> None:
    one, other = torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)
    torch.testing.assert_close(float(box_iou(one, other)), overlap(a, b), rtol=1e-9, atol=1e-12)
    # torchvision adds 1e-7 to what it divides by
    torch.testing.assert_close(
        float(complete_box_iou_loss(one, other)), ciou_loss(a, b), rtol=1e-3, atol=2e-3
    )
    if min(a[2] - a[0], a[3] - a[1], b[2] - b[0], b[3] - b[1]) > 1:
        single = complete_box_iou_loss(one.float(), other.float())
        torch.testing.assert_close(float(single), ciou_loss(a, b), rtol=1e-3, atol=1e-3)


def raw_of(seed: int, classes: int, side: int, offset: float, reach: float, pictures: int = 2) -> Raw:
    """A network's answer; `offset`: where the picture's corner lies. `reach`: share of the largest boxes."""
    generator = torch.Generator().manual_seed(seed)
    points, strides = [], []
    for stride in (8, 16, 32):
        for y in range(side // stride):
            for x in range(side // stride):
                points.append((offset + (x + 0.5) * stride, offset + (y + 0.5) * stride))
                strides.append(float(stride))
    bins = 6
    distances = torch.randn(pictures, len(points), 4, bins, generator=generator) * 2
    distances -= torch.arange(bins) * (1 - reach) * 2
    logits = torch.randn(pictures, len(points), classes, generator=generator) * 2 - 1
    return Raw(distances, logits, torch.tensor(points), torch.tensor(strides))


def slow_detections(
    raw: Raw, picture: int, least: float, most_overlap: float, most: int
) -> list[tuple[Box, float, int]] | None:
    """Greedy, class by class; None where a decision hangs on rounding."""
    found = []
    for anchor, ((x, y), stride) in enumerate(zip(raw.points.tolist(), raw.strides.tolist(), strict=True)):
        left, top, right, bottom = (
            mean_bin(side) * stride for side in raw.distances[picture, anchor].tolist()
        )
        for label, logit in enumerate(raw.classes[picture, anchor].tolist()):
            score = 1 / (1 + math.exp(-logit))
            found.append(([x - left, y - top, x + right, y + bottom], score, label))
    found.sort(key=lambda one: -one[1])
    kept: list[tuple[Box, float, int]] = []
    for box, score, label in found[:1000]:
        if abs(score - least) < 1e-6:
            return None
        overlaps = [overlap(box, other) for other, _, its in kept if its == label]
        if any(abs(value - most_overlap) < 5e-3 for value in overlaps):
            return None
        if score >= least and all(value <= most_overlap for value in overlaps):
            kept.append((box, score, label))
    return kept[:most]


def compare(raw: Raw, least: float, most_overlap: float, most: int) -> int:
    """Asserts that `detections` finds what loops do; how many pictures could be compared."""
    found, compared = detections(raw, least, most_overlap, most), 0
    assert len(found) == len(raw.distances)
    for i, one in enumerate(found):
        expected = slow_detections(raw, i, least, most_overlap, most)
        if expected is None:
            continue
        compared += 1
        assert one.labels.tolist() == [label for _, _, label in expected]
        torch.testing.assert_close(one.scores, torch.tensor([score for _, score, _ in expected]))
        boxes = torch.tensor([box for box, _, _ in expected]).view(-1, 4)
        torch.testing.assert_close(one.boxes, boxes, rtol=1e-4, atol=1e-3)
    return compared


queries = st.tuples(
    st.integers(0, 2**20), st.sampled_from([0.001, 0.25, 0.9]), st.sampled_from([0.3, 0.5, 0.7]),
    st.sampled_from([3, 100]),
)  # fmt: skip


@settings(deadline=None, max_examples=25)
@given(queries, st.sampled_from([(1, 32), (3, 32), (10, 32), (80, 32), (2, 64)]))
def test_detections_are_those_of_a_greedy_search_in_each_class(query: Any, size: tuple[int, int]) -> None:
    """All coordinates are positive. 21 anchors by 80 classes are more than the 1000 that are looked at."""
    seed, least, most_overlap, most = query
    assume(compare(raw_of(seed, *size, offset=200.0, reach=0.5), least, most_overlap, most))


@settings(deadline=None, max_examples=25)
@given(queries, st.sampled_from([2, 10]))
def test_boxes_over_the_pictures_edge_suppress_only_their_own_class(query: Any, classes: int) -> None:
    seed, least, most_overlap, most = query
    assume(compare(raw_of(seed, classes, 32, offset=0.0, reach=1.0), least, most_overlap, most))


def two_boxes(boxes: Tensor, labels: Tensor) -> Raw:
    """An answer that says exactly these two boxes (1, 2, 4), each of one class of three."""
    distances = torch.full((1, 2, 4, 70), -1e4)
    points = torch.tensor([[4.0, 4.0], [12.0, 4.0]])
    distances.scatter_(3, distances_from(points, boxes).long()[..., None], 0.0)
    classes = torch.full((1, 2, 3), -20.0)
    classes.scatter_(2, labels[None, :, None], torch.tensor([3.0, 2.0])[None, :, None])
    return Raw(distances, classes, points, torch.ones(2))


@pytest.mark.parametrize("labels", [[0, 1], [1, 0], [0, 2], [2, 1]])
def test_a_box_half_outside_does_not_hide_one_of_another_class(labels: list[int]) -> None:
    """They don't even touch much: only a trick that moves classes apart by the largest coordinate errs."""
    boxes = torch.tensor([[[-60.0, -60.0, 4.0, 4.0], [5.0, 4.0, 64.0, 64.0]]])
    found = detections(two_boxes(boxes, torch.tensor(labels)), 0.5, 0.7, 100)[0]
    assert found.labels.tolist() == labels
    torch.testing.assert_close(found.boxes, boxes[0])


def test_candidates_are_the_best_pairs_of_anchor_and_class() -> None:
    raw = raw_of(3, 80, 32, 0.0, 0.5, pictures=3)
    scores, boxes = raw.classes.sigmoid(), decoded(raw)
    found = candidates(boxes, scores)
    for i in range(3):
        pairs = [(scores[i, a, c].item(), a, c) for a in range(21) for c in range(80)]
        best = sorted(pairs, reverse=True)[:1000]
        assert found.scores[i].tolist() == [score for score, _, _ in best]
        assert found.labels[i].tolist() == [label for _, _, label in best]
        assert torch.equal(found.boxes[i], boxes[i, [anchor for _, anchor, _ in best]])


lengths = st.one_of(st.integers(1, 5000), st.integers(1, 40))


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(lengths, lengths), min_size=1, max_size=5),
    st.integers(1, 40).map(lambda n: 32 * n),
    st.lists(st.tuples(*[st.floats(0, 1)] * 4), min_size=1, max_size=4),
)
@example([(5000, 1), (1, 5000), (1, 1), (5000, 5000)], 32, [(0.0, 0.0, 1.0, 1.0)])
def test_a_letterbox_holds_the_picture_and_leads_back(
    sizes: list[tuple[int, int]], side: int, where: list[tuple[float, ...]]
) -> None:
    placed = letterbox(torch.tensor(sizes), side)
    shares = torch.tensor(where)
    boxes = torch.stack([shares * torch.tensor([w, h, w, h]) for h, w in sizes])
    there = placed.there(boxes)
    assert there.dtype == torch.float32
    torch.testing.assert_close(placed.back(there), boxes, rtol=0, atol=1e-3)
    for i, (height, width) in enumerate(sizes):
        torch.testing.assert_close(placed.of(i).back(there[i]), boxes[i], rtol=0, atol=1e-3)
        whole = placed.of(i).there(torch.tensor([[0.0, 0.0, width, height]]))[0].tolist()
        x1, y1, x2, y2 = (round(value) for value in whole)
        assert max(abs(value - round(value)) for value in whole) < 1e-3  # on whole pixels
        assert 0 <= x1 < x2 <= side
        assert 0 <= y1 < y2 <= side
        assert max(x2 - x1, y2 - y1) == side
        assert 0 <= (side - x2) - x1 <= 1
        assert 0 <= (side - y2) - y1 <= 1
        shorter = min(height, width) * side / max(height, width)
        assert abs(min(x2 - x1, y2 - y1) - max(shorter, 1)) <= 0.5 + 1e-9


@pytest.mark.parametrize("objects", [100, 300])
def test_each_of_many_objects_is_found(objects: int) -> None:
    """Ten sure answers for each, as the assignment teaches them: more than an evaluation looks at."""
    draw = torch.Generator().manual_seed(0)
    corners = torch.cartesian_prod(torch.arange(20), torch.arange(15))[:objects] * 32.0
    boxes = torch.cat([corners, corners + 24], dim=1).repeat_interleave(10, 0)
    boxes += torch.rand(len(boxes), 4, generator=draw)
    scores = torch.linspace(0.35, 0.9, objects).repeat_interleave(10)
    scores -= 0.05 * torch.rand(len(boxes), generator=draw)
    (found,) = suppressed(boxes[None], scores[None, :, None], 0.25, 0.7, 1000)
    assert len(found.scores) == objects
