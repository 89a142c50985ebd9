"""The whole set as one uint8 tensor on the device; batches are cut and augmented there."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import final

import torch
from torch import Tensor

from ddptrain.api.recipe import Loading
from ddptrain.api.sampler import Sampler
from ddptrain.data.augment import Augment, Moves
from ddptrain.data.loader import Labelled, Loader, Recipe
from ddptrain.data.prefetch import on_device
from ddptrain.data.source import Split

_DRAWN_AT_ONCE = 65536
"""Samples, of a few batches or of many. To draw takes about a hundred operations, whose calls cost more than
their arithmetic: on a GPU each is a launch."""

_BLOCK = 2**26
"""Bytes that go to the device at once: of a whole set the host and the device would hold it twice."""


@final
class ResidentLoader(Loader):
    """A training batch costs one gather on the device; no worker, no copy from the host. On a GPU the next
    batch is made on a stream of its own while this one is trained on.

    The training set lies there padded, (H + 2 * crop) * (W + 2 * crop) * C bytes an image.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._train = _padded(recipe.train, recipe.augment, recipe.fill)
        self._train_labels = recipe.train.labels.to(recipe.device)
        self._valid = _padded(recipe.valid, Augment(), recipe.fill)
        self._valid_labels = recipe.valid.labels.to(recipe.device)

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Labelled]:
        return on_device(self._augmented(sampler, steps), self._recipe.device)

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Labelled]:
        return on_device(self._as_they_are(chunks), self._recipe.device)

    def _augmented(self, sampler: Sampler, steps: range) -> Iterator[Labelled]:
        recipe = self._recipe
        samples = sampler.samples(steps, recipe.device)
        at_once = max(1, _DRAWN_AT_ONCE // max(sampler.micro_sizes))
        while batches := list(islice(samples, at_once)):
            for (ids, _), moves in zip(batches, self._moves(batches), strict=True):
                images = recipe.augment.gather(self._train, ids, moves, recipe.fill)
                yield recipe.normalise(images), self._train_labels[ids]

    def _as_they_are(self, chunks: Sequence[range]) -> Iterator[Labelled]:
        for chunk in chunks:
            chosen = slice(chunk.start, chunk.stop)
            yield self._recipe.normalise(self._valid[chosen]), self._valid_labels[chosen]

    def _moves(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Moves]:
        """Of each of some batches of (ids, epochs)."""
        height, width, _ = self._recipe.train.shape
        ids, epochs = (torch.cat(of) for of in zip(*batches, strict=True))
        moves = self._recipe.augment.moves(self._recipe.seed, epochs, ids, height, width)
        parts = (move.split([len(ids) for ids, _ in batches]) for move in moves)
        return map(Moves._make, zip(*parts, strict=True))

    @property
    def loading(self) -> Loading:
        return Loading(resident=True)

    def describe(self) -> str:
        size = self._train.numel() + self._valid.numel()
        return f"resident on {self._recipe.device} ({size / 2**20:.0f} MiB)"


def _padded(split: Split, augment: Augment, fill: Tensor) -> Tensor:
    """All of a split as `Augment.padded` makes it, on the fill's device."""
    height, width, channels = split.shape
    size = (len(split), height + 2 * augment.crop, width + 2 * augment.crop, channels)
    whole = torch.empty(size, dtype=torch.uint8, device=fill.device)
    block = max(1, _BLOCK // (height * width * channels))
    for ids, place in zip(torch.arange(len(split)).split(block), whole.split(block), strict=True):
        place.copy_(augment.padded(split.images(ids).to(fill.device), fill))
    return whole
