"""In which order the training samples of an epoch come: a pure function of the seed and the epoch."""

import hashlib
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from ddptrain.api.rng import derive_seed
from ddptrain.errors import UserError


class EpochOrder(ABC):
    """Of a training set; the same on all ranks."""

    repeats = False
    """A sample may come several times in an epoch, or not at all."""

    digest = ""
    """A hash of what the order depends on beside the data's identity; a resume under another is refused."""

    def check(self, size: int) -> None:  # noqa: B027 # most orders are of any size
        """Raise UserError where this is not an order of so many samples."""

    @abstractmethod
    def indices(self, size: int, seed: int, epoch: int) -> Tensor:
        """int64 (size,): the sample indices of an epoch."""


@final
class Shuffled(EpochOrder):
    """Each sample once, all shuffled."""

    def indices(self, size: int, seed: int, epoch: int) -> Tensor:
        return torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed(seed, epoch)))


@final
class Weighted(EpochOrder):
    """By systematic sampling: a sample comes as often as its weight says, rounded up or down by chance. Equal
    weights give each once.

    weights: float64 (size,), positive, on the CPU; how often each sample is drawn, relative to the others.
    """

    repeats = True

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self.digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]

    def check(self, size: int) -> None:
        weights = self.weights
        positive = bool((weights > 0).all()) and bool(weights.isfinite().all())
        if weights.shape != (size,) or not positive:
            raise UserError(
                f"Data.epoch_order: weights must be {size} positive numbers, one a training sample."
            )

    def indices(self, size: int, seed: int, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
        shuffled = torch.randperm(size, generator=generator)
        ends = self.weights[shuffled].cumsum(0)
        offset = torch.rand(1, generator=generator, dtype=torch.float64)
        points = (torch.arange(size) + offset) * (ends[-1] / size)
        sampled = shuffled[torch.searchsorted(ends, points, right=True).clamp(max=size - 1)]
        return sampled[torch.randperm(size, generator=generator)]
