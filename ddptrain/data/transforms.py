"""Random crops, flips, colours and erasing, one sample at a time: torchvision's kernels, our draws.

The parameters have the distributions of torchvision.transforms.v2's classes of the same names and follow from
(seed, epoch, sample index) alone. Pixels are uint8 on the CPU throughout: torchvision's floating kernels take
one factor for a whole batch, and round otherwise on a GPU.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ddptrain.data.draws import Draws, SampleKey
from ddptrain.data.mixing import Mix
from ddptrain.data.pictures import Box
from ddptrain.data.policies import RandAugment, TrivialAugmentWide
from ddptrain.errors import UserError

_TRIES = 10
"""Rectangles drawn before one that doesn't fit is given up, as in torchvision."""
CROP, _MIRROR, _UPSIDE_DOWN, _JITTER, _POLICY, _ERASE = range(6)


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A rectangle of a random area and form, scaled to the set's size (Szegedy et al., arXiv 1409.4842).

    scale: least and most share of the picture's area, in (0, 1]. ratio: least and most width / height, above
    0.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        check_range("resized_crop.scale", self.scale, most=1.0)
        check_range("resized_crop.ratio", self.ratio)

    def params(self, draws: Draws, height: int, width: int) -> Box:
        """For a picture of this size. Where ten rectangles don't fit: the middle one of the nearest form."""
        for wide, tall in _sides(draws, height * width, self.scale, self.ratio):
            if 0 < wide <= width and 0 < tall <= height:
                return Box(draws.below(height - tall + 1), draws.below(width - wide + 1), tall, wide)
        narrowest, widest = self.ratio
        tall, wide = height, width
        if width / height < narrowest:
            tall = max(round(width / narrowest), 1)
        elif width / height > widest:
            wide = max(round(height * widest), 1)
        return Box((height - tall) // 2, (width - wide) // 2, tall, wide)


class Jitter(NamedTuple):
    """What `ColorJitter` does to one picture."""

    order: tuple[int, ...]
    """Of brightness (0), contrast (1), saturation (2) and hue (3)."""
    factors: tuple[float | None, ...]
    """In that numbering; None for what is left alone."""


@dataclass(frozen=True, slots=True)
class ColorJitter:
    """Brightness, contrast, saturation and hue, in random order.

    brightness, contrast, saturation: a factor is drawn from [max(0, 1 - value), 1 + value]. hue: a share of
    the colour circle, at most 0.5, by which hues are turned either way. 0 leaves one alone.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value < 0 or (name == "hue" and value > 0.5):
                rule = "from 0 (off) to 0.5" if name == "hue" else "0 (off) or more"
                raise UserError(f"data.augment.color_jitter.{name}={value}: must be {rule}.")

    def params(self, draws: Draws) -> Jitter:
        order = draws.permutation(4)
        factors = [
            draws.uniform(max(0.0, 1 - value), 1 + value) if value else None
            for value in (self.brightness, self.contrast, self.saturation)
        ]
        return Jitter(order, (*factors, draws.uniform(-self.hue, self.hue) if self.hue else None))

    def apply(self, image: Tensor, jitter: Jitter) -> Tensor:
        """uint8 (C, H, W), C 1 or 3."""
        from torchvision.transforms.v2 import functional as f

        adjust = (f.adjust_brightness, f.adjust_contrast, f.adjust_saturation, f.adjust_hue)
        for which in jitter.order:
            factor = jitter.factors[which]
            if factor is not None:
                image = adjust[which](image, factor)
        return image


@dataclass(frozen=True, slots=True)
class RandomErasing:
    """A rectangle is painted over in the set's mean colour (Zhong et al., arXiv 1708.04896).

    p: share of the samples. scale: least and most share of the area. ratio: least and most height / width.
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)

    def __post_init__(self) -> None:
        check_share("erasing.p", self.p)
        check_range("erasing.scale", self.scale, most=1.0)
        check_range("erasing.ratio", self.ratio)

    def params(self, draws: Draws, height: int, width: int) -> Box | None:
        """None where nothing is erased: not drawn, or ten rectangles did not fit."""
        if draws.uniform() >= self.p:
            return None
        for tall, wide in _sides(draws, height * width, self.scale, self.ratio):
            if tall < height and wide < width:
                return Box(draws.below(height - tall + 1), draws.below(width - wide + 1), tall, wide)
        return None

    def apply(self, image: Tensor, box: Box | None, fill: Tensor) -> Tensor:
        """uint8 (C, H, W); fill: uint8 (C,)."""
        from torchvision.transforms.v2 import functional

        if box is None:
            return image
        return functional.erase(image, *box, fill[:, None, None])  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Transforms:
    """How training images are varied, in this order; None or 0 leaves a part out.

    resized_crop: out of the picture as it is stored, for files at their full resolution; without, pictures
    are cut and scaled to the set's size. horizontal_flip, vertical_flip: shares of samples, in [0, 1].
    policy: draws operations. mix: with another training sample.
    """

    resized_crop: RandomResizedCrop | None = None
    horizontal_flip: float = 0.5
    vertical_flip: float = 0.0
    color_jitter: ColorJitter | None = None
    policy: TrivialAugmentWide | RandAugment | None = None
    erasing: RandomErasing | None = None
    mix: Mix | None = None

    def __post_init__(self) -> None:
        check_share("horizontal_flip", self.horizontal_flip)
        check_share("vertical_flip", self.vertical_flip)

    def apply(self, image: Tensor, fill: Tensor, key: SampleKey) -> Tensor:
        """uint8 (C, H, W), of the set's size -> the same: all but the crop, which makes it, and mixing.

        fill: uint8 (C,), the colour of what is painted over or comes in from outside.
        """
        from torchvision.transforms.v2 import functional

        size = (image.shape[1], image.shape[2])
        if Draws(*key, _MIRROR).uniform() < self.horizontal_flip:
            image = functional.horizontal_flip(image)
        if Draws(*key, _UPSIDE_DOWN).uniform() < self.vertical_flip:
            image = functional.vertical_flip(image)
        if self.color_jitter is not None:
            image = self.color_jitter.apply(image, self.color_jitter.params(Draws(*key, _JITTER)))
        if self.policy is not None:
            image = self.policy.apply(image, self.policy.params(Draws(*key, _POLICY), *size), fill)
        if self.erasing is not None:
            image = self.erasing.apply(image, self.erasing.params(Draws(*key, _ERASE), *size), fill)
        return image


def _sides(
    draws: Draws, whole: int, scale: Sequence[float], ratio: Sequence[float]
) -> Iterator[tuple[int, int]]:
    """Ten times the sides of a rectangle, in pixels: a share of the whole area, and first / second side."""
    for _ in range(_TRIES):
        area = whole * draws.uniform(*scale)
        form = math.exp(draws.uniform(*map(math.log, ratio)))
        yield round(math.sqrt(area * form)), round(math.sqrt(area / form))


def check_share(name: str, value: float) -> None:
    """Raises UserError unless it is in [0, 1]."""
    if not 0 <= value <= 1:
        raise UserError(f"data.augment.{name}={value}: must be from 0 (off) to 1 (always).")


def check_range(name: str, pair: Sequence[float], most: float = math.inf) -> None:
    """Raises UserError unless it is a least and a most, both above 0 and at most ``most``."""
    low, high = pair
    if not 0 < low <= high <= most:
        upper = "" if most == math.inf else f", and at most {most:g}"
        raise UserError(
            f"data.augment.{name}=[{low:g},{high:g}]: must be a least and a most value, above 0{upper}."
        )
