"""What the network's maps say, and how COCO counts its detections: against loops and pycocotools."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from boxed import CLASSES, HEIGHT, WIDTH, Found, Row, found_of, scenes_of
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn

from ddptrain.api.recipe import Rows
from ddptrain.api.world import World
from ddptrain.data.detection.augment import DetectionAugment
from ddptrain.data.detection.data import DetectionData
from ddptrain.data.detection.source import DetectionSet, DetectionSource
from ddptrain.recipes.detection.errors import against_score
from ddptrain.recipes.detection.score import coco_scores
from ddptrain.recipes.yolo.assign import TaskAligned
from ddptrain.recipes.yolo.detection import Detection
from ddptrain.recipes.yolo.model import Raw, Yolo, anchors


def by_pycocotools(
    pictures: Sequence[Sequence[Row]], found: Sequence[Found]
) -> tuple[dict[str, float], Any, dict[int, list[tuple[float, bool]]]]:
    """Its summary, and by class the means of its tables; the classes' mean precision by IoU and recall; and
    each class's detections that count at an IoU of 0.5, with their scores and whether they are right."""

    def annotation(number: int, picture: int, box: list[float], label: int, **more: Any) -> dict[str, Any]:
        x1, y1, x2, y2 = torch.tensor(box).tolist()  # rounded to float32, as in the tensors
        width, height = x2 - x1, y2 - y1
        place = {"bbox": [x1, y1, width, height], "area": width * height}
        return {"id": number, "image_id": picture, "category_id": label, **place, **more}

    true = [(i, *row) for i, rows in enumerate(pictures) for row in rows]
    sides: list[COCO] = []
    for annotations in (
        [
            annotation(n, i, box, label, iscrowd=int(crowd))
            for n, (i, box, label, crowd) in enumerate(true, 1)
        ],
        [annotation(n, i, box, label, score=score) for n, (i, box, score, label) in enumerate(found, 1)],
    ):
        side = COCO()
        side.dataset = {
            "images": [{"id": i} for i in range(len(pictures))],
            "categories": [{"id": i, "name": name} for i, name in enumerate(CLASSES)],
            "annotations": [{"iscrowd": 0, **one} for one in annotations],
        }
        side.createIndex()
        sides.append(side)
    evaluator = COCOeval(*sides, "bbox")
    evaluator.evaluate()
    evaluator.accumulate()
    evaluator.summarize()
    expected = dict(zip(("mAP", "mAP50", "mAP75"), evaluator.stats[:3].tolist(), strict=True))
    expected["AR"] = float(evaluator.stats[8])
    precision, recall = evaluator.eval["precision"][..., 0, 2], evaluator.eval["recall"][..., 0, 2]
    seen = sorted({label for _, _, label, crowd in true if not crowd})
    for label in seen:
        expected[f"AP/{CLASSES[label]}"] = float(precision[:, :, label].mean())
        expected[f"AR/{CLASSES[label]}"] = float(recall[:, label].mean())
    judged: dict[int, list[tuple[float, bool]]] = {label: [] for label in seen}
    for one in evaluator.evalImgs:
        if one is not None and one["aRng"] == evaluator.params.areaRng[0] and one["category_id"] in judged:
            rows = zip(one["dtScores"], one["dtMatches"][0] > 0, one["dtIgnore"][0], strict=True)
            judged[one["category_id"]] += [(score, right) for score, right, ignored in rows if not ignored]
    return expected, precision[..., seen].mean(2), judged


widths, heights = (st.floats(1, most, width=16) for most in (60, 40))
corners = st.builds(
    lambda x, y, w, h: [float(x), float(y), min(x + w, WIDTH), min(y + h, HEIGHT)],
    st.integers(0, 80), st.integers(0, 40), widths, heights,
)  # fmt: skip
labels = st.integers(0, 2)
scores = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.75, 1.0])  # many ties
true_rows = st.lists(st.tuples(corners, labels, st.sampled_from([False, False, False, True])), max_size=5)


@st.composite
def cases(draw: Any) -> tuple[list[list[Row]], list[Found]]:
    pictures = draw(st.lists(true_rows, min_size=1, max_size=4))
    near = st.floats(-4, 4, width=16)
    found = []
    for i, rows in enumerate(pictures):
        for box, label, _ in rows:
            for _ in range(draw(st.integers(0, 2))):
                moved = [value + draw(near) for value in box] if draw(st.booleans()) else box
                if moved[2] > moved[0] and moved[3] > moved[1]:
                    found.append((i, moved, draw(scores), draw(st.sampled_from([label, label, 0]))))
        found += [(i, *one) for one in draw(st.lists(st.tuples(corners, scores, labels), max_size=3))]
    return pictures, draw(st.permutations(found))


BOX = [2.0, 3.0, 40.0, 30.0]


@settings(deadline=None, max_examples=80)
@given(cases())
@example(([[(BOX, 1, False)], []], []))  # nothing found
@example(([[], [(BOX, 1, False)]], [(0, BOX, 0.9, 1), (0, BOX, 0.8, 2)]))  # and where nothing is
@example(([[(BOX, 1, False), (BOX, 0, True)]], [(0, BOX, 0.9, 1), (0, BOX, 0.9, 0), (0, BOX, 0.9, 0)]))
def test_scores_are_pycocotools(case: tuple[list[list[Row]], list[Found]]) -> None:
    pictures, found = case
    assume(any(not crowd for rows in pictures for _, _, crowd in rows))
    with contextlib.redirect_stdout(io.StringIO()):
        expected, precision, judged = by_pycocotools(pictures, found)
    got = coco_scores(scenes_of(pictures), CLASSES, found_of(found))
    assert got.metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert got.metrics[name] == pytest.approx(value, abs=1e-9), name
    for name, threshold in (("IoU 0.50", 0), ("IoU 0.75", 5), ("IoU 0.90", 8)):
        line = got.curves["precision_recall"].lines[name]
        assert (line[0][0], line[-1][0]) == (0.0, 1.0)
        for at, value in line:
            assert value == pytest.approx(precision[threshold, round(100 * at)], abs=1e-9)
    lines = against_score(scenes_of(pictures), found_of(found)).lines
    objects = [label for rows in pictures for _, label, crowd in rows if not crowd]
    for least in (0.2, 0.4, 0.6, 0.9):
        reached = {label: [right for score, right in of if score >= least] for label, of in judged.items()}
        recalls = [sum(rights) / objects.count(label) for label, rights in reached.items()]
        assert dict(lines["recall"])[least] == pytest.approx(sum(recalls) / len(recalls))
        precisions = [sum(rights) / len(rights) for rights in reached.values() if rights]
        there = dict(lines["precision"]).get(least)
        assert there == (pytest.approx(sum(precisions) / len(precisions)) if precisions else None)


@settings(deadline=None, max_examples=20)
@given(st.lists(true_rows, min_size=1, max_size=3))
def test_what_is_there_and_nothing_else_scores_one(pictures: list[list[Row]]) -> None:
    single = [[row for row in rows if not row[2]] for rows in pictures]
    assume(any(single))
    found = [(i, box, 0.5, label) for i, rows in enumerate(single) for box, label, _ in rows]
    metrics = coco_scores(scenes_of(pictures), CLASSES, found_of(found)).metrics
    seen = {CLASSES[label] for rows in single for _, label, _ in rows}
    assert set(metrics) == {
        "mAP",
        "mAP50",
        "mAP75",
        "AR",
        *(f"{of}/{name}" for of in ("AP", "AR") for name in seen),
    }
    assert all(value == pytest.approx(1.0) for value in metrics.values())


class TwoPictures(DetectionSource):
    """Wider than high, so that a letterbox has bars."""

    name = "test"
    rows: tuple[list[Row], ...] = (
        [(BOX, 1, False), ([10.0, 20.0, 61.5, 50.0], 0, False), ([60.0, 4.0, 90.0, 47.0], 1, False)],
        [([30.0, 5.0, 50.0, 20.0], 1, True), ([0.0, 0.0, 30.0, 11.0], 2, False)],
    )

    def open(self, root: Path) -> DetectionSet:
        scenes = scenes_of(self.rows)
        return DetectionSet(scenes, scenes, CLASSES)


class Knows(nn.Module):
    """Sees just these boxes, an anchor of stride 1 in the middle of each."""

    def __init__(self, boxes: Tensor, labels: Tensor) -> None:
        super().__init__()
        bins, half = torch.arange(70), (boxes[:, 2:] - boxes[:, :2]) / 2
        shares = (1 - (half.repeat(1, 2)[..., None] - bins).abs()).clamp(min=1e-20)
        classes = torch.full((1, len(labels), len(CLASSES)), -20.0)
        classes[0, torch.arange(len(labels)), labels] = 4.0
        self.raw = Raw(shares.log()[None], classes, boxes[:, :2] + half, torch.ones(len(labels)))

    def forward(self, images: Tensor) -> Raw:
        return self.raw


def test_a_network_that_knows_gets_a_perfect_report() -> None:
    """From its answer in the square's pixels, over doubles, back to the picture's, to the metrics."""
    data = DetectionData(TwoPictures(), DetectionAugment(), size=64)
    data.prepare(World(), seed=0)
    task = Detection(lambda **_: nn.Identity(), data, TaskAligned())
    rows = []
    for batch in data.valid_batches([range(1), range(1, 2)]):
        true = batch.labels[0] >= 0
        found = task.evaluate(Knows(batch.boxes[0, true], batch.labels[0, true]), batch)["detections"]
        assert isinstance(found, Rows)
        sure = found.values[found.values[:, 5] > 0.5]
        i = int(batch.ids[0])
        assert (sure[:, 0] == i).all()
        expected = sorted([*box, label] for box, label, crowd in TwoPictures.rows[i] if not crowd)
        got = sorted(sure[:, [1, 2, 3, 4, 6]].tolist())
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=0, atol=0.01)
        rows.append(found.values)
    report = task.report({"detections": torch.cat(rows)})
    assert report.metrics["mAP"] == report.metrics["AR"] == pytest.approx(1.0)
    # what reaches beyond the picture is cut off there, as the true boxes are
    far = torch.tensor([[0, 60, 4, 400, 47, 0.9, 1], [1, -200, -99, 30, 11, 0.9, 2]])
    assert task.report({"detections": far}).metrics["AP/owl"] == pytest.approx(1.0)
    assert task.report({"detections": far}).metrics["AR/dog"] == pytest.approx(0.5)


def test_a_validation_picture_lies_in_its_square_on_grey_without_crowds() -> None:
    data = DetectionData(TwoPictures(), DetectionAugment(), size=96)  # the picture becomes 96 by 53
    data.prepare(World(), seed=0)
    [batch] = data.valid_batches([range(2)])
    for bar in (batch.images[:, :, :21], batch.images[:, :, 74:]):
        torch.testing.assert_close(bar, torch.full_like(bar, 114 / 255))
    scale = torch.tensor([96 / WIDTH, 53 / HEIGHT] * 2)
    for i, rows in enumerate(TwoPictures.rows):
        inner = batch.images[i, :, 21:74]
        assert inner.std() > 0.1  # noise
        means = torch.nn.functional.interpolate(data.valid.image(i)[None] / 255, (53, 96), mode="bilinear")[0]
        assert (inner - means).abs().mean() < 0.05
        single = [(box, label) for box, label, crowd in rows if not crowd]
        room = len(batch.labels[i]) - len(single)
        assert batch.labels[i].tolist() == [label for _, label in single] + [-1] * room
        expected = torch.tensor([box for box, _ in single]) * scale + torch.tensor([0.0, 21, 0, 21])
        torch.testing.assert_close(batch.boxes[i, : len(single)], expected)
        assert not batch.boxes[i, len(single) :].any()


@pytest.mark.parametrize("size", ["n", "s", "m"])
def test_anchors_are_the_maps_cells_row_by_row(size: Literal["n", "s", "m"]) -> None:
    torch.manual_seed(0)
    model, height, width, bins = Yolo(5, size, bins=7).eval(), 64, 96, 7
    maps: list[Tensor] = []
    for head in model.heads:
        head.register_forward_hook(lambda _module, given, _answer: maps.append(given[0]))
    images = torch.rand(2, 3, height, width)
    with torch.inference_mode():
        raw = model(images)
        expected = [(head.box(x), head.classes(x)) for head, x in zip(model.heads, maps, strict=True)]
    assert raw.distances.shape == (2, 126, 4, bins)
    assert raw.classes.shape == (2, 126, 5)
    anchor = 0
    for stride, (box, classes) in zip((8, 16, 32), expected, strict=True):
        assert box.shape[2:] == (height // stride, width // stride)
        for y in range(height // stride):
            for x in range(width // stride):
                assert raw.points[anchor].tolist() == [(x + 0.5) * stride, (y + 0.5) * stride]
                assert float(raw.strides[anchor]) == stride
                assert torch.equal(raw.classes[:, anchor], classes[:, :, y, x])
                for side in range(4):
                    own = box[:, side * bins : (side + 1) * bins, y, x]
                    assert torch.equal(raw.distances[:, anchor, side], own)
                anchor += 1
    assert anchor == len(raw.points) == len(anchors(height, width, torch.device("cpu"))[0])
    # with so many empty cells, a fresh network should hardly claim anything
    torch.testing.assert_close(raw.classes.sigmoid(), torch.full_like(raw.classes, 0.01), rtol=0, atol=0.002)
    trained = model.train()(images).classes.detach().sigmoid()
    assert 0.005 < float(trained.mean()) < 0.02
