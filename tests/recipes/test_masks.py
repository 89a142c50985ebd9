"""Mask R-CNN: the library's own losses and answers of each picture by itself, and COCO's metrics of masks."""

import contextlib
import io
from typing import Any

import numpy as np
import pytest
import torch
from boxed import CLASSES, found_of, scenes_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pycocotools import mask as pycocotools
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from scenes import with_statistics
from torch import Tensor
from torchvision.models import get_model
from torchvision.models.detection.roi_heads import paste_masks_in_image

from ddptrain.api import UserError, derive_seed
from ddptrain.api.recipe import Progress
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.detection.augment import DetectionAugment
from ddptrain.data.detection.batch import Batch
from ddptrain.data.detection.data import DetectionData
from ddptrain.data.detection.drawn import DrawnScenes
from ddptrain.data.detection.run_lengths import PackedMasks, decode_masks, encode_masks
from ddptrain.data.detection.source import ArrayScenes, Objects
from ddptrain.recipes.detection.detector import Detector
from ddptrain.recipes.detection.library import LibraryDetection
from ddptrain.recipes.detection.masks import whole_masks
from ddptrain.recipes.detection.score import coco_scores
from ddptrain.recipes.detection.torchvision_detector import DetectorName, torchvision_detector
from ddptrain.recipes.yolo.assign import TaskAligned
from ddptrain.recipes.yolo.detection import Detection
from ddptrain.recipes.yolo.model import Yolo
from ddptrain.run.initial_weights import match

SIDE, SEED, STEP = 64, 3, 5
NAME = "maskrcnn_resnet50_fpn"


def data_of(masks: bool) -> DetectionData:
    data = DetectionData(DrawnScenes(train=6, valid=3, size=SIDE, masks=masks), DetectionAugment(), size=SIDE)
    data.prepare(World(), seed=SEED)
    return data


@pytest.fixture(scope="module")
def data() -> DetectionData:
    return data_of(masks=True)


def made(name: str = NAME, **arguments: Any) -> Detector:
    torch.manual_seed(0)
    return torchvision_detector(DetectorName(name), num_classes=10, size=SIDE, **arguments)


@pytest.fixture(scope="module")
def batch(data: DetectionData) -> Batch:
    [batch] = data.train_batches(Sampler(data.train_size, 3, seed=SEED), range(1))
    batch.labels[1] = -1  # a picture of nothing
    return batch


@pytest.mark.parametrize("name", [NAME, pytest.param("maskrcnn_resnet50_fpn_v2", marks=pytest.mark.long)])
def test_a_batchs_loss_is_the_sum_of_its_pictures(name: str, data: DetectionData, batch: Batch) -> None:
    # in float64, so that rounding does not decide which proposals are learnt from
    detector = with_statistics(made(name, frozen_norm=True)).train().double()
    detector.detector.transform.torch_choice = lambda sizes: sizes[0]  # it would draw one of one size
    batch = batch._replace(images=batch.images.double(), boxes=batch.boxes.double())
    loss = LibraryDetection(lambda **_: detector, data).loss(detector, batch, Progress(STEP, 0, 0.0))
    singles = []
    assert batch.masks is not None
    for image, boxes, labels, masks, id in zip(
        batch.images, batch.boxes, batch.labels, batch.masks, batch.ids.tolist(), strict=True
    ):
        there = labels >= 0
        torch.manual_seed(derive_seed(derive_seed(SEED, STEP), id))
        target = {"boxes": boxes[there], "labels": labels[there] + 1, "masks": masks[there]}
        singles.append(detector.detector([image], [target]))
    assert "loss_mask" in loss.logs
    assert loss.logs.keys() == singles[0].keys()
    for part, value in loss.logs.items():
        expected = torch.stack([single[part] for single in singles]).sum().float()
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    loss.sum.backward()
    missing = [part for part, parameter in detector.named_parameters() if parameter.grad is None]
    assert not missing, "each parameter has a gradient, as DDP needs it"


def test_an_evaluation_has_the_librarys_masks(data: DetectionData) -> None:
    detector = made(box_score_thresh=0.0, box_detections_per_img=20).eval()
    [batch] = data.valid_batches([range(3)])
    with torch.no_grad():
        sums: Any = LibraryDetection(lambda **_: detector, data).evaluate(detector, batch)
        answers = detector.detector(list(batch.images))
    rows, lengths = sums["detections"].values, sums["mask_lengths"].values
    masks = decode_masks(PackedMasks(sums["masks"].values, lengths.cumsum(0)), SIDE, SIDE)
    assert len(rows) == len(lengths) > 20
    start = 0
    for answer in answers:
        kept = answer["scores"] >= 0.001
        count = int(kept.sum())
        assert torch.equal(rows[start : start + count, 1:5], answer["boxes"][kept])
        expected = (answer["masks"][kept][:, 0] >= 0.5).to(torch.uint8)
        assert torch.equal(masks[start : start + count], expected)
        start += count
    assert start == len(rows)


def test_masks_are_pasted_at_the_pictures_own_size() -> None:
    """Where a box leaves the picture, too: the mask is not squeezed into what is left of it."""
    mask = torch.zeros(1, 28, 28)
    mask[:, :, :14] = 1  # the left half
    [whole] = decode_masks(whole_masks(mask, torch.tensor([[-20.0, 0, 20, 40]]), 40, 60), 40, 60)
    assert whole[:, 2:].sum() == 0
    [whole] = decode_masks(whole_masks(mask, torch.tensor([[0.0, 0, 40, 40]]), 40, 60), 40, 60)
    assert whole[2:38, 2:18].all()
    assert whole[:, 22:].sum() == 0
    for beyond in ([70.0, 5, 90, 20], [-30.0, 5, -10, 20]):
        assert decode_masks(whole_masks(mask, torch.tensor([beyond]), 40, 60), 40, 60).sum() == 0
    assert whole_masks(None, torch.zeros(3, 4), 40, 60) == []


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.floats(-60, 58, width=16), st.floats(-60, 38, width=16)),
    st.tuples(*[st.floats(1, 120, width=16)] * 2),
)
def test_pasting_a_part_is_torchvisions_pasting(
    corner: tuple[float, float], sides: tuple[float, float]
) -> None:
    mask = torch.rand(1, 28, 28, generator=torch.Generator().manual_seed(0))
    box = torch.tensor([[*corner, corner[0] + sides[0], corner[1] + sides[1]]])
    assume(box[0, 2:].min() > 0)  # torchvision's own fails where nothing of it is in the picture
    expected = (paste_masks_in_image(mask[None], box, (40, 60))[0] >= 0.5).to(torch.uint8)
    # twice, as what the first has left on the canvas would be seen
    both = decode_masks(whole_masks(mask.repeat(2, 1, 1), box.repeat(2, 1), 40, 60), 40, 60)
    assert torch.equal(both, expected.repeat(2, 1, 1))


def test_checkpoints_tell_of_masks_only_where_there_are_some(data: DetectionData) -> None:
    known = data.metadata()
    assert known["masks"] is True
    boxes = data_of(masks=False)
    assert "masks" not in boxes.metadata()
    for metadata, expected in ((known, True), (boxes.metadata(), False)):
        asked = DetectionData(DrawnScenes(), DetectionAugment())
        asked.load_metadata(metadata, World())
        assert asked.masks is expected


def test_the_librarys_weights_fit() -> None:
    """But for the last layers, which are of other classes."""
    weights = get_model(NAME, weights=None, weights_backbone=None, num_classes=91).state_dict()
    matched = match(made(frozen_norm=True), weights, "coco.pth", ())
    assert not matched.missing
    heads = {line.split()[0].removeprefix("detector.roi_heads.") for line in matched.other_size}
    assert heads == {
        f"{layer}.{part}"
        for layer in (
            "box_predictor.cls_score",
            "box_predictor.bbox_pred",
            "mask_predictor.mask_fcn_logits",
        )
        for part in ("weight", "bias")
    }


def test_model_and_data_have_to_agree(data: DetectionData) -> None:
    boxes = made("fasterrcnn_mobilenet_v3_large_320_fpn")
    with pytest.raises(
        UserError, match=r"learns masks, and the data have boxes alone. Add data.source.masks"
    ):
        LibraryDetection(lambda **_: made(), data_of(masks=False)).build()
    with pytest.raises(UserError, match=r"data.source.masks=true: this model learns boxes alone"):
        LibraryDetection(lambda **_: boxes, data).build()
    with pytest.raises(UserError, match=r"data.source.masks=true: model=yolo learns boxes alone"):
        Detection(Yolo, data, TaskAligned()).build()
    detector = made()
    with pytest.raises(UserError, match=r"export: a file would give boxes alone"):
        LibraryDetection(lambda **_: detector, data).deploy(detector)


HEIGHT, WIDTH = 50, 90  # of the pictures of `boxed`
Case = tuple[list[list[tuple[int, int, bool]]], list[tuple[int, int, int, float]]]


@st.composite
def cases(draw: Any) -> Case:
    """Objects (seed of the mask, label, crowd) of each picture, and detections (picture, seed, label,
    score)."""
    seeds, labels = st.integers(0, 5), st.integers(0, 2)
    objects = st.tuples(seeds, labels, st.sampled_from([False, False, True]))
    pictures = draw(st.lists(st.lists(objects, max_size=3), min_size=1, max_size=3))
    pictures[0].append((0, 0, False))
    places = st.integers(0, len(pictures) - 1)
    scores = st.sampled_from([0.25, 0.5, 0.5, 1.0])  # many ties
    return pictures, draw(st.lists(st.tuples(places, seeds, labels, scores), max_size=8))


def blob(seed: int) -> Tensor:
    """A rectangle with holes: those of neighbouring seeds overlap."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(HEIGHT, WIDTH, dtype=torch.uint8)
    mask[5 : 30 + seed, 5 + 2 * seed : 50] = 1
    return mask * (torch.rand(HEIGHT, WIDTH, generator=generator) < 0.9)


def box_of(mask: Tensor) -> list[float]:
    rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
    return [float(of) for of in (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)]


@settings(deadline=None, max_examples=60)
@given(cases())
def test_scores_are_pycocotools(case: Case) -> None:
    pictures, found = case
    plain = scenes_of([[(box_of(blob(s)), label, crowd) for s, label, crowd in rows] for rows in pictures])
    objects = [
        Objects(
            on_it.boxes,
            on_it.labels,
            on_it.crowd,
            [*encode_masks(torch.stack([blob(s) for s, _, _ in rows]))],
        )
        if rows
        else Objects(on_it.boxes, on_it.labels, on_it.crowd, [])
        for on_it, rows in zip(plain.objects, pictures, strict=True)
    ]
    images = torch.zeros(len(pictures), 3, HEIGHT, WIDTH, dtype=torch.uint8)
    scenes = ArrayScenes(images, objects, plain.names)
    masks = [encode_masks(blob(s)[None])[0] for _, s, _, _ in found]
    rows = found_of([(i, box_of(blob(s)), score, label) for i, s, label, score in found])
    got = coco_scores(scenes, CLASSES, rows, masks).metrics
    assert got == {**coco_scores(plain, CLASSES, rows).metrics, **by_pycocotools(pictures, found)}


def by_pycocotools(
    pictures: list[list[tuple[int, int, bool]]], found: list[tuple[int, int, int, float]]
) -> dict[str, Any]:
    def annotation(number: int, picture: int, seed: int, label: int, **more: Any) -> dict[str, Any]:
        rle = pycocotools.encode(np.asfortranarray(blob(seed).numpy()))
        place = {"segmentation": rle, "area": float(pycocotools.area(rle)), "iscrowd": 0}
        return {"id": number, "image_id": picture, "category_id": label, **place, **more}

    true = [(i, *row) for i, rows in enumerate(pictures) for row in rows]
    sides: list[COCO] = []
    for annotations in (
        [annotation(n, i, s, label, iscrowd=int(crowd)) for n, (i, s, label, crowd) in enumerate(true, 1)],
        [annotation(n, i, s, label, score=score) for n, (i, s, label, score) in enumerate(found, 1)],
    ):
        side = COCO()
        side.dataset = {
            "images": [{"id": i, "height": HEIGHT, "width": WIDTH} for i in range(len(pictures))],
            "categories": [{"id": i, "name": name} for i, name in enumerate(CLASSES)],
            "annotations": annotations,
        }
        with contextlib.redirect_stdout(io.StringIO()):
            side.createIndex()
        sides.append(side)
    with contextlib.redirect_stdout(io.StringIO()):
        evaluator = COCOeval(*sides, "segm")
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    names = ("mask_mAP", "mask_mAP50", "mask_mAP75")
    expected: dict[str, Any] = {
        name: pytest.approx(value, abs=1e-9)
        for name, value in zip(names, evaluator.stats[:3].tolist(), strict=True)
    }
    expected["mask_AR"] = pytest.approx(evaluator.stats[8], abs=1e-9)
    precision, recall = evaluator.eval["precision"][..., 0, 2], evaluator.eval["recall"][..., 0, 2]
    for label in sorted({label for _, _, label, crowd in true if not crowd}):
        expected[f"mask_AP/{CLASSES[label]}"] = pytest.approx(precision[:, :, label].mean(), abs=1e-9)
        expected[f"mask_AR/{CLASSES[label]}"] = pytest.approx(recall[:, label].mean(), abs=1e-9)
    return expected
