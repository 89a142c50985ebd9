"""The whole set as one uint8 tensor on the device; batches are cut and augmented there."""

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from ddptrain.data.augment import Augment
from ddptrain.data.loader import Labelled, Loader, Recipe
from ddptrain.data.sampler import Sampler
from ddptrain.data.source import Split
from ddptrain.protocols import Loading


@final
class ResidentLoader(Loader):
    """A training batch costs one gather on the device; no worker, no copy from the host."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._train = recipe.augment.padded(_on_device(recipe.train, recipe.device), recipe.fill)
        self._train_labels = recipe.train.labels.to(recipe.device)
        self._valid = _on_device(recipe.valid, recipe.device)
        self._valid_labels = recipe.valid.labels.to(recipe.device)

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Labelled]:
        for ids, epochs in sampler.samples(steps, self._recipe.device):
            yield self._recipe.normalise(self.augmented(ids, epochs)), self._train_labels[ids]

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Labelled]:
        for chunk in chunks:
            chosen = slice(chunk.start, chunk.stop)
            yield self._recipe.normalise(self._valid[chosen]), self._valid_labels[chosen]

    def augmented(self, ids: Tensor, epochs: Tensor) -> Tensor:
        """uint8 (n, H, W, C): training samples as they are seen in those epochs."""
        augment, (height, width, _) = self._recipe.augment, self._recipe.train.shape
        if augment == Augment():
            return self._train[ids]
        moves = augment.moves(self._recipe.seed, epochs, ids, height, width)
        return augment.gather(self._train, ids, moves, self._recipe.fill)

    @property
    def loading(self) -> Loading:
        return Loading(resident=True)

    def describe(self) -> str:
        size = self._train.numel() + self._valid.numel()
        return f"resident on {self._recipe.device} ({size / 2**20:.0f} MiB)"


def _on_device(split: Split, device: torch.device) -> Tensor:
    return split.images(torch.arange(len(split))).to(device)
