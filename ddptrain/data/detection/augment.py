"""Mosaic, turn, zoom, flip and colours: what happens to a training picture and its boxes.

All of it follows from (seed, epoch, sample index) and from whether the mosaic is still on. Geometry is done
to one picture at a time by torchvision's functions, which carry the boxes along; colours to a whole batch, on
the device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ddptrain.api.rng import draw
from ddptrain.data.detection.letterbox import GREY
from ddptrain.errors import UserError

_PURPOSES = (
    *("mosaic", "middle_x", "middle_y", "second", "third", "fourth", "zoom", "shift_x", "shift_y"),
    *("angle", "shear", "mirror", "upside_down", "hue", "saturation", "value"),
)
_RGB_TO_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
_YIQ_TO_RGB = torch.linalg.inv(_RGB_TO_YIQ)
_LEAST_SIDE = 2.0  # Pixels below which what is left of a cut-off box is dropped


class BoxedImage(NamedTuple):
    """A picture and what is on it."""

    pixels: Tensor
    """uint8 (3, h, w)"""
    boxes: Tensor
    """float32 (k, 4) x1, y1, x2, y2 in pixels."""
    labels: Tensor
    """int64 (k,)"""


class BoxDraws:
    """For each of n samples a number in [0, 1) for each purpose; from (seed, epoch, sample index) alone."""

    def __init__(self, seed: int, epochs: Tensor, ids: Tensor) -> None:
        """epochs, ids: int64 (n,)."""
        self._values = {
            purpose: draw(seed, epochs, ids, number).double() / 2**31
            for number, purpose in enumerate(_PURPOSES)
        }

    def each(self, purpose: str, low: float, high: float) -> Tensor:
        """float64 (n,), uniform in [low, high)."""
        return low + (high - low) * self._values[purpose]

    def one(self, i: int, purpose: str, low: float = 0.0, high: float = 1.0) -> float:
        """The i-th sample's."""
        return low + (high - low) * float(self._values[purpose][i])


@dataclass(frozen=True, slots=True)
class DetectionAugment:
    """How training pictures are varied.

    mosaic: share of samples that are put together from four pictures (Bochkovskiy et al.: YOLOv4,
    arXiv 2004.10934), until ``mosaic_until``, a share of the whole training (`Progress.fraction`).
    zoom: the magnification is drawn from [1 - zoom, 1 + zoom). shift: by at most this share of the side.
    degrees, shear: most degrees of turning and slanting, by which boxes grow.
    mirror, upside_down: shares of samples that are flipped.
    hue (share of a full turn), saturation, value: most relative change of the colours.
    keep: a box that is cut off to less than this share of its area is dropped.
    """

    mosaic: float = 1.0
    mosaic_until: float = 0.85
    zoom: float = 0.5
    shift: float = 0.1
    degrees: float = 0.0
    shear: float = 0.0
    mirror: float = 0.5
    upside_down: float = 0.0
    hue: float = 0.015
    saturation: float = 0.7
    value: float = 0.4
    keep: float = 0.2

    def __post_init__(self) -> None:
        most = {"zoom": 0.5, "shift": 0.5, "degrees": 180.0, "shear": 60.0}
        for name in self.__slots__:
            value, bound = getattr(self, name), most.get(name, 1.0)
            if not 0 <= value <= bound:
                raise UserError(f"data.augment.{name}={value}: must be in [0, {bound:g}].")

    def tiles(self, draws: BoxDraws, i: int, sample: int, near: range, progress: float) -> list[int]:
        """Which pictures make the i-th sample: itself, or itself and three more, out of ``near``."""
        if progress >= self.mosaic_until or draws.one(i, "mosaic") >= self.mosaic:
            return [sample]
        others = (int(draws.one(i, name, 0, len(near))) for name in ("second", "third", "fourth"))
        return [sample, *(near[other] for other in others)]

    def apply(self, tiles: Sequence[BoxedImage], draws: BoxDraws, i: int, side: int) -> BoxedImage:
        """The i-th sample, (3, side, side), from the pictures that `tiles` named, at most ``side`` long."""
        from torchvision.transforms.v2 import functional
        from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat

        canvas, whole_boxes, labels = self._laid_out(tiles, draws, i, side)
        visible_boxes = whole_boxes.clamp(0, 2 * side)
        boxes = BoundingBoxes(
            visible_boxes, format=BoundingBoxFormat.XYXY, canvas_size=(2 * side, 2 * side), clamping_mode=None
        )
        angle = draws.one(i, "angle", -self.degrees, self.degrees)
        slant = draws.one(i, "shear", -self.shear, self.shear)
        if self.degrees or self.shear:
            canvas = functional.affine(canvas, angle, [0, 0], 1.0, [slant, 0.0], fill=[float(GREY)] * 3)
            boxes = functional.affine(boxes, angle, [0, 0], 1.0, [slant, 0.0])
        wide = round(side / draws.one(i, "zoom", 1 - self.zoom, 1 + self.zoom))
        left, top = (
            min(max(round(side - wide / 2 + side * shift), 0), 2 * side - wide)
            for shift in (draws.one(i, name, -self.shift, self.shift) for name in ("shift_x", "shift_y"))
        )
        whole = _areas(boxes) * (side / wide) ** 2 * (_areas(whole_boxes) / _areas(visible_boxes))
        pixels = functional.resized_crop(canvas, top, left, wide, wide, [side, side])
        boxes = functional.resized_crop(boxes, top, left, wide, wide, [side, side])
        if draws.one(i, "mirror") < self.mirror:
            pixels, boxes = functional.horizontal_flip(pixels), functional.horizontal_flip(boxes)
        if draws.one(i, "upside_down") < self.upside_down:
            pixels, boxes = functional.vertical_flip(pixels), functional.vertical_flip(boxes)
        plain = boxes.as_subclass(Tensor).clamp(0, side)
        kept = (_areas(plain) >= self.keep * whole) & (_sides(plain).amin(1) >= _LEAST_SIDE)
        return BoxedImage(pixels, plain[kept], labels[kept])

    def colours(self, draws: BoxDraws) -> Tensor:
        """float32 (n, 3, 3): what each sample's RGB values are multiplied by.

        Hue, saturation and value as a turn and a stretch in YIQ, which is linear: a batch takes one product
        instead of a way to HSV and back (so does the ``hsv`` operator of DALI,
        docs.nvidia.com/deeplearning/dali).
        """
        angle = 2 * math.pi * draws.each("hue", -self.hue, self.hue)
        value = draws.each("value", 1 - self.value, 1 + self.value)
        chroma = value * draws.each("saturation", 1 - self.saturation, 1 + self.saturation)
        cosine, sine, zero = chroma * angle.cos(), chroma * angle.sin(), torch.zeros_like(angle)
        rows = [[value, zero, zero], [zero, cosine, -sine], [zero, sine, cosine]]
        turn = torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2).float()
        colours: Tensor = _YIQ_TO_RGB @ turn @ _RGB_TO_YIQ
        return colours

    def _laid_out(self, tiles: Sequence[BoxedImage], draws: BoxDraws, i: int, side: int) -> BoxedImage:
        """A canvas twice as wide as a sample: one picture in its middle, or four around a point near it."""
        canvas = torch.full((3, 2 * side, 2 * side), GREY, dtype=torch.uint8)
        if len(tiles) == 1:
            height, width = tiles[0].pixels.shape[1:]
            corners = [(side - width // 2, side - height // 2)]
        else:
            x, y = (round(side * draws.one(i, name, 0.5, 1.5)) for name in ("middle_x", "middle_y"))
            corners = [
                (x if right else x - tile.pixels.shape[2], y if below else y - tile.pixels.shape[1])
                for tile, (right, below) in zip(tiles, ((0, 0), (1, 0), (0, 1), (1, 1)), strict=True)
            ]
        boxes = []
        for tile, (left, top) in zip(tiles, corners, strict=True):
            height, width = tile.pixels.shape[1:]
            x1, y1, x2, y2 = (
                max(left, 0),
                max(top, 0),
                min(left + width, 2 * side),
                min(top + height, 2 * side),
            )
            canvas[:, y1:y2, x1:x2] = tile.pixels[:, y1 - top : y2 - top, x1 - left : x2 - left]
            boxes.append(tile.boxes + torch.tensor([left, top, left, top]))
        return BoxedImage(canvas, torch.cat(boxes), torch.cat([tile.labels for tile in tiles]))


def _sides(boxes: Tensor) -> Tensor:
    """(k, 4) -> (k, 2) widths and heights."""
    return boxes[:, 2:] - boxes[:, :2]


def _areas(boxes: Tensor) -> Tensor:
    return _sides(boxes).prod(1)
