"""Evaluations and predictions in rectangles (``data.rectangular``): the same picture, less grey around it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import Oblong
from torch import Tensor

from ddptrain.api.recipe import Rows
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.detection.augment import DetectionAugment
from ddptrain.data.detection.batch import Batch
from ddptrain.data.detection.data import DetectionData
from ddptrain.data.detection.letterbox import GREY, canvases, fitted, letterbox
from ddptrain.errors import UserError
from ddptrain.recipes.detection.detector import Detector
from ddptrain.recipes.detection.library import LibraryDetection
from ddptrain.recipes.yolo.assign import TaskAligned
from ddptrain.recipes.yolo.detection import Detection
from ddptrain.recipes.yolo.model import Yolo

SIZE = 64
lengths = st.integers(1, 300)
multiples = st.integers(1, 10).map(lambda n: 32 * n)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=5), multiples)
def test_a_rectangle_is_the_smallest_of_whole_cells(sizes: list[tuple[int, int]], size: int) -> None:
    every = torch.tensor(sizes)
    inner, own, common = fitted(every, size), canvases(every, size, "own"), canvases(every, size, "common")
    for sides, canvas in zip(inner.tolist(), own.tolist(), strict=True):
        assert [side % 32 for side in canvas] == [0, 0]
        assert all(0 <= outer - side < 32 for side, outer in zip(sides, canvas, strict=True))
    assert all(canvas == own.amax(0).tolist() for canvas in common.tolist())
    assert canvases(every, size, "square").tolist() == [[size, size]] * len(sizes)
    for canvas in (own, common):
        placed = letterbox(every, size, canvas)
        assert (placed.corner >= 0).all()
        room = canvas.flip(1) - inner.flip(1) - 2 * placed.corner.long()
        assert ((room == 0) | (room == 1)).all()


def opened(rectangular: bool, size: tuple[int, int] = (20, 70), workers: int = 0) -> DetectionData:
    augment = DetectionAugment(mosaic=0.5)
    data = DetectionData(Oblong(*size), augment, size=SIZE, rectangular=rectangular, workers=workers)
    data.prepare(World(), seed=4)
    return data


def without_grey(batch: Batch, i: int, height: int, width: int) -> Tensor:
    left, top = batch.placed.of(i).corner.long().tolist()
    outside = batch.images[i].clone()
    outside[:, top : top + height, left : left + width] = GREY / 255
    torch.testing.assert_close(outside, torch.full_like(outside, GREY / 255))
    return batch.images[i, :, top : top + height, left : left + width]


def test_an_evaluations_pictures_are_those_of_its_squares() -> None:
    squares, rectangles = opened(False), opened(True)
    assert "64x64 (valid 64x32)" in rectangles.describe()
    assert "valid 64x32" not in squares.describe()
    chunks = [range(3), range(3, 4)]
    pairs = list(zip(squares.valid_batches(chunks), rectangles.valid_batches(chunks), strict=True))
    for square, rectangle in pairs:
        n = len(square.images)
        assert square.images.shape == (n, 3, 64, 64)
        assert rectangle.images.shape == (n, 3, 32, 64)
        for i in range(n):  # 20 x 70 pixels, the longer side 64
            assert torch.equal(without_grey(square, i, 18, 64), without_grey(rectangle, i, 18, 64))
            before, after = (batch.placed.of(i).back(batch.boxes[i]) for batch in (square, rectangle))
            there = square.labels[i] >= 0
            torch.testing.assert_close(before[there], after[there])
        assert torch.equal(square.labels, rectangle.labels)
    by_workers = list(opened(True, workers=2).valid_batches(chunks))
    assert all(torch.equal(a.images, b.images) for (_, a), b in zip(pairs, by_workers, strict=True))


def test_training_is_in_squares() -> None:
    sampler = Sampler(10, 5, seed=4)
    before, after = (next(opened(of).train_batches(sampler, range(1))) for of in (False, True))
    assert torch.equal(before.images, after.images)
    assert torch.equal(before.boxes, after.boxes)


def test_a_prediction_is_in_each_pictures_own() -> None:
    """A set of pictures that are high, and wide ones to predict."""
    data, wide = opened(True, (70, 20)), opened(True, (20, 70)).valid
    batches = list(data.batches_of(wide))
    assert [tuple(batch.images.shape) for batch in batches] == [(1, 3, 32, 64)] * 4
    images, placed = data.model_input(wide.image(0))
    torch.testing.assert_close(images, batches[0].images)
    assert all(torch.equal(a, b) for a, b in zip(placed, batches[0].placed.of(0), strict=True))
    images, _ = data.model_input(torch.zeros(3, 100, 100, dtype=torch.uint8))
    assert images.shape == (1, 3, 64, 64)


def test_a_detector_is_judged_on_them_and_its_file_on_squares() -> None:
    data = opened(True)
    [batch] = data.valid_batches([range(4)])
    task, model = Detection(Yolo, data, TaskAligned()), Yolo(2).eval()
    rows = task.evaluate(model, batch)["detections"]
    assert isinstance(rows, Rows)
    assert set(rows.values[:, 0].tolist()) == {0, 1, 2, 3}
    with pytest.raises(UserError, match=r"^data\.rectangular=true: an exported file takes squares\. Add "):
        task.deploy(model)
    assert Detection(Yolo, opened(False), TaskAligned()).deploy(model).inputs[0].shape == (1, 3, 64, 64)


def test_detectors_of_other_libraries_take_squares() -> None:
    with pytest.raises(UserError, match=r"^data\.rectangular=true: is for model=yolo"):
        LibraryDetection(Untrained, opened(True))


class Untrained(Detector):
    """It is refused before it is built."""
