"""Crop, flip, light, cutout and normalise: a batch at once, the same pixels whatever has read them.

What happens to a sample follows from (seed, epoch, sample index). `gather` cuts a batch out of padded images:
out of a resident set, where that lies, or out of the batch that a loader's worker has just read.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ddptrain.api.rng import draw_below
from ddptrain.errors import UserError

_TOP, _LEFT, _FLIP, _CUT_Y, _CUT_X, _BRIGHTNESS, _CONTRAST = range(7)
_MIDDLE, _FINE = 128, 1024
"""The grey that contrast leaves alone; steps of a pixel's level in which light is drawn."""


class Moves(NamedTuple):
    """What is done to each of n images; int64 (n,) of zeros for what is off."""

    top: Tensor
    """First row of the crop in the padded image, in [0, 2 * crop]; int64 (n,)."""
    left: Tensor
    flip: Tensor
    """1 to mirror left and right, after the crop; uint8 (n,)."""
    cut_rows: Tensor
    """Those that the square painted over lies in; bool (n, H)."""
    cut_columns: Tensor
    gain: Tensor
    """A pixel x becomes ``gain * x + lift``, rounded down; float32 (n,)."""
    lift: Tensor


@dataclass(frozen=True, slots=True)
class Augment:
    """How training images are varied.

    crop: pixels of padding (in the set's mean colour) around an image, out of which a window of the
    original size is cut at random. horizontal_flip: mirror half of the images, drawn anew in each epoch;
    ``alternate`` draws in epoch 0 only, and from then on every image is turned over from one epoch to the
    next, so that two epochs in a row show both sides of all of them (Jordan: arXiv 2404.00498). cutout: side
    in pixels of a square painted over in the mean colour (DeVries, Taylor: arXiv 1708.04552), 0 for none.
    brightness: an image gets lighter or darker by up to this share of white. contrast: its pixels' distances
    from the middle grey, 128, are stretched or shrunk by up to this share. Both by an amount drawn evenly,
    in arithmetic that rounds only at its end, so that all devices give the same pixels.
    """

    crop: int = 0
    horizontal_flip: bool | Literal["alternate"] = False
    cutout: int = 0
    brightness: float = 0.0
    contrast: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("crop", self.crop), ("cutout", self.cutout)):
            if value < 0:
                raise UserError(f"data.augment.{name}={value}: must be 0 or more pixels.")
        for name, share in (("brightness", self.brightness), ("contrast", self.contrast)):
            if not 0 <= share <= 1:
                raise UserError(f"data.augment.{name}={share}: must be from 0 (off) to 1.")

    def moves(self, seed: int, epochs: Tensor, ids: Tensor, height: int, width: int) -> Moves:
        """Draw for each (epoch, sample), int64 (n,) each: the same numbers on any device."""
        none, offsets = torch.zeros_like(ids), 2 * self.crop + 1

        def below(bound: int, purpose: int) -> Tensor:
            return draw_below(bound, seed, epochs, ids, purpose)

        def around_zero(most: float, purpose: int) -> Tensor:
            steps = round(_FINE * most)
            return below(2 * steps + 1, purpose) - steps

        gain, lift = none, none
        if self.brightness or self.contrast:
            stretch = around_zero(self.contrast, _CONTRAST)
            gain = 1 + stretch / _FINE
            lift = (around_zero(255 * self.brightness, _BRIGHTNESS) - _MIDDLE * stretch) / _FINE + 0.5
        return Moves(
            below(offsets, _TOP) if self.crop else none,
            below(offsets, _LEFT) if self.crop else none,
            self._faces(seed, epochs, ids) if self.horizontal_flip else none,
            self._covered(below(height, _CUT_Y), height) if self.cutout else none,
            self._covered(below(width, _CUT_X), width) if self.cutout else none,
            gain,
            lift,
        )

    def _covered(self, centres: Tensor, size: int) -> Tensor:
        """bool (n, size): where a side of the square lies, cut off at the image's edge."""
        first = centres[:, None] - self.cutout // 2
        places = torch.arange(size, device=centres.device)
        return (places >= first) & (places < first + self.cutout)

    def _faces(self, seed: int, epochs: Tensor, ids: Tensor) -> Tensor:
        if self.horizontal_flip != "alternate":
            return draw_below(2, seed, epochs, ids, _FLIP).to(torch.uint8)
        return ((draw_below(2, seed, torch.zeros_like(epochs), ids, _FLIP) + epochs) % 2).to(torch.uint8)

    def padded(self, images: Tensor, fill: Tensor) -> Tensor:
        """uint8 (n, H, W, C) -> (n, H + 2 * crop, W + 2 * crop, C), contiguous; once for a resident set."""
        if not self.crop:
            return images.contiguous()
        n, height, width, channels = images.shape
        tall, wide = height + 2 * self.crop, width + 2 * self.crop
        # a row at a time, as in `Normalise`
        rows = fill.to(images.device).repeat(wide).expand(n, tall, -1).contiguous()
        around = rows.view(n, tall, wide, channels)
        around[:, self.crop : -self.crop, self.crop : -self.crop] = images
        return around

    def gather(self, padded: Tensor, ids: Tensor, moves: Moves, fill: Tensor) -> Tensor:
        """uint8 (k, H, W, C): the images with these indices out of `padded` ones, augmented.

        No number is read from the device, and shapes depend on k alone.
        """
        _, tall, wide, channels = padded.shape
        height, width = tall - 2 * self.crop, wide - 2 * self.crop
        corners = torch.add(torch.add(moves.left, moves.top, alpha=wide), ids, alpha=tall * wide)
        images = _windows(padded, height, width).index_select(0, corners)
        images = images.view(-1, height, width, channels)
        if self.horizontal_flip:
            # in uint8, which wraps around: on a CPU twice as fast as a choice of pixels
            images = torch.addcmul(images, images.flip(2) - images, moves.flip[:, None, None, None])
        if self.brightness or self.contrast:
            lit = torch.addcmul(moves.lift[:, None], images.flatten(1), moves.gain[:, None])
            images = lit.clamp_(0, 255).to(torch.uint8).view(images.shape)
        return self._cut(images, moves, fill) if self.cutout else images

    def _cut(self, images: Tensor, moves: Moves, fill: Tensor) -> Tensor:
        _, _, width, channels = images.shape
        in_columns = moves.cut_columns.repeat_interleave(channels, dim=1)
        square = moves.cut_rows[:, :, None] & in_columns[:, None, :]
        return torch.where(square, fill.repeat(width), images.flatten(2)).view(images.shape)


def _windows(padded: Tensor, height: int, width: int) -> Tensor:
    """A view of (n, H, W, C) in which item i is the window that begins at pixel i of all pixels in a row:
    (positions, height, width * C). Taking some copies runs of bytes, with no index for each pixel."""
    n, tall, wide, channels = padded.shape
    positions = n * tall * wide - (height - 1) * wide - width + 1
    return padded.as_strided((positions, height, width * channels), (channels, wide * channels, 1))


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
        if images.is_cuda:
            normal = images.sub(self.mean).div_(self.std)  # two launches
        else:
            # a row at a time: over the three numbers of a pixel a loop costs six times as much
            width = images.shape[2]
            mean, std = self.mean.repeat(width), self.std.repeat(width)
            normal = images.flatten(2).to(torch.float32).sub_(mean).div_(std).view(images.shape)
        normal = normal.permute(0, 3, 1, 2)
        return normal if self.channels_last else normal.contiguous()
