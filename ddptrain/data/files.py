"""Images read by a DataLoader's workers: decode, crop, flip there; normalise on the device."""

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddptrain.api.recipe import Loading
from ddptrain.api.sampler import Sampler
from ddptrain.data.augment import Augment
from ddptrain.data.loader import Labelled, Loader, Recipe
from ddptrain.data.source import Split
from ddptrain.data.workers import read_by_workers
from ddptrain.errors import UserError

Key = tuple[int, int]
"""(epoch, sample index); epoch -1 asks for the image as it is."""

AS_IT_IS = -1


class AugmentedImages(Dataset[Any]):
    """A split, read a batch at a time in a worker. A broken file comes back as its UserError, for
    an exception would reach the trainer as a worker's traceback."""

    def __init__(self, split: Split, augment: Augment, fill: Tensor, seed: int) -> None:
        self._split = split
        self._augment = augment
        self._fill = fill
        self._seed = seed

    def __len__(self) -> int:
        return len(self._split)

    def __getitems__(self, keys: list[Key]) -> tuple[Tensor, Tensor] | UserError:
        epochs, ids = torch.tensor(keys, dtype=torch.int64).unbind(1)
        try:
            images = self._split.images(ids)
        except UserError as error:
            return error
        labels = self._split.labels[ids]
        if keys[0][0] == AS_IT_IS:
            return images, labels
        height, width, _ = self._split.shape
        moves = self._augment.moves(self._seed, epochs, ids, height, width)
        padded = self._augment.padded(images, self._fill)
        return self._augment.gather(padded, torch.arange(len(ids)), moves, self._fill), labels


class _Keys:
    """A batch sampler over the whole run, so that workers are started once, not every epoch."""

    def __init__(self, sampler: Sampler, steps: range) -> None:
        self._sampler = sampler
        self._steps = steps

    def __iter__(self) -> Iterator[list[Key]]:
        for ids, epochs in self._sampler.samples(self._steps, torch.device("cpu")):
            yield list(zip(epochs.tolist(), ids.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self._steps) * len(self._sampler.micro_sizes)


@final
class FileLoader(Loader):
    """DataLoader workers read and augment; the device normalises."""

    def __init__(self, recipe: Recipe, workers: int) -> None:
        fill = recipe.fill.cpu()
        self._recipe = recipe
        self._workers = workers
        self._train = AugmentedImages(recipe.train, recipe.augment, fill, recipe.seed)
        self._valid = AugmentedImages(recipe.valid, recipe.augment, fill, recipe.seed)

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Labelled]:
        return self._loaded(self._train, _Keys(sampler, steps))

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Labelled]:
        return self._loaded(self._valid, [[(AS_IT_IS, i) for i in chunk] for chunk in chunks])

    @property
    def loading(self) -> Loading:
        return Loading(self._workers, resident=False)

    def describe(self) -> str:
        return f"read by {self._workers} worker{'' if self._workers == 1 else 's'} a rank"

    def _loaded(self, images: AugmentedImages, keys: Any) -> Iterator[Labelled]:
        for pixels, labels in read_by_workers(images, keys, self._workers, self._recipe.device):
            yield self._recipe.normalise(pixels), labels
