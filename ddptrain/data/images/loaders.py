"""Labelled images, cropped, flipped and lit a batch at a time: by loader processes, or on the device out of a
resident set, with the same pixels."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple, final

import torch
from torch import Tensor

from ddptrain.api.recipe import Loading
from ddptrain.api.sampler import Sampler
from ddptrain.data.images.augment import Augment, Moves, Normalise
from ddptrain.data.images.source import ArraySplit, LabelledImage, Split
from ddptrain.data.prefetch import on_device
from ddptrain.data.workers import Key

Labelled = tuple[Tensor, Tensor]
"""float32 (n, C, H, W) images and int64 (n,) labels, or float32 (n, classes) soft targets, on the device."""

_DRAWN_AT_ONCE = 65536
"""Samples for which augmentation is drawn in one go. A draw takes about a hundred operations, whose calls
cost more than their arithmetic: on a GPU each is a launch."""

_BLOCK = 2**26
"""Bytes that are copied to the device at once: a whole set would be held twice, by host and device."""


class KeyedImage(NamedTuple):
    key: Key
    labelled: LabelledImage


def keyed(split: Split, key: Key) -> KeyedImage:
    """The transform of a sample that `AugmentedBatch` augments."""
    return KeyedImage(key, split[key.sample])


@final
class AugmentedBatch:
    """Collates `KeyedImage`, augmented as a batch: uint8 (n, H, W, C) and their labels.

    fill: uint8 (C,), on the CPU, the colour in which augmentation pads and paints.
    """

    def __init__(self, augment: Augment, fill: Tensor, seed: int) -> None:
        self._augment = augment
        self._fill = fill
        self._seed = seed

    def __call__(self, samples: Sequence[KeyedImage]) -> LabelledImage:
        keys, labelled = zip(*samples, strict=True)
        images, labels = (torch.stack(of) for of in zip(*labelled, strict=True))
        epochs, ids, _ = map(torch.tensor, zip(*keys, strict=True))
        moves = self._augment.moves(self._seed, epochs, ids, images.shape[1], images.shape[2])
        padded = self._augment.padded(images, self._fill)
        return LabelledImage(self._augment.gather(padded, torch.arange(len(ids)), moves, self._fill), labels)


@final
class ResidentLoader:
    """The whole set as one uint8 tensor on the device. A training batch costs one gather there; no worker, no
    copy from the host. On a GPU the next batch is made on its own stream while this one is trained on.

    The training set is stored padded, (H + 2 * crop) * (W + 2 * crop) * C bytes an image.
    """

    def __init__(
        self, train: Split, valid: Split, augment: Augment, normalise: Normalise, fill: Tensor, seed: int
    ) -> None:
        """fill: uint8 (C,), on the training device, the colour in which augmentation pads and paints."""
        self._augment = augment
        self._normalise = normalise
        self._fill = fill
        self._seed = seed
        self._split = train
        self._train_labels = train.labels.to(fill.device)
        self._valid = _padded(valid, Augment(), fill)
        self._valid_labels = valid.labels.to(fill.device)

    @cached_property
    def _train(self) -> Tensor:
        """uint8 (n, H + 2 * crop, W + 2 * crop, C). Read when batches are first asked for: an evaluation asks
        for none."""
        return _padded(self._split, self._augment, self._fill)

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Labelled]:
        """The sampler's micro-batches, augmented. Raises UserError where a picture can't be read."""
        return on_device(self._augmented(self._train, sampler, steps), self._fill.device)

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Labelled]:
        """Runs of consecutive validation samples, as they are."""
        places = [slice(chunk.start, chunk.stop) for chunk in chunks]
        batches = ((self._normalise(self._valid[place]), self._valid_labels[place]) for place in places)
        return on_device(batches, self._fill.device)

    def _augmented(self, train: Tensor, sampler: Sampler, steps: range) -> Iterator[Labelled]:
        samples = sampler.samples(steps, self._fill.device)
        at_once = max(1, _DRAWN_AT_ONCE // max(sampler.micro_sizes))
        while batches := list(islice(samples, at_once)):
            for (ids, _), moves in zip(batches, self._moves(batches), strict=True):
                images = self._augment.gather(train, ids, moves, self._fill)
                yield self._normalise(images), self._train_labels[ids]

    def _moves(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Moves]:
        """For each of some batches of (ids, epochs)."""
        height, width, _ = self._split.shape
        ids, epochs = (torch.cat(of) for of in zip(*batches, strict=True))
        moves = self._augment.moves(self._seed, epochs, ids, height, width)
        parts = (move.split([len(ids) for ids, _ in batches]) for move in moves)
        return map(Moves._make, zip(*parts, strict=True))

    @property
    def loading(self) -> Loading:
        return Loading(resident=True)

    def describe(self) -> str:
        """How the data is loaded, in words."""
        size = math.prod(padded_shape(self._split, self._augment)) + self._valid.numel()
        return f"resident on {self._fill.device} ({size / 2**20:.0f} MiB)"


def in_memory(split: Split) -> ArraySplit:
    """A split whose pictures have been read, once."""
    if isinstance(split, ArraySplit):
        return split
    fill = torch.zeros(split.shape[2], dtype=torch.uint8)
    return ArraySplit(_padded(split, Augment(), fill), split.labels)


def padded_shape(split: Split, augment: Augment) -> tuple[int, int, int, int]:
    """Of a whole split as `Augment.padded` makes it."""
    height, width, channels = split.shape
    return len(split), height + 2 * augment.crop, width + 2 * augment.crop, channels


def _padded(split: Split, augment: Augment, fill: Tensor) -> Tensor:
    """All of a split as `Augment.padded` makes it, on the fill's device."""
    whole = torch.empty(padded_shape(split, augment), dtype=torch.uint8, device=fill.device)
    block = max(1, _BLOCK // math.prod(split.shape))
    for ids, place in zip(torch.arange(len(split)).split(block), whole.split(block), strict=True):
        place.copy_(augment.padded(split.images(ids).to(fill.device), fill))
    return whole
