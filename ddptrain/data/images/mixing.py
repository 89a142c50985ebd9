"""Mixing a training sample with another one: MixUp and CutMix."""

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ddptrain.api.rng import derive_seed
from ddptrain.errors import UserError

_PURPOSE = 6  # of the seeds: a sample's own draws have another
_UNSEEN = 1 / 512
"""A picture of a smaller weight can't change a level of 0 to 255 once that is rounded."""


class Mixture(NamedTuple):
    """How a sample is mixed."""

    partner: int
    """The other sample's index."""
    share: float
    """The sample's own weight in the target, in [0, 1]; the rest is the partner's."""
    box: tuple[int, int, int, int] | None
    """CutMix: left, top, right, bottom of what is the partner's. None: pixels are mixed by ``share``."""

    @property
    def shows_own(self) -> bool:
        """Whether the sample's own picture has a part in the pixels."""
        return self.share > 0 if self.box else self.share >= _UNSEEN

    @property
    def shows_partner(self) -> bool:
        return self.share < 1 if self.box else 1 - self.share >= _UNSEEN


@dataclass(frozen=True, slots=True)
class Mix:
    """With a partner that each sample draws for itself: any other training sample, augmented as it is itself
    in that epoch.

    mixup: alpha of Beta(alpha, alpha), of which the share of the sample's own pixels is drawn (Zhang et al.,
    arXiv 1710.09412). cutmix: alpha of the share of its area that is left when the partner's pixels are put
    into a box (Yun et al., arXiv 1905.04899). 0 leaves one out; with both, each has half of the samples.
    """

    mixup: float = 0.2
    cutmix: float = 1.0

    def __post_init__(self) -> None:
        for name, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            if alpha < 0:
                raise UserError(f"data.augment.mix.{name}={alpha}: must be 0 (off) or more.")
        if not self.mixup and not self.cutmix:
            raise UserError("data.augment.mix: mixup and cutmix are both 0; set data.augment.mix=null.")

    def mixture(self, seed: int, epoch: int, sample: int, near: range, height: int, width: int) -> Mixture:
        """near: the samples that this one, which is among them, may be mixed with. height, width: of the
        set's pictures."""
        generator = random.Random(derive_seed(seed, epoch, sample, _PURPOSE))
        place = sample - near.start + 1 + generator.randrange(max(len(near) - 1, 1))
        partner = near[place % len(near)]
        cuts = generator.random() < 0.5 if self.mixup and self.cutmix else bool(self.cutmix)
        if not cuts:
            return Mixture(partner, generator.betavariate(self.mixup, self.mixup), None)
        half = 0.5 * math.sqrt(1 - generator.betavariate(self.cutmix, self.cutmix))
        x, y = generator.randrange(width), generator.randrange(height)
        right, down = int(half * width), int(half * height)
        box = (max(x - right, 0), max(y - down, 0), min(x + right, width), min(y + down, height))
        cut = (box[2] - box[0]) * (box[3] - box[1])
        return Mixture(partner, 1 - cut / (height * width), box)


def mixed_pixels(own: Tensor, other: Tensor, mixture: Mixture) -> Tensor:
    """uint8 (H, W, C) each. Mixed levels are rounded to 8 bits: at most half a level from torchvision's."""
    if mixture.box is not None:
        left, top, right, bottom = mixture.box
        image = own.clone()
        image[top:bottom, left:right] = other[top:bottom, left:right]
        return image
    share = mixture.share
    return other.mul(1 - share).add_(own.mul(share)).round_().to(torch.uint8)


def soft_target(own: Tensor, other: Tensor, share: float, classes: int) -> Tensor:
    """float32 (classes,): ``share`` is the sample's own label's, the rest its partner's; both as
    `ddptrain.data.images.source.Split.labels`."""
    if own.ndim:
        return torch.lerp(other, own, share)
    target = torch.zeros(classes)
    target[own] += share
    target[other] += 1 - share
    return target
