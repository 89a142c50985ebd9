"""Crop, flip, cutout and normalise, drawn once and applied in two ways with the same pixels.

What happens to a sample follows from (seed, epoch, sample index). `apply_one` does it to one image
with torchvision.transforms.v2, in a loader's worker; `gather` does it to a whole batch at once,
where a resident set lies. Both give equal bits, which a test compares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ddptrain.data.dice import draw_below
from ddptrain.errors import UserError

_TOP, _LEFT, _FLIP, _CUT_Y, _CUT_X = range(5)


class Moves(NamedTuple):
    """What is done to each of n images: int64 (n,) each."""

    top: Tensor
    """First row of the crop in the padded image, in [0, 2 * crop]."""
    left: Tensor
    flip: Tensor
    """1 to mirror left and right, after the crop."""
    cut_y: Tensor
    """Centre of the square that is painted over."""
    cut_x: Tensor


@dataclass(frozen=True, slots=True)
class Augment:
    """How training images are varied.

    crop: pixels of padding (in the set's mean colour) around an image, out of which a window of the
    original size is cut at random. flip: mirror half of the images. cutout: side in pixels of a
    square painted over in the mean colour (DeVries, Taylor: arXiv 1708.04552), 0 for none.
    """

    crop: int = 0
    flip: bool = False
    cutout: int = 0

    def __post_init__(self) -> None:
        for name, value in (("crop", self.crop), ("cutout", self.cutout)):
            if value < 0:
                raise UserError(f"data.augment.{name}={value}: must be 0 or more pixels.")

    def moves(self, seed: int, epochs: Tensor, ids: Tensor, height: int, width: int) -> Moves:
        """Draw for each (epoch, sample); int64 (n,) on any device, the same numbers on each."""
        offsets, faces = 2 * self.crop + 1, 2 if self.flip else 1
        return Moves(
            draw_below(offsets, seed, epochs, ids, _TOP),
            draw_below(offsets, seed, epochs, ids, _LEFT),
            draw_below(faces, seed, epochs, ids, _FLIP),
            draw_below(height, seed, epochs, ids, _CUT_Y),
            draw_below(width, seed, epochs, ids, _CUT_X),
        )

    def apply_one(self, image: Tensor, moves: Moves, i: int, fill: Sequence[int]) -> Tensor:
        """uint8 (H, W, C) -> (H, W, C): the i-th of the moves, by torchvision's functions."""
        from torchvision.transforms.v2 import functional

        height, width, _ = image.shape
        picture = image.permute(2, 0, 1)
        top, left, flip, cut_y, cut_x = (int(move[i]) for move in moves)
        if self.crop:
            picture = functional.pad(picture, [self.crop], fill=[float(c) for c in fill])
            picture = functional.crop(picture, top, left, height, width)
        if flip:
            picture = functional.horizontal_flip(picture)
        if self.cutout:
            y, x = max(cut_y - self.cutout // 2, 0), max(cut_x - self.cutout // 2, 0)
            bottom = min(cut_y - self.cutout // 2 + self.cutout, height)
            right = min(cut_x - self.cutout // 2 + self.cutout, width)
            paint = torch.tensor(fill, dtype=torch.uint8).view(-1, 1, 1)
            picture = functional.erase(picture, y, x, bottom - y, right - x, paint)
        return picture.permute(1, 2, 0)

    def padded(self, images: Tensor, fill: Tensor) -> Tensor:
        """uint8 (n, H, W, C) -> (n, H + 2 * crop, W + 2 * crop, C), once for a resident set."""
        if not self.crop:
            return images
        n, height, width, channels = images.shape
        size = (n, height + 2 * self.crop, width + 2 * self.crop, channels)
        around = fill.to(images.device).expand(size).contiguous()
        around[:, self.crop : -self.crop, self.crop : -self.crop] = images
        return around

    def gather(self, padded: Tensor, ids: Tensor, moves: Moves, fill: Tensor) -> Tensor:
        """uint8 (k, H, W, C): augmented images out of a `padded` set, in one gather of pixels."""
        _, tall, wide, channels = padded.shape
        height, width = tall - 2 * self.crop, wide - 2 * self.crop
        rows = torch.arange(height, device=padded.device)
        columns = torch.arange(width, device=padded.device)
        mirrored = torch.where(moves.flip[:, None] == 1, width - 1 - columns, columns)
        first = ids * (tall * wide) + moves.top * wide + moves.left
        pixels = first[:, None, None] + rows[:, None] * wide + mirrored[:, None, :]
        images = padded.view(-1, channels).index_select(0, pixels.view(-1))
        images = images.view(len(ids), height, width, channels)
        if self.cutout:
            y, x = moves.cut_y - self.cutout // 2, moves.cut_x - self.cutout // 2
            in_rows = (rows >= y[:, None]) & (rows < y[:, None] + self.cutout)
            in_columns = (columns >= x[:, None]) & (columns < x[:, None] + self.cutout)
            square = in_rows[:, :, None] & in_columns[:, None, :]
            images = torch.where(square[..., None], fill, images)
        return images


@dataclass(frozen=True, slots=True)
class Normalise:
    """uint8 images to zero mean and unit deviation, the same for both loading paths.

    mean, std: float32 (C,) in 0..255. channels_last: memory format of the result.
    """

    mean: Tensor
    std: Tensor
    channels_last: bool

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 (n, H, W, C) -> float32 (n, C, H, W)."""
        normal = images.to(torch.float32).sub_(self.mean).div_(self.std).permute(0, 3, 1, 2)
        return normal if self.channels_last else normal.contiguous()
