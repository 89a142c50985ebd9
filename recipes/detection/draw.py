"""Pictures with boxes drawn on them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.utils import draw_bounding_boxes, make_grid

from ddptrain.api import Picture
from ddptrain.data.detection.batch import Batch
from ddptrain.data.detection.run_lengths import decode_masks
from ddptrain.recipes.detection.detections import Detections
from ddptrain.recipes.detection.masks import whole_masks

_TRUE, _FOUND = "#2b9348", "#dd6b20"
_VEILS = ((221, 107, 32), (128, 90, 213), (49, 130, 206), (213, 63, 140), (56, 178, 172), (214, 158, 46))
"""RGB of masks, in turns, so that objects beside each other can be told apart."""
_LEAST_SIDE = 320
"""Pixels up to which small pictures are enlarged, so that names can be read."""


def make_sheet(pictures: Sequence[Tensor]) -> Picture:
    """Pictures of one size, side by side."""
    return Picture(make_grid(list(pictures), nrow=4, padding=4, pad_value=255))


def compared(batch: Batch, answers: Sequence[Detections], classes: Sequence[str]) -> list[Tensor]:
    """Validation pictures: the true boxes in green, in orange what was found and how surely."""
    pictures = []
    for image, boxes, labels, detected in zip(batch.images, batch.boxes, batch.labels, answers, strict=True):
        pixels = (image.float() * 255).round().to(torch.uint8).cpu()
        there = labels >= 0
        masks = whole_masks(detected.masks, detected.boxes, *pixels.shape[1:])
        pictures.append(annotated(pixels, detected, classes, boxes[there].cpu(), masks=masks))
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
    if masks:
        pixels = _veiled(pixels, masks)
    times = max(1, -(-_LEAST_SIDE // max(pixels.shape[1:])))
    large: Tensor = functional.interpolate(pixels[None], scale_factor=times)[0].contiguous()
    if true is not None and len(true):
        large = draw_bounding_boxes(large, true * times, colors=_TRUE, width=2)
    if not len(detected.labels):
        return large
    answers = zip(detected.labels.tolist(), detected.scores.tolist(), strict=True)
    texts = [f"{classes[label]} {score:.2f}" for label, score in answers]
    if marks is not None:
        texts = [f"{text} {mark}" for text, mark in zip(texts, marks, strict=True)]
    boxes = detected.boxes.cpu() * times
    sorted_corners = torch.cat([boxes[:, :2], boxes[:, 2:].maximum(boxes[:, :2])], dim=1)
    picture: Tensor = draw_bounding_boxes(
        large,
        sorted_corners,
        texts,
        colors=_FOUND,
        width=2,
        label_colors="black",
        label_background_colors=_FOUND,
        fill_labels=True,
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
