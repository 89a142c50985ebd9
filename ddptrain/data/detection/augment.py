"""Mosaic, turn, zoom, flip, blends, pasted objects and colours: what happens to a training picture and its
boxes.

All of it follows from (seed, epoch, sample index) and from whether the mosaic is still on. Geometry is done
to one picture at a time by torchvision's functions, which carry the boxes along; colours to a whole batch, on
the device.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddptrain.data.detection.letterbox import GREY
from ddptrain.errors import UserError

_RGB_TO_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
_YIQ_TO_RGB = torch.linalg.inv(_RGB_TO_YIQ)
_LEAST_SIDE = 2.0  # Pixels below which what is left of a cut-off box is dropped
_MOST_HIDDEN = 0.3
"""Share of an object's box that pasted ones may hide."""


class BoxedImage(NamedTuple):
    """A picture and what is on it."""

    pixels: Tensor
    """uint8 (3, h, w)"""
    boxes: Tensor
    """float32 (k, 4) x1, y1, x2, y2 in pixels."""
    labels: Tensor
    """int64 (k,)"""
    masks: Tensor | None = None
    """uint8 (k, h, w), 1 where an object is seen; None where the set has none."""


class BoxDraws(NamedTuple):
    """One sample's numbers in [0, 1)."""

    mosaic: float
    middle_x: float
    middle_y: float
    second: float
    third: float
    fourth: float
    zoom: float
    shift_x: float
    shift_y: float
    angle: float
    shear: float
    horizontal_flip: float
    vertical_flip: float
    hue: float
    saturation: float
    value: float
    combine: float
    partner: float

    @classmethod
    def draw(cls) -> "BoxDraws":
        """From Python's global generator."""
        return cls(*(random.random() for _ in cls._fields))


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


@dataclass(frozen=True, slots=True)
class DetectionAugment:
    """How training pictures are varied.

    mosaic: share of samples that are put together from four pictures (Bochkovskiy et al.: YOLOv4,
    arXiv 2004.10934), until ``mosaic_until``, a share of the whole training (`Progress.fraction`).
    zoom: the magnification is drawn from [1 - zoom, 1 + zoom). shift: by at most this share of the size.
    degrees, shear: most degrees of turning and slanting, by which boxes grow.
    horizontal_flip, vertical_flip: shares of samples.
    hue (share of a full turn), saturation, value: most relative change of the colours.
    keep: a box that is cut off to less than this share of its area is dropped.
    mixup: share of samples that are the mean of two (Zhang et al., arXiv 1710.09412; of detectors YOLOX,
    arXiv 2107.08430). copy_paste: share into which the objects of another picture are pasted, with what else
    is in their boxes, where they hide little (Dwibedi et al.: cut, paste and learn, arXiv 1708.01642). Both
    until ``mosaic_until``.
    """

    mosaic: float = 1.0
    mosaic_until: float = 0.85
    zoom: float = 0.5
    shift: float = 0.1
    degrees: float = 0.0
    shear: float = 0.0
    horizontal_flip: float = 0.5
    vertical_flip: float = 0.0
    hue: float = 0.015
    saturation: float = 0.7
    value: float = 0.4
    keep: float = 0.2
    mixup: float = 0.0
    copy_paste: float = 0.0

    def __post_init__(self) -> None:
        most = {"zoom": 0.5, "shift": 0.5, "degrees": 180.0, "shear": 60.0}
        for name in self.__slots__:
            value, bound = getattr(self, name), most.get(name, 1.0)
            if not 0 <= value <= bound:
                raise UserError(f"data.augment.{name}={value}: must be in [0, {bound:g}].")
        if self.mixup + self.copy_paste > 1:
            raise UserError(
                f"data.augment.mixup={self.mixup} data.augment.copy_paste={self.copy_paste}: are shares of"
                " the samples, at most 1 together. Lower one of them."
            )

    def tiles(self, draws: BoxDraws, sample: int, near: range, progress: float) -> list[int]:
        """Which pictures make a sample: itself, or itself and three more, out of ``near``."""
        if progress >= self.mosaic_until or draws.mosaic >= self.mosaic:
            return [sample]
        others = (draws.second, draws.third, draws.fourth)
        return [sample, *(near[int(len(near) * share)] for share in others)]

    def apply(self, tiles: Sequence[BoxedImage], draws: BoxDraws, size: int) -> BoxedImage:
        """A sample, (3, size, size), from the pictures that `tiles` named, at most ``size`` long."""
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional
        from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat

        angle = _between(-self.degrees, self.degrees, draws.angle)
        slant = _between(-self.shear, self.shear, draws.shear)
        wide = round(size / _between(1 - self.zoom, 1 + self.zoom, draws.zoom))
        left, top = (
            min(max(round(size - wide / 2 + size * shift), 0), 2 * size - wide)
            for shift in (_between(-self.shift, self.shift, of) for of in (draws.shift_x, draws.shift_y))
        )

        def turned(of: Tensor, **how: Any) -> Tensor:
            if not self.degrees and not self.shear:
                return of
            return functional.affine(of, angle, [0, 0], 1.0, [slant, 0.0], **how)  # type: ignore[no-any-return]

        def cut(of: Tensor, **how: Any) -> Tensor:
            of = functional.resized_crop(of, top, left, wide, wide, [size, size], **how)
            if draws.horizontal_flip < self.horizontal_flip:
                of = functional.horizontal_flip(of)
            return functional.vertical_flip(of) if draws.vertical_flip < self.vertical_flip else of

        corners = self._corners(tiles, draws, size)
        canvas, whole_boxes, labels, _ = _laid_out(tiles, corners, size)
        visible_boxes = whole_boxes.clamp(0, 2 * size)
        boxes = turned(
            BoundingBoxes(
                visible_boxes,
                format=BoundingBoxFormat.XYXY,
                canvas_size=(2 * size, 2 * size),
                clamping_mode=None,
            )
        )
        whole = _areas(boxes) * (size / wide) ** 2 * (_areas(whole_boxes) / _areas(visible_boxes))
        pixels = cut(turned(canvas, fill=[float(GREY)] * 3))
        plain = cut(boxes).as_subclass(Tensor).clamp(0, size)
        kept = (_areas(plain) >= self.keep * whole) & (_sides(plain).amin(1) >= _LEAST_SIDE)
        masks = []
        of_tiles = kept.split([len(tile.labels) for tile in tiles])
        for tile, corner, of_tile in zip(tiles, corners, of_tiles, strict=True):
            if tile.masks is not None:  # as pictures: torchvision's way with its Mask moves them half a pixel
                own = turned(_on_canvas(tile.masks[of_tile], corner, size))
                masks.append(cut(own, interpolation=InterpolationMode.NEAREST_EXACT))
        return _seen(BoxedImage(pixels, plain[kept], labels[kept], torch.cat(masks) if masks else None))

    def partner(self, draws: BoxDraws, near: range, progress: float) -> int | None:
        """Which picture, out of ``near``, a sample is combined with, if any."""
        if progress >= self.mosaic_until or draws.combine >= self.mixup + self.copy_paste:
            return None
        return near[int(len(near) * draws.partner)]

    def combined(self, image: BoxedImage, other: BoxedImage, draws: BoxDraws) -> BoxedImage:
        """Two of one size, blended, or with the other's objects pasted into the first."""
        if draws.combine >= self.mixup:
            return _pasted(image, other)
        blend = (image.pixels.int() + other.pixels).div(2, rounding_mode="floor").to(torch.uint8)
        boxes, labels = torch.cat([image.boxes, other.boxes]), torch.cat([image.labels, other.labels])
        both = [of.masks for of in (image, other) if of.masks is not None]
        return BoxedImage(blend, boxes, labels, torch.cat(both) if both else None)

    def colours(self, draws: BoxDraws) -> Tensor:
        """float32 (3, 3): what a sample's RGB values are multiplied by.

        Hue, saturation and value as a turn and a stretch in YIQ, which is linear: a batch takes one product
        instead of a way to HSV and back (so does the ``hsv`` operator of DALI,
        docs.nvidia.com/deeplearning/dali).
        """
        angle = 2 * math.pi * _between(-self.hue, self.hue, draws.hue)
        value = _between(1 - self.value, 1 + self.value, draws.value)
        chroma = value * _between(1 - self.saturation, 1 + self.saturation, draws.saturation)
        cosine, sine = chroma * math.cos(angle), chroma * math.sin(angle)
        turn = torch.tensor([[value, 0.0, 0.0], [0.0, cosine, -sine], [0.0, sine, cosine]])
        colours: Tensor = _YIQ_TO_RGB @ turn @ _RGB_TO_YIQ
        return colours

    def _corners(self, tiles: Sequence[BoxedImage], draws: BoxDraws, size: int) -> list[tuple[int, int]]:
        """Of the pictures, (left, top) on a canvas twice as wide as a sample: one in its middle, or four
        around a point near it."""
        if len(tiles) == 1:
            height, width = tiles[0].pixels.shape[1:]
            return [(size - width // 2, size - height // 2)]
        x, y = (round(size * (0.5 + share)) for share in (draws.middle_x, draws.middle_y))
        return [
            (x if right else x - tile.pixels.shape[2], y if below else y - tile.pixels.shape[1])
            for tile, (right, below) in zip(tiles, ((0, 0), (1, 0), (0, 1), (1, 1)), strict=True)
        ]


def _laid_out(tiles: Sequence[BoxedImage], corners: Sequence[tuple[int, int]], size: int) -> BoxedImage:
    """Pictures and their boxes on a canvas twice as wide as a sample, without their masks."""
    canvas = torch.full((3, 2 * size, 2 * size), GREY, dtype=torch.uint8)
    boxes = []
    for tile, (left, top) in zip(tiles, corners, strict=True):
        there, own = _windows(tile.pixels, (left, top), size)
        canvas[there] = tile.pixels[own]
        boxes.append(tile.boxes + torch.tensor([left, top, left, top]))
    return BoxedImage(canvas, torch.cat(boxes), torch.cat([tile.labels for tile in tiles]))


def _on_canvas(masks: Tensor, corner: tuple[int, int], size: int) -> Tensor:
    """uint8 (k, h, w) -> (k, 2 * size, 2 * size), from this corner on."""
    canvas = torch.zeros(len(masks), 2 * size, 2 * size, dtype=torch.uint8)
    there, own = _windows(masks, corner, size)
    canvas[there] = masks[own]
    return canvas


_Window = tuple[Any, slice, slice]


def _windows(picture: Tensor, corner: tuple[int, int], size: int) -> tuple[_Window, _Window]:
    """Of a picture (..., h, w) whose corner (left, top) lies there on the canvas, or beyond it, what is seen:
    on the canvas, and in the picture."""
    (left, top), (height, width) = corner, picture.shape[-2:]
    x1, y1 = max(left, 0), max(top, 0)
    x2, y2 = min(left + width, 2 * size), min(top + height, 2 * size)
    on_canvas = (..., slice(y1, y2), slice(x1, x2))
    return on_canvas, (..., slice(y1 - top, y2 - top), slice(x1 - left, x2 - left))


def _pasted(image: BoxedImage, other: BoxedImage) -> BoxedImage:
    pixels, rows = image.pixels.clone(), []
    own_masks = None if image.masks is None else image.masks.clone()
    hidden = torch.zeros(len(image.boxes))  # share of each, at most
    boxes = other.boxes.round()
    for row, box in enumerate(boxes):
        shared = torch.minimum(image.boxes[:, 2:], box[2:]) - torch.maximum(image.boxes[:, :2], box[:2])
        hidden_then = hidden + shared.clamp(min=0).prod(1) / _areas(image.boxes)
        if (hidden_then > _MOST_HIDDEN).any():
            continue
        hidden = hidden_then
        x1, y1, x2, y2 = box.long().tolist()
        pixels[:, y1:y2, x1:x2] = other.pixels[:, y1:y2, x1:x2]
        if own_masks is not None:
            own_masks[:, y1:y2, x1:x2] = 0
        rows.append(row)
    masks = None
    if own_masks is not None and other.masks is not None:
        masks = torch.cat([own_masks, other.masks[rows]])
    labels = torch.cat([image.labels, other.labels[rows]])
    return _seen(BoxedImage(pixels, torch.cat([image.boxes, boxes[rows]]), labels, masks))


def _seen(image: BoxedImage) -> BoxedImage:
    """Without the objects of which, by their masks, no pixel is left: a box may be cut where they are not."""
    if image.masks is None:
        return image
    seen = image.masks.flatten(1).any(1).bool()  # torch gives uint8 for uint8
    return BoxedImage(image.pixels, image.boxes[seen], image.labels[seen], image.masks[seen])


def _sides(boxes: Tensor) -> Tensor:
    """(k, 4) -> (k, 2) widths and heights."""
    return boxes[:, 2:] - boxes[:, :2]


def _areas(boxes: Tensor) -> Tensor:
    return _sides(boxes).prod(1)
