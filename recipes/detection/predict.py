"""What a trained detector sees on any pictures, written next to each other in one folder."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ddptrain.data.detection.data import DetectionData
from ddptrain.data.detection.files import FileScenes, probe
from ddptrain.data.detection.letterbox import Letterbox
from ddptrain.data.detection.source import Objects
from ddptrain.data.detection.write import as_coco, in_sides
from ddptrain.data.pictures import check_apart, claim, named_pictures
from ddptrain.recipes.detection.detections import Detections
from ddptrain.recipes.detection.draw import annotated
from ddptrain.recipes.detection.masks import whole_masks

_LEAST_SIDE = 1.0
"""Pixels of a picture that a box has to cover either way."""


class Predicted(NamedTuple):
    """What is on a picture, as a program gets it, on the CPU; the surest first."""

    boxes: Tensor
    """float32 (d, 4) x1, y1, x2, y2 in pixels of the picture, within it."""
    scores: Tensor
    """float32 (d,) in [0, 1]"""
    names: tuple[str, ...]
    """Each one's class."""
    masks: Tensor | None
    """uint8 (d, H, W), 1 where it is seen; None of a detector that learns no masks."""


def predicted(
    detect: Callable[[Tensor], Sequence[Detections]], data: DetectionData, source: str, out: Path
) -> Iterator[str]:
    """A line for each picture that ``source`` names: a file, a folder (with those below), or a pattern.
    detect: gives each picture's detections of a batch of pictures.

    Under ``out``: ``pictures/`` with the boxes drawn in, ``labels/`` as YOLO's text files, and
    ``predictions.json`` as COCO's instances JSON with a score for each box, and a mask where the detector
    learns them.
    """
    files = named_pictures(source)
    above = Path(os.path.commonpath([file.parent for file in files]))
    names = [file.relative_to(above) for file in files]
    check_apart("source", names)
    scenes = FileScenes((probe(file), str(name), []) for file, name in zip(files, names, strict=True))
    claim(out)
    per_picture: list[tuple[Detections, list[bytes] | None]] = []
    try:
        for i, batch in enumerate(data.batches_of(scenes)):
            [detected] = detect(batch.images)
            detected, masks = on_picture(detected, batch.placed.of(0), scenes.sizes[i].tolist())
            picture = annotated(scenes.image(i), detected, data.classes, masks=masks)
            _write_picture(out / "pictures" / names[i].with_suffix(".png"), picture)
            _write_labels(out / "labels" / names[i].with_suffix(".txt"), detected, scenes.sizes[i])
            per_picture.append((detected, masks if data.masks else None))
            summary = ", ".join(_counts(detected, data.classes)) or "nothing"
            yield f"{files[i]}: {summary}\n"
    finally:  # also where a picture can't be decoded: of those before it
        content = json.dumps(_as_json(scenes, per_picture, data.classes))
        (out / "predictions.json").write_text(content, encoding="utf-8")
    yield f"{out}: pictures, labels and predictions.json for {len(files)} picture{'s' * (len(files) > 1)}"


def on_picture(seen: Detections, placed: Letterbox, size: Sequence[int]) -> tuple[Detections, list[bytes]]:
    """What is seen on a canvas as it lies on the picture of this size (height, width): see `within`; and the
    masks, as `whole_masks` gives them."""
    boxes = placed.back(seen.boxes)
    detected, kept = within(boxes, seen, size)
    return detected, whole_masks(seen.where(kept).masks, boxes[kept], *size)


def within(boxes: Tensor, detected: Detections, size: Sequence[int]) -> tuple[Detections, Tensor]:
    """On the CPU, cut off at the edge of a picture of this size (height, width); what lies in the grey beside
    it is left out. And bool (d,): what is not."""
    height, width = size
    boxes = boxes.cpu().clamp(min=0).minimum(torch.tensor([width, height, width, height]))
    kept = (boxes[:, 2:] - boxes[:, :2]).amin(1) >= _LEAST_SIDE
    return Detections(boxes[kept], detected.scores.cpu()[kept], detected.labels.cpu()[kept]), kept


def _counts(detected: Detections, classes: Sequence[str]) -> Iterator[str]:
    counts = detected.labels.bincount(minlength=len(classes)).tolist()
    return (f"{count} {name}" for name, count in zip(classes, counts, strict=True) if count)


def _write_picture(file: Path, picture: Tensor) -> None:
    from torchvision.transforms.v2.functional import to_pil_image

    file.parent.mkdir(parents=True, exist_ok=True)
    to_pil_image(picture).save(file)


def _write_labels(file: Path, detected: Detections, size: Tensor) -> None:
    """``class cx cy w h`` as shares of the picture's sides: labels to correct and train on."""
    file.parent.mkdir(parents=True, exist_ok=True)
    height, width = size.tolist()
    lines = [
        f"{label} {in_sides(box, height, width)}\n"
        for box, label in zip(detected.boxes.tolist(), detected.labels.tolist(), strict=True)
    ]
    file.write_text("".join(lines), encoding="utf-8")


def _as_json(
    scenes: FileScenes,
    per_picture: Sequence[tuple[Detections, list[bytes] | None]],
    classes: Sequence[str],
) -> dict[str, object]:
    objects = [
        Objects(detected.boxes, detected.labels, torch.zeros_like(detected.labels, dtype=torch.bool), masks)
        for detected, masks in per_picture
    ]
    content = as_coco(objects, scenes.sizes[: len(per_picture)], scenes.names[: len(per_picture)], classes)
    scores = [score for detected, _ in per_picture for score in detected.scores.tolist()]
    for annotation, score in zip(content["annotations"], scores, strict=True):
        annotation["score"] = score
    return content
