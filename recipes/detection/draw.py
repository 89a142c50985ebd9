"""Pictures with boxes drawn on them."""

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.utils import draw_bounding_boxes, make_grid

from ddptrain.api import Picture
from ddptrain.data.detection.batch import Batch
from ddptrain.data.detection.run_lengths import decode_masks
from ddptrain.recipes.detection.detections import Detections
from ddptrain.recipes.detection.errors import Matched
from ddptrain.recipes.detection.masks import whole_masks

_TRUE, _FOUND = "#2b9348", "#dd6b20"
_MISSED, _WRONG = "#4dabf7", "#ff3b30"
_VEILS = ((221, 107, 32), (128, 90, 213), (49, 130, 206), (213, 63, 140), (56, 178, 172), (214, 158, 46))
"""RGB of masks, in turns, so that objects beside each other can be told apart."""
_LEAST_SIDE = 320
"""Pixels up to which small pictures are enlarged, so that names can be read."""


def make_sheet(pictures: Sequence[Tensor]) -> Picture:
    """Pictures of one size, side by side."""
    return Picture(make_grid(list(pictures), nrow=4, padding=4, pad_value=255))


def compared(
    batch: Batch, answers: Sequence[Detections], judged: Sequence[Matched], classes: Sequence[str]
) -> list[Tensor]:
    """Validation pictures: objects that are found in green, and right detections in orange; thick and on top,
    objects that are missed in blue, and wrong detections in red."""
    pictures = []
    for i, (detected, matched) in enumerate(zip(answers, judged, strict=True)):
        pixels = (batch.images[i].float() * 255).round().to(torch.uint8).cpu()
        there = batch.labels[i] >= 0
        true, labels = batch.boxes[i][there].cpu(), batch.labels[i][there].cpu()
        masks = whole_masks(detected.masks, detected.boxes, *pixels.shape[1:])
        picture, times = _enlarged(_veiled(pixels, masks))
        boxes, names, wrong = detected.boxes.cpu(), _names(detected, classes), matched.wrong
        missed = [f"missed {classes[label]}" for label in labels[~matched.found].tolist()]
        picture = _outlined(picture, true[matched.found] * times, _TRUE)
        picture = _outlined(picture, boxes[~wrong] * times, _FOUND, [*compress(names, ~wrong)])
        picture = _outlined(picture, true[~matched.found] * times, _MISSED, missed, width=4)
        picture = _outlined(picture, boxes[wrong] * times, _WRONG, [*compress(names, wrong)], width=4)
        pictures.append(picture)
    return pictures


def annotated(
    pixels: Tensor,
    detected: Detections,
    classes: Sequence[str],
    true: Tensor | None = None,
    marks: Sequence[str] | None = None,
    masks: Sequence[bytes] = (),
) -> Tensor:
    """uint8 (3, H, W), enlarged where small: found boxes in orange with class, score and their marks, and
    their masks, true boxes (k, 4) in green."""
    picture, times = _enlarged(_veiled(pixels, masks))
    if true is not None:
        picture = _outlined(picture, true * times, _TRUE)
    names = _names(detected, classes)
    if marks is not None:
        names = [f"{name} {mark}" for name, mark in zip(names, marks, strict=True)]
    return _outlined(picture, detected.boxes.cpu() * times, _FOUND, names)


def _enlarged(pixels: Tensor) -> tuple[Tensor, int]:
    """A small picture larger, and by what."""
    times = max(1, -(-_LEAST_SIDE // max(pixels.shape[1:])))
    large: Tensor = functional.interpolate(pixels[None], scale_factor=times)[0].contiguous()
    return large, times


def _names(detected: Detections, classes: Sequence[str]) -> list[str]:
    answers = zip(detected.labels.tolist(), detected.scores.tolist(), strict=True)
    return [f"{classes[label]} {score:.2f}" for label, score in answers]


def _outlined(
    pixels: Tensor, boxes: Tensor, colour: str, names: Sequence[str] | None = None, width: int = 2
) -> Tensor:
    """The picture with boxes (k, 4), their corners in any order, and a name at each."""
    if not len(boxes):
        return pixels
    corners = torch.cat([boxes[:, :2], boxes[:, 2:].maximum(boxes[:, :2])], dim=1)
    picture: Tensor = draw_bounding_boxes(
        pixels, corners, None if names is None else [*names], colors=colour, width=width, fill_labels=True
    )
    return picture


def _veiled(pixels: Tensor, masks: Sequence[bytes]) -> Tensor:
    """The picture, half covered by each mask's colour."""
    veiled = pixels.clone()
    for number, mask in enumerate(masks):
        [own] = decode_masks([mask], *pixels.shape[1:]).bool()
        colour = torch.tensor(_VEILS[number % len(_VEILS)], dtype=torch.uint8)[:, None]
        veiled[:, own] = veiled[:, own] // 2 + colour // 2  # not torchvision's, which blends all of a picture
    return veiled
