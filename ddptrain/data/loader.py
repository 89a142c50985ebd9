"""What the two loading paths share: the same recipe in, the same pixels out."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddptrain.api.recipe import Loading
from ddptrain.api.sampler import Sampler
from ddptrain.data.augment import Augment, Normalise
from ddptrain.data.source import Split

Labelled = tuple[Tensor, Tensor]
"""float32 (n, C, H, W) images and int64 (n,) labels, on the device."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How labelled images become batches.

    fill: uint8 (C,) on the training device, the colour in which augmentation pads and paints.
    """

    train: Split
    valid: Split
    augment: Augment
    normalise: Normalise
    fill: Tensor
    seed: int

    @property
    def device(self) -> torch.device:
        return self.fill.device


class Loader(ABC):
    """A loading path."""

    @abstractmethod
    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Labelled]:
        """The sampler's micro-batches, augmented."""

    @abstractmethod
    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Labelled]:
        """Runs of consecutive validation samples, as they are."""

    @property
    @abstractmethod
    def loading(self) -> Loading: ...

    @abstractmethod
    def describe(self) -> str:
        """A few words for the log."""
