"""Where labelled images come from: what a format has to offer."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor

from ddptrain.api.order import EpochOrder, Shuffled
from ddptrain.data.agreement import note_checkpoints_own
from ddptrain.data.identity import digest, of_tensor
from ddptrain.data.pictures import Box, as_png, resized
from ddptrain.data.stream.samples import StreamSamples

log = logging.getLogger("ddptrain")


class LabelledImage(NamedTuple):
    """image: uint8 (H, W, C). label: as `Split.labels` has it; float32 (classes,) of a mixture."""

    image: Tensor
    label: Tensor


class Split(ABC):
    """Labelled uint8 images of one size: the training or the validation part of a set.

    labels: int64 (n,), or float32 (n, classes), 1 for each class that an image has. shape: (height, width,
    channels).
    """

    labels: Tensor
    shape: tuple[int, int, int]
    full_size = False
    """Whether `cropped` sees more of an image than `images` gives."""
    stream: StreamSamples | None = None
    """What the images are streamed from, where they are."""

    @abstractmethod
    def images(self, ids: Tensor) -> Tensor:
        """uint8 (k, H, W, C): the images with these indices, an int64 (k,) tensor on the CPU.

        Raises UserError naming the file where one can't be read.
        """

    def __getitem__(self, i: int) -> LabelledImage:
        """One, as `ddptrain.data.pipeline.MapStyle`."""
        return LabelledImage(self.images(torch.tensor([i]))[0], self.labels[i])

    def cropped(self, i: int, box_of: Callable[[int, int], Box]) -> Tensor:
        """uint8 (C, H, W): a rectangle of one as it is stored, before it is cut to ``shape``, scaled to that.

        box_of: the rectangle by the stored picture's height and width.
        """
        picture = self.images(torch.tensor([i]))[0].permute(2, 0, 1).contiguous()
        return resized(picture, box_of(*picture.shape[1:]), self.shape[:2])

    def encoded(self, i: int) -> bytes:
        """One as a picture's file, with the pixels that are stored: a PNG, unless it lies in a file."""
        return as_png(self.images(torch.tensor([i]))[0].permute(2, 0, 1))

    def class_counts(self, classes: int) -> Tensor:
        """int64 (classes,): the images of each class; of several labels an image, those that have it."""
        labels = self.labels
        return labels.long().sum(0) if labels.ndim == 2 else labels.bincount(minlength=classes)[:classes]

    def fingerprints(self, ids: Sequence[int]) -> Iterator[bytes]:
        """What tells each of these images from others beside its label, without decoding it."""
        return repeat(b"", len(ids))

    def __len__(self) -> int:
        return len(self.labels)


@final
class ArraySplit(Split):
    """Images in memory: uint8 (n, H, W, C)."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images = images
        self.labels = labels
        self.shape = (images.shape[1], images.shape[2], images.shape[3])

    def images(self, ids: Tensor) -> Tensor:
        return self._images[ids]

    def __getitem__(self, i: int) -> LabelledImage:
        return LabelledImage(self._images[i], self.labels[i])

    def fingerprints(self, ids: Sequence[int]) -> Iterator[bytes]:
        return (of_tensor(self._images[i]) for i in ids)


@dataclass(frozen=True, slots=True)
class ImageSet:
    """An opened set: its two parts and what is known of all of it."""

    train: Split
    valid: Split
    classes: Sequence[str]
    mean: Sequence[float]
    """Of each channel, in 0..255, for normalising."""
    std: Sequence[float]
    resize: int | None = None
    """Pixels to which the short side is scaled before the middle is cut out, in evaluation (`fit`)."""
    held_out: bool = False
    """Whether the validation part is every tenth sample of a set that has no other."""
    epoch_order: EpochOrder = Shuffled()  # has no state
    """`Data.epoch_order`."""
    identity: str = ""
    """`Data.identity`; '': it is `digest`."""
    skipped: Sequence[str] = ()
    """What ``on_error=skip`` left out, as an error would have said it."""

    def digest(self) -> str:
        """A hash of the samples of both parts and of their order."""
        facts = [repr((list(self.classes), len(self.train), len(self.valid))).encode()]
        for part in (self.train, self.valid):
            facts += [of_tensor(part.labels), *part.fingerprints(range(len(part)))]
        return digest(facts)

    def normalised_as(self, mean: Sequence[float], std: Sequence[float]) -> "ImageSet":
        """With a trained model's mean and deviation, which the log says where this set has others. Of a model
        for pictures with other channels it is the set as it is: its `metadata` differs, which is refused."""
        own = [*map(float, self.mean)], [*map(float, self.std)]
        if own == ([*mean], [*std]) or len(mean) != len(self.mean):
            return self
        both = (", ".join(f"{value:.4g}" for value in of) for of in (mean, std))
        log.info("note       data: normalised by the model's mean %s and deviation %s, not the set's", *both)
        return replace(self, mean=mean, std=std)


class ImageSource(ABC):
    """One format or set of labelled images.

    size, resize: pixels to which pictures are brought, as `ddptrain.data.images.folder.ImageFolder` has them.
    size: None where the set has one of its own.
    """

    name: str
    size: int | None = None
    resize: int | None = None
    each_rank: bool = False
    """Whether the samples are objects that each rank makes for itself, so that they may differ."""
    packed: bool = False
    """Whether only the cut and scaled pictures are kept."""
    no_skip: str = ""
    """Why ``on_error=skip`` can't be had, in words; empty where it can."""

    def bring_to(self, shape: tuple[int, int, int], resize: int | None) -> None:
        """Read pictures at the size that a trained model is used to, whatever was asked for, which the log
        says. Called before `fetch`. shape: (height, width, channels)."""
        height, width, _ = shape
        if self.size is None or height != width:
            return
        if self.size != height:
            note_checkpoints_own("data.source.size", self.size, height)
        if self.resize != resize:
            note_checkpoints_own("data.source.resize", self.resize, resize)
        self.size, self.resize = height, resize

    @abstractmethod
    def fetch(self, root: Path) -> None:
        """Bring what is missing to ``root`` and verify it. Runs in one process a node.

        Raises UserError that says which file to put where.
        """

    @abstractmethod
    def open(self, root: Path) -> ImageSet:
        """The set as it lies under ``root``; the same on every rank."""
