"""The two ways in which labelled images become batches: the same pixels, whatever reads them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddptrain.api.recipe import Loading
from ddptrain.api.sampler import Sampler
from ddptrain.data.augment import Augment, Moves, Normalise
from ddptrain.data.prefetch import on_device
from ddptrain.data.source import ArraySplit, Split
from ddptrain.data.stream.samples import training_keys, valid_keys
from ddptrain.data.transformed import TransformedImages
from ddptrain.data.workers import AS_IT_IS, Key, read_by, read_by_workers
from ddptrain.errors import UserError

Labelled = tuple[Tensor, Tensor]
"""float32 (n, C, H, W) images and int64 (n,) labels, or float32 (n, classes) soft targets, on the device."""

_DRAWN_AT_ONCE = 65536
"""Samples for which augmentation is drawn in one go. A draw takes about a hundred operations, whose calls
cost more than their arithmetic: on a GPU each is a launch."""

_BLOCK = 2**26
"""Bytes that are copied to the device at once: a whole set would be held twice, by host and device."""


@dataclass(frozen=True, slots=True)
class ImagePipeline:
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


class AugmentedImages(Dataset[Any]):
    """A split, read a batch at a time in a worker. A broken file is returned as its UserError: an exception
    would reach the trainer as a worker's traceback."""

    def __init__(self, split: Split, pipeline: ImagePipeline) -> None:
        self._split = split
        self._augment = pipeline.augment
        self._fill = pipeline.fill.cpu()
        self._seed = pipeline.seed

    def __len__(self) -> int:
        return len(self._split)

    def __getitems__(self, keys: list[Key]) -> tuple[Tensor, Tensor] | UserError:
        epochs, ids, _ = map(torch.tensor, zip(*keys, strict=True))
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


@final
class FileLoader:
    """DataLoader workers read and augment; the device normalises."""

    def __init__(self, pipeline: ImagePipeline, workers: int, train: TransformedImages | None = None) -> None:
        """train: what reads the training samples, where the pipeline's own `Augment` does not."""
        self._pipeline = pipeline
        self._workers = workers
        self._train = train or AugmentedImages(pipeline.train, pipeline)
        self._valid = AugmentedImages(pipeline.valid, pipeline)

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Labelled]:
        """The sampler's micro-batches, augmented."""
        return self._loaded(self._train, training_keys(self._pipeline.train.stream, sampler, steps))

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Labelled]:
        """Runs of consecutive validation samples, as they are."""
        return self._loaded(self._valid, valid_keys(self._pipeline.valid.stream, chunks))

    @property
    def loading(self) -> Loading:
        stream = self._pipeline.train.stream
        return Loading(self._workers, False, None if stream is None else stream.reading)

    def describe(self) -> str:
        return read_by(self._workers)

    def _loaded(
        self, images: AugmentedImages | TransformedImages, keys: Iterable[list[Key]]
    ) -> Iterator[Labelled]:
        for pixels, labels in read_by_workers(images, keys, self._workers, self._pipeline.device):
            yield self._pipeline.normalise(pixels), labels


@final
class ResidentLoader:
    """The whole set as one uint8 tensor on the device. A training batch costs one gather there; no worker, no
    copy from the host. On a GPU the next batch is made on its own stream while this one is trained on.

    The training set is stored padded, (H + 2 * crop) * (W + 2 * crop) * C bytes an image.
    """

    def __init__(self, pipeline: ImagePipeline) -> None:
        self._pipeline = pipeline
        self._train = _padded(pipeline.train, pipeline.augment, pipeline.fill)
        self._train_labels = pipeline.train.labels.to(pipeline.device)
        self._valid = _padded(pipeline.valid, Augment(), pipeline.fill)
        self._valid_labels = pipeline.valid.labels.to(pipeline.device)

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Labelled]:
        """The sampler's micro-batches, augmented."""
        return on_device(self._augmented(sampler, steps), self._pipeline.device)

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Labelled]:
        """Runs of consecutive validation samples, as they are."""
        places = [slice(chunk.start, chunk.stop) for chunk in chunks]
        normalise = self._pipeline.normalise
        batches = ((normalise(self._valid[place]), self._valid_labels[place]) for place in places)
        return on_device(batches, self._pipeline.device)

    def _augmented(self, sampler: Sampler, steps: range) -> Iterator[Labelled]:
        pipeline = self._pipeline
        samples = sampler.samples(steps, pipeline.device)
        at_once = max(1, _DRAWN_AT_ONCE // max(sampler.micro_sizes))
        while batches := list(islice(samples, at_once)):
            for (ids, _), moves in zip(batches, self._moves(batches), strict=True):
                images = pipeline.augment.gather(self._train, ids, moves, pipeline.fill)
                yield pipeline.normalise(images), self._train_labels[ids]

    def _moves(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Moves]:
        """For each of some batches of (ids, epochs)."""
        height, width, _ = self._pipeline.train.shape
        ids, epochs = (torch.cat(of) for of in zip(*batches, strict=True))
        moves = self._pipeline.augment.moves(self._pipeline.seed, epochs, ids, height, width)
        parts = (move.split([len(ids) for ids, _ in batches]) for move in moves)
        return map(Moves._make, zip(*parts, strict=True))

    @property
    def loading(self) -> Loading:
        return Loading(resident=True)

    def describe(self) -> str:
        size = self._train.numel() + self._valid.numel()
        return f"resident on {self._pipeline.device} ({size / 2**20:.0f} MiB)"


def in_memory(split: Split) -> ArraySplit:
    """A split whose pictures have been read, once."""
    if isinstance(split, ArraySplit):
        return split
    fill = torch.zeros(split.shape[2], dtype=torch.uint8)
    return ArraySplit(_padded(split, Augment(), fill), split.labels)


def _padded(split: Split, augment: Augment, fill: Tensor) -> Tensor:
    """All of a split as `Augment.padded` makes it, on the fill's device."""
    height, width, channels = split.shape
    size = (len(split), height + 2 * augment.crop, width + 2 * augment.crop, channels)
    whole = torch.empty(size, dtype=torch.uint8, device=fill.device)
    block = max(1, _BLOCK // (height * width * channels))
    for ids, place in zip(torch.arange(len(split)).split(block), whole.split(block), strict=True):
        place.copy_(augment.padded(split.images(ids).to(fill.device), fill))
    return whole
