"""The detector's loss against loops over pictures, anchors and classes; what its network says, and where."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddptrain.api.recipe import Progress
from ddptrain.api.world import World
from ddptrain.data.detection.augment import DetectionAugment
from ddptrain.data.detection.batch import Batch
from ddptrain.data.detection.data import DetectionData
from ddptrain.data.detection.drawn import DrawnScenes
from ddptrain.data.detection.letterbox import letterbox
from ddptrain.recipes.yolo.assign import Assigned, TaskAligned
from ddptrain.recipes.yolo.detection import Detection
from ddptrain.recipes.yolo.model import Raw, Yolo, anchors

SIDE, BINS = 64, 6
START = Progress(0, 0, 0.0)


class Says(nn.Module):
    def __init__(self, raw: Raw) -> None:
        super().__init__()
        self.raw = raw

    def forward(self, images: Tensor) -> Raw:
        return self.raw


class Watched:
    """The real assigner; keeps what it was asked and what it said."""

    def __init__(self) -> None:
        self.boxes: list[Tensor] = []
        self.said: list[Assigned] = []

    def __call__(self, *asked: Tensor) -> Assigned:
        self.boxes.append(asked[4])
        self.said.append(TaskAligned()(*asked))
        return self.said[-1]


@pytest.fixture(scope="module")
def data() -> DetectionData:
    data = DetectionData(DrawnScenes(train=8, valid=4, size=SIDE), DetectionAugment(), size=SIDE)
    data.prepare(World(), seed=0)
    return data


def task_of(data: DetectionData, assigner: Any = None, **changed: Any) -> Detection:
    return Detection(lambda **_: nn.Identity(), data, assigner or TaskAligned(), **changed)


def batch_of(pictures: list[list[tuple[list[float], int]]]) -> Batch:
    n, k = len(pictures), max(map(len, pictures))
    boxes, labels = torch.zeros(n, k, 4), torch.full((n, k), -1)
    for i, picture in enumerate(pictures):
        for j, (box, label) in enumerate(picture):
            boxes[i, j], labels[i, j] = torch.tensor(box), label
    images = torch.zeros(n, 3, SIDE, SIDE)
    placed = letterbox(torch.full((n, 2), SIDE), SIDE)
    return Batch(images, boxes, labels, torch.eye(3).expand(n, 3, 3), torch.arange(n), placed)


def random_raw(n: int, classes: int, generator: torch.Generator) -> Raw:
    points, strides = anchors(SIDE, SIDE, torch.device("cpu"))
    distances = torch.randn(n, len(points), 4, BINS, generator=generator) * 2
    logits = torch.randn(n, len(points), classes, generator=generator) * 2
    return Raw(distances.requires_grad_(), logits.requires_grad_(), points, strides)


class Learnt(NamedTuple):
    box: list[float]
    label: int
    weight: float
    alpha: float  # the weight of CIoU's last term, through which no gradient flows


def shares(logits: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in logits)
    return [math.exp(value) / total for value in logits]


def overlap(a: list[float], b: list[float]) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return width * height / union if union else 0.0


def seen_box(raw: Raw, i: int, anchor: int) -> list[float]:
    (x, y), stride = raw.points[anchor].tolist(), float(raw.strides[anchor])
    far = [sum(b * s for b, s in enumerate(shares(of))) * stride for of in raw.distances[i, anchor].tolist()]
    return [x - far[0], y - far[1], x + far[2], y + far[3]]


def aspect(a: list[float], b: list[float]) -> float:
    turn = math.atan2(a[2] - a[0], a[3] - a[1]) - math.atan2(b[2] - b[0], b[3] - b[1])
    return 4 / math.pi**2 * turn**2


def assigned(raw: Raw, batch: Batch, i: int) -> list[Learnt | None] | None:
    """One picture's anchors, by score^0.5 IoU^6, ten for each object; None where rounding could decide."""
    boxes = [seen_box(raw, i, anchor) for anchor in range(len(raw.points))]
    wanted: dict[int, list[tuple[float, int, float]]] = {}
    for j, (box, label) in enumerate(zip(batch.boxes[i].tolist(), batch.labels[i].tolist(), strict=True)):
        ranked = []
        for anchor, point in enumerate(raw.points.tolist()):
            middle = [(box[axis] + box[axis + 2]) / 2 for axis in (0, 1)]
            half = [max(box[axis + 2] - box[axis], 8) / 2 for axis in (0, 1)]
            if label >= 0 and all(abs(point[axis] - middle[axis]) <= half[axis] for axis in (0, 1)):
                fit = overlap(box, boxes[anchor])
                score = 1 / (1 + math.exp(-float(raw.classes[i, anchor, label])))
                ranked.append((score**0.5 * fit**6, anchor, fit))
        ranked = sorted((one for one in ranked if one[0] > 0), reverse=True)
        tied = len(ranked) > 10 and ranked[9][0] < ranked[10][0] * (1 + 1e-4)
        if tied or (ranked and ranked[-1][0] < 1e-30):
            return None
        for alignment, anchor, fit in ranked[:10]:
            wanted.setdefault(anchor, []).append((fit, j, alignment))
    own: dict[int, list[tuple[int, float, float]]] = {}
    for anchor, offers in wanted.items():
        offers.sort(reverse=True)
        if len(offers) > 1 and offers[1][0] > offers[0][0] * (1 - 1e-5):
            return None
        fit, j, alignment = offers[0]
        own.setdefault(j, []).append((anchor, alignment, fit))
    learnt: list[Learnt | None] = [None] * len(boxes)
    for j, those in own.items():
        box, label = batch.boxes[i, j].tolist(), int(batch.labels[i, j])
        for anchor, alignment, fit in those:
            weight = alignment / max(a for _, a, _ in those) * max(f for _, _, f in those)
            v = aspect(box, boxes[anchor])
            learnt[anchor] = Learnt(box, label, weight, v / (1 - fit + v) if v else 0.0)
    return learnt


def slow_sums(raw: Raw, i: int, learnt: list[Learnt | None]) -> dict[str, float]:
    """The three losses of a picture."""
    sums = dict.fromkeys(("box", "distance", "classes"), 0.0)
    for anchor, goal in enumerate(learnt):
        for label, logit in enumerate(raw.classes[i, anchor].tolist()):
            asked = goal.weight if goal and goal.label == label else 0.0
            sums["classes"] += max(logit, 0) + math.log1p(math.exp(-abs(logit))) - asked * logit
        if not goal:
            continue
        seen, box, (x, y) = seen_box(raw, i, anchor), goal.box, raw.points[anchor].tolist()
        across = math.dist([box[0] + box[2], box[1] + box[3]], [seen[0] + seen[2], seen[1] + seen[3]]) / 2
        around = math.hypot(
            max(seen[2], box[2]) - min(seen[0], box[0]), max(seen[3], box[3]) - min(seen[1], box[1])
        )
        ciou = 1 - overlap(seen, box) + (across / around) ** 2 + goal.alpha * aspect(seen, box)
        sums["box"] += goal.weight * ciou
        far = (x - box[0], y - box[1], box[2] - x, box[3] - y)
        for logits, distance in zip(raw.distances[i, anchor].tolist(), far, strict=True):
            asked = min(max(distance / float(raw.strides[anchor]), 0), BINS - 1)
            for number, share in enumerate(shares(logits)):
                part = max(0.0, 1 - abs(asked - number))
                sums["distance"] -= goal.weight * part * math.log(share) / 4 if part else 0.0
    return sums


quarters = st.integers(-40, 280).map(lambda q: q / 4)
sizes = st.one_of(st.just(0.0), st.integers(1, 300).map(lambda q: q / 4))
objects = st.tuples(
    st.builds(lambda x, y, w, h: [x, y, x + w, y + h], quarters, quarters, sizes, sizes), st.integers(0, 9)
)
scenes = st.lists(st.lists(objects, max_size=4), min_size=1, max_size=2)
GAINS = {"box": 7.5, "distance": 1.5, "classes": 0.5}


@settings(deadline=None, max_examples=40)
@given(scenes, st.integers(0, 2**20))
def test_the_loss_and_its_gradient_are_those_of_the_loops(
    data: DetectionData, pictures: list[list[Any]], seed: int
) -> None:
    generator, batch = torch.Generator().manual_seed(seed), batch_of(pictures)
    raw = random_raw(len(pictures), 10, generator)
    plain = Raw(*(of.detach() for of in raw))
    learnt = [assigned(plain, batch, i) for i in range(len(pictures))]
    assume(all(one is not None for one in learnt))
    found = task_of(data).loss(Says(raw), batch, START)
    found.sum.backward()

    def total(of: Raw) -> dict[str, float]:
        parts = [slow_sums(of, i, one) for i, one in enumerate(learnt) if one is not None]
        return {name: sum(part[name] for part in parts) for name in GAINS}

    expected = total(plain)
    for name, value in expected.items():
        torch.testing.assert_close(float(found.logs[name].detach()), value, rtol=1e-3, atol=1e-4)
    gained = sum(GAINS[name] * value for name, value in expected.items())
    torch.testing.assert_close(float(found.sum.detach()), gained, rtol=1e-3, atol=1e-4)
    count = sum((one.weight for picture in learnt for one in picture or () if one), 0.0)
    torch.testing.assert_close(float(found.count), count, rtol=1e-4, atol=1e-6)
    # along one direction, what is to be learnt held fast
    with torch.no_grad():
        steps = [torch.randn(of.shape, generator=generator) for of in raw[:2]]
        ahead, behind = (
            Raw(
                *(of.double() + sign * 1e-5 * step for of, step in zip(raw[:2], steps, strict=True)), *raw[2:]
            )
            for sign in (1, -1)
        )
        slopes = [sum(GAINS[name] * value for name, value in total(of).items()) for of in (ahead, behind)]
        slope = sum(float((of.grad * step).sum()) for of, step in zip(raw[:2], steps, strict=True))  # type: ignore[operator]
    torch.testing.assert_close(slope, (slopes[0] - slopes[1]) / 2e-5, rtol=2e-3, atol=5e-3)


BOXES = {
    "none at all": [[], []],
    "none on one": [[], [([8.0, 8.0, 40.0, 40.0], 1)]],
    "without area": [[([20.0, 20.0, 20.0, 20.0], 1)], [([20.0, 12.0, 20.0, 40.0], 1), ([0.0] * 4, 2)]],
    "over the edge": [[([-30.0, -8.0, 20.0, 99.0], 9)], [([60.0, 60.0, 70.0, 80.0], 0), ([70.0] * 4, 0)]],
    "huge": [[([-1e6, -1e6, 1e6, 1e6], 3)], [([-1e19, -1e19, 1e19, 1e19], 3)]],
    "twice, and more than anchors": [[([4.0, 4.0, 60.0, 60.0], 3)] * 100, [([0.0, 0.0, 64.0, 64.0], 3)]],
}  # fmt: skip


def extreme(answer: str, how_large: float) -> Raw:
    raw = random_raw(2, 10, torch.Generator().manual_seed(1))
    distances = torch.full(raw.distances.shape, -how_large)
    distances[..., BINS - 1 if answer == "wide" else 0] = how_large
    if answer == "mixed":
        distances = how_large * raw.distances.detach().sign()
    if answer == "thin":
        distances[:, :, ::2] = distances[:, :, ::2].flip(-1)
    if answer in ("zero", "every other zero"):
        distances[:, :: 1 if answer == "zero" else 2] = 0
    return raw._replace(distances=distances, classes=how_large * raw.classes.detach().sign())


@pytest.mark.parametrize("boxes", BOXES)
@pytest.mark.parametrize("answer", ["shut", "thin", "wide", "mixed", "zero", "every other zero"])
def test_nothing_overflows(data: DetectionData, boxes: str, answer: str) -> None:
    for how_large, kind, rule in (
        (50.0, torch.float32, TaskAligned()),
        (8.0, torch.float32, TaskAligned()),
        (50.0, torch.bfloat16, TaskAligned()),
        (50.0, torch.float32, TaskAligned(alpha=1.0, beta=0.0)),
    ):
        raw = extreme(answer, how_large)
        said = [of.to(kind).requires_grad_() for of in raw[:2]]
        found = task_of(data, rule).loss(Says(Raw(*said, *raw[2:])), batch_of(BOXES[boxes]), START)
        found.sum.backward()
        assert isinstance(found.count, Tensor)
        for value in (found.sum, found.count, *found.logs.values(), *(of.grad for of in said)):
            assert value.isfinite().all(), (how_large, kind, rule)
        assert all(value.dtype == torch.float32 for value in found.logs.values())


def test_a_batch_costs_what_its_pictures_cost(data: DetectionData) -> None:
    torch.manual_seed(0)
    model = Yolo(10).eval()  # batch norms in training would mix the pictures
    [batch] = data.valid_batches([range(4)])
    watched = Watched()
    together = task_of(data, watched).loss(model, batch, START)
    torch.testing.assert_close(together.count, watched.said[0].weight.sum())
    singles = []
    for i in range(4):
        rows = slice(int((batch.labels[i] >= 0).sum()))
        images, boxes, labels = (of[i : i + 1] for of in batch[:3])
        one = batch._replace(images=images, boxes=boxes[:, rows], labels=labels[:, rows])
        singles.append(task_of(data).loss(model, one, START))
    torch.testing.assert_close(together.sum, sum(one.sum for one in singles))
    torch.testing.assert_close(together.count, sum(one.count for one in singles))
    for name, value in together.logs.items():
        torch.testing.assert_close(value, sum(one.logs[name] for one in singles))


def test_each_step_has_a_scale_and_boxes_follow_their_pictures(data: DetectionData) -> None:
    shown: list[Tensor] = []

    class Sees(nn.Module):
        def forward(self, images: Tensor) -> Raw:
            shown.append(images)
            points, strides = anchors(images.shape[2], images.shape[3], images.device)
            return Raw(torch.zeros(1, len(points), 4, BINS), torch.zeros(1, len(points), 10), points, strides)

    watched, images = Watched(), torch.zeros(1, 3, 128, 128)
    images[:, :, 20:90, 8:120] = 1.0
    batch = batch_of([[([8.0, 20.0, 120.0, 90.0], 1)]])._replace(images=images)
    task = task_of(data, watched, multi_scale=0.5)
    for step in range(60):
        task.loss(Sees(), batch, Progress(step, step // 30, step / 60))
        task.loss(Sees(), batch, Progress(step, 7, 0.0))
        assert shown[-1].shape == shown[-2].shape
        bright = torch.nonzero(shown[-1][0, 0] > 0.5)
        seen = torch.cat([bright.amin(0).flip(0), bright.amax(0).flip(0) + 1]).float()
        torch.testing.assert_close(watched.boxes[-1][0, 0], seen, rtol=0, atol=1.0)
    assert {of.shape[2] for of in shown} == {64, 96, 128, 160, 192}
    task_of(data, multi_scale=0.0).loss(Sees(), batch, START)
    assert shown[-1] is images
