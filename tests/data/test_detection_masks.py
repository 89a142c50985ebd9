"""Masks of objects: read from every layout that has them, exact to the pixel, written and read again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled import HEIGHT, ONE_BOX, WIDTH, coco_set, label, refusal, voc_folder, yolo_set
from pycocotools import mask as pycocotools
from torch import Tensor

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.detection.anyfiles import LabelledFiles
from ddptrain.data.detection.augment import DetectionAugment
from ddptrain.data.detection.coco import CocoFiles
from ddptrain.data.detection.data import DetectionData
from ddptrain.data.detection.drawn import DrawnScenes
from ddptrain.data.detection.run_lengths import (
    PackedMasks,
    as_json,
    decode_masks,
    encode_masks,
    of_json,
    of_polygons,
)
from ddptrain.data.detection.write import write_coco
from ddptrain.data.detection.yolo import YoloFiles
from ddptrain.errors import UserError

NOWHERE = Path("nowhere")
TRIANGLE = [15.0, 7.5, 25.0, 7.5, 20.0, 22.5]
sides = st.integers(1, 40)
seeds = st.integers(0, 2**20)


def noise(count: int, height: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, height, width, generator=generator) < 0.3 + seed % 5 / 10).to(torch.uint8)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 3), sides, sides, seeds)
def test_a_mask_comes_back_and_is_pycocotools_own(count: int, height: int, width: int, seed: int) -> None:
    masks = noise(count, height, width, seed)
    packed = PackedMasks.of(encode_masks(masks))
    assert torch.equal(decode_masks(packed, height, width), masks)
    for one, mask in zip(packed, masks, strict=True):
        assert one == pycocotools.encode(np.asfortranarray(mask.numpy()))["counts"]
        # as all three ways in which COCO's JSON has it
        assert of_json(as_json(one, height, width), height, width) == one
        runs = run_lengths(mask)
        assert of_json({"size": [height, width], "counts": runs}, height, width) == one


def run_lengths(mask: Tensor) -> list[int]:
    """Column by column, of zeros and ones in turns; five lines of reference."""
    runs, value = [0], 0
    for pixel in mask.T.flatten().tolist():
        if pixel != value:
            runs.append(0)
            value = pixel
        runs[-1] += 1
    return runs


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.floats(-10, 60, width=16), min_size=6, max_size=12), min_size=1, max_size=3))
def test_polygons_are_filled_as_by_pycocotools(drawn: list[list[float]]) -> None:
    polygons = [points[: len(points) // 2 * 2] for points in drawn]
    expected = pycocotools.merge(pycocotools.frPyObjects(polygons, HEIGHT, WIDTH))["counts"]
    assert of_polygons(polygons, HEIGHT, WIDTH) == expected
    assert of_json(polygons, HEIGHT, WIDTH) == expected


@pytest.mark.parametrize(
    ("segmentation", "told"),
    [
        (None, "segmentation: must be polygons, [[x1, y1, x2"),
        ([], "segmentation: must be polygons"),
        ([[1, 2, 3, 4]], "segmentation: must be polygons"),
        ([[1, 2, 3, 4, 5, 6, 7]], "segmentation: must be polygons"),
        ([[1, 2, 3, 4, 5, "6"]], "segmentation: must be polygons"),
        ([[1, 2, 3, 4, 5, float("nan")]], "segmentation: must be polygons"),
        ([1, 2, 3, 4, 5, 6], "segmentation: must be polygons"),
        ({"counts": [1200]}, "segmentation: must be polygons"),
        ({"size": [HEIGHT, WIDTH], "counts": [1, 2]}, "counts: 3 pixels, and the picture has 1,200"),
        ({"size": [WIDTH, HEIGHT], "counts": [1200]}, "size [40, 30]: must be the picture's, [30, 40]"),
        ({"size": [HEIGHT, WIDTH], "counts": [1201, -1]}, "segmentation: counts: must be"),
        ({"size": [HEIGHT, WIDTH], "counts": "no run lengths"}, "segmentation: counts: must be"),
        ({"size": [HEIGHT, WIDTH], "counts": "o" * 40}, "segmentation: counts: must be"),
        ([[1, 2, 3, 4, 5, 10**400]], "segmentation: must be polygons"),
        ([[1, 2, 3, 4, 1e9, 6]], "in pixels of the picture"),
        ([[0.1, 0.2, 0.5, 0.2, 0.3, 0.7]], "has no pixel within bbox [15, 7.5, 10, 15]"),
        ({"size": [HEIGHT, WIDTH], "counts": [1200]}, "has no pixel within bbox"),
        ({"size": [HEIGHT, WIDTH], "counts": "1"}, "counts: 1 pixels, and the picture has 1,200"),
    ],
)
def test_what_is_no_mask_is_told(segmentation: Any, told: str, tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        for i, entry in enumerate(content["annotations"]):
            entry["segmentation"] = segmentation if i == 1 else [TRIANGLE]

    file = coco_set(tmp_path, change)
    write_triangles(tmp_path / "annotations" / "instances_val.json")
    message = refusal(CocoFiles(str(file), masks=True))
    assert f"{file}, annotation 12: segmentation: " in message
    assert told in message
    opened = CocoFiles(str(file), on_error="skip", masks=True).open(NOWHERE)
    assert [len(one) for one in opened.train.objects] == [1, 0, 1]
    assert len(CocoFiles(str(file)).open(NOWHERE).train.objects[1]) == 1, "boxes alone do not ask for it"


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(min_codepoint=48, max_codepoint=111), max_size=12))
def test_no_text_of_run_lengths_reads_beyond_the_picture(counts: str) -> None:
    try:
        mask = of_json({"size": [HEIGHT, WIDTH], "counts": counts}, HEIGHT, WIDTH)
    except UserError:
        return
    assert decode_masks([mask], HEIGHT, WIDTH).shape == (1, HEIGHT, WIDTH)


def write_triangles(file: Path) -> None:
    content = json.loads(file.read_text())
    for entry in content["annotations"]:
        entry["segmentation"] = [TRIANGLE]
    file.write_text(json.dumps(content))


def test_coco_and_yolo_read_the_same_masks(tmp_path: Path) -> None:
    file = coco_set(tmp_path / "coco")
    for part in ("train", "val"):
        write_triangles(file.with_name(f"instances_{part}.json"))
    as_shares = [v / side for v, side in zip(TRIANGLE, [WIDTH, HEIGHT] * 3, strict=True)]
    yolo = yolo_set(tmp_path / "yolo")
    for part, count in (("train", 3), ("val", 1)):
        for i in range(count):
            label(tmp_path / "yolo", part, i, f"1 {' '.join(map(str, as_shares))}\n")
    ours = LabelledFiles(str(file), masks=True).open(NOWHERE)
    theirs = LabelledFiles(str(yolo), masks=True).open(NOWHERE)
    for opened in (ours, theirs):
        [mask] = opened.train.objects[0].masks or []
        assert mask == of_polygons([TRIANGLE], HEIGHT, WIDTH)
        assert opened.train.objects[0].boxes.tolist() == [[15, 7.5, 25, 22.5]]
    assert LabelledFiles(str(file)).open(NOWHERE).train.objects[0].masks is None


def test_a_line_of_a_box_has_no_mask(tmp_path: Path) -> None:
    file = yolo_set(tmp_path)
    for i in (0, 2):
        label(tmp_path, "train", i, "1 0.1 0.1 0.9 0.1 0.5 0.8\n")
    label(tmp_path, "val", 0, "1 0.1 0.1 0.9 0.1 0.5 0.8\n")
    message = refusal(YoloFiles(str(file), masks=True))
    assert f"1.txt, line 1: box {' '.join(ONE_BOX.split()[1:])}: must be a polygon (class x1 y1" in message
    assert len(YoloFiles(str(file), "skip", masks=True).open(NOWHERE).train.objects[1]) == 0
    with pytest.raises(UserError, match=r"data.source.masks=true: .* Pascal VOC's XML has boxes alone"):
        LabelledFiles(str(voc_folder(tmp_path / "voc")), masks=True)


def test_drawn_scenes_have_the_masks_of_their_boxes() -> None:
    plain, masked = (DrawnScenes(6, 2, 64, masks=masks).open(NOWHERE).train for masks in (False, True))
    for i in range(6):
        on_it = masked.objects[i]
        assert torch.equal(masked.image(i), plain.image(i))
        assert torch.equal(on_it.boxes, plain.objects[i].boxes)
        assert plain.objects[i].masks is None
        masks = decode_masks(on_it.masks or [], 64, 64)
        assert (masks.sum(0) <= 1).all(), "a pixel shows one shape"
        for mask, box in zip(masks, on_it.boxes, strict=True):
            rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
            seen = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert box.tolist() == [float(side) for side in seen]


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    opened = DrawnScenes(3, 2, 64, masks=True).open(NOWHERE)
    write_coco(opened, tmp_path / "out")
    read = CocoFiles(str(tmp_path / "out/annotations/instances_train.json"), masks=True).open(NOWHERE)
    for i in range(3):
        assert list(read.train.objects[i].masks or []) == list(opened.train.objects[i].masks or [])


def made(
    masks: bool = True, augment: DetectionAugment | None = None, train: int = 6, **changed: Any
) -> DetectionData:
    source = DrawnScenes(train, 4, 64, masks=masks)
    augment = augment or DetectionAugment(mixup=0.3, copy_paste=0.3)
    data = DetectionData(source, augment, **{"workers": 0, **changed})
    data.prepare(World(), seed=3)
    return data


def batches(data: DetectionData) -> list[Any]:
    return [*data.train_batches(Sampler(data.train_size, 3, seed=3), range(2))]


def test_a_batch_has_a_mask_for_each_box() -> None:
    for batch, plain in zip(batches(made()), batches(made(masks=False)), strict=True):
        assert batch.masks.shape == (3, batch.boxes.shape[1], 64, 64)
        assert batch.masks.dtype == torch.uint8
        painted, sides = batch.masks.flatten(2).any(2), batch.boxes[..., 2:] - batch.boxes[..., :2]
        assert not painted[batch.labels < 0].any(), "none where no box is"
        assert painted[(batch.labels >= 0) & (sides >= 2).all(2)].all()
        assert plain.masks is None
        for name in ("images", "boxes", "labels"):
            assert torch.equal(getattr(batch, name), getattr(plain, name))
    assert [batch.masks for batch in made().valid_batches([range(4)])] == [None]


def test_loader_processes_make_the_same_masks() -> None:
    for here, there in zip(batches(made()), batches(made(workers=2)), strict=True):
        assert torch.equal(here.masks, there.masks)


def test_an_unchanged_picture_has_its_own_masks() -> None:
    """Whatever the size that it is scaled to, at the pixels that belong to it."""
    still = DetectionAugment(
        mosaic=0.0, zoom=0.0, shift=0.0, horizontal_flip=0.0, hue=0.0, saturation=0.0, value=0.0, keep=0.0
    )
    objects = DrawnScenes(6, 4, 64, masks=True).open(NOWHERE).train.objects
    for size, times in ((64, 1), (128, 2)):
        data = made(augment=still, size=size)
        for batch in batches(data):
            for i, id in enumerate(batch.ids.tolist()):
                own = (
                    decode_masks(objects[id].masks or [], 64, 64)
                    .repeat_interleave(times, 1)
                    .repeat_interleave(times, 2)
                )
                there = batch.labels[i] >= 0
                assert torch.equal(batch.masks[i][there], own)


def test_other_masks_are_other_data(tmp_path: Path) -> None:
    data = made()
    assert data.identity != made(masks=False).identity
    assert data.identity == made().identity
    assert data.metadata()["masks"] is True
    assert "masks" in data.describe()


@pytest.mark.parametrize("layout", ["yolo", "stream"])
def test_layouts_of_boxes_alone_are_not_written(layout: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"data.source.masks=true: layout={layout} holds boxes alone"):
        list(made().write(tmp_path / "out", layout))


def test_a_polygon_that_encloses_no_pixel_is_told(tmp_path: Path) -> None:
    """There and back again: a wide box with nothing in it."""
    file = yolo_set(tmp_path)
    for part, i in (("train", 0), ("train", 1), ("train", 2), ("val", 0)):
        label(tmp_path, part, i, "1 0.1 0.1 0.9 0.1 0.5 0.8\n")
    label(tmp_path, "train", 1, "1 0.1 0.1 0.6 0.7 0.1 0.1\n")
    message = refusal(YoloFiles(str(file), masks=True))
    assert "1.txt, line 1: polygon 0.1 0.1 0.6 0.7 0.1 0.1 ...: encloses no pixel of the image" in message
