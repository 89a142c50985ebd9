"""Where pictures with boxes come from: what a format has to offer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ddptrain.api.order import EpochOrder, Shuffled
from ddptrain.data.detection.run_lengths import PackedMasks
from ddptrain.data.pictures import as_png
from ddptrain.data.stream.samples import StreamSamples


@dataclass(frozen=True, slots=True)
class Objects:
    """What is on one picture.

    boxes: float32 (k, 4), x1, y1, x2, y2 in pixels of the picture as it is seen (turned by its EXIF tag),
    within it. labels: int64 (k,), indices into the classes. crowd: bool (k,), COCO's ``iscrowd``: a region of
    many, left out of training and neither right nor wrong in evaluation. masks: k of them, of the picture's
    size, as `ddptrain.data.detection.run_lengths` has them; None where the set has none.
    """

    boxes: Tensor
    labels: Tensor
    crowd: Tensor
    masks: Sequence[bytes] | None = None

    def __len__(self) -> int:
        return len(self.labels)


@final
class PackedObjects(Sequence[Objects]):
    """The objects of all pictures in a few tensors: a tensor each would cost a loader's workers a file
    descriptor each.

    starts: int64 (pictures + 1,), where each picture's begin, and where the last one's end.
    """

    def __init__(self, starts: Tensor, packed: Objects) -> None:
        self._starts = starts
        self._packed = packed

    @classmethod
    def of(cls, pictures: Sequence[Objects]) -> "PackedObjects":
        """The same objects, packed."""
        starts = torch.tensor([0, *accumulate(map(len, pictures))])
        boxes, labels, crowd = (
            torch.cat([getattr(on_it, name) for on_it in pictures]) for name in ("boxes", "labels", "crowd")
        )
        masks = [on_it.masks for on_it in pictures if on_it.masks is not None]
        packed = PackedMasks.of(chain(*masks)) if len(masks) == len(pictures) else None
        return cls(starts, Objects(boxes, labels, crowd, packed))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, i: int) -> Objects:  # type: ignore[override]
        i = range(len(self))[i]
        part, packed = slice(*self._starts[i : i + 2].tolist()), self._packed
        masks = None if packed.masks is None else packed.masks[part]
        return Objects(packed.boxes[part], packed.labels[part], packed.crowd[part], masks)


class Scenes(ABC):
    """Pictures with boxes: the training or the validation part of a set.

    names: one for each picture, its path below the set's folder, say. sizes: int64 (n, 2), height and width
    in pixels. objects: one for each picture.
    """

    names: Sequence[str]
    sizes: Tensor
    objects: Sequence[Objects]
    stream: StreamSamples | None = None
    """What the pictures are streamed from, where they are."""

    @abstractmethod
    def image(self, i: int) -> Tensor:
        """uint8 (3, H, W): the i-th picture.

        Raises UserError naming the file where it can't be read.
        """

    def encoded(self, i: int) -> bytes:
        """The i-th as a picture's file: a PNG, unless it lies in a file already."""
        return as_png(self.image(i))

    def fingerprint(self, i: int) -> bytes:
        """What tells the i-th picture from others beside its size and boxes, without decoding it."""
        return self.names[i].encode(errors="surrogateescape")

    def __len__(self) -> int:
        return len(self.objects)


@final
class ArrayScenes(Scenes):
    """Pictures in memory: uint8 (n, 3, H, W)."""

    def __init__(self, images: Tensor, objects: Sequence[Objects], names: Sequence[str]) -> None:
        self._images = images
        self.objects = PackedObjects.of(objects)
        self.names = names
        self.sizes = torch.tensor(images.shape[2:]).expand(len(images), 2)

    def image(self, i: int) -> Tensor:
        return self._images[i]


@dataclass(frozen=True, slots=True)
class DetectionSet:
    """An opened set: its two parts and its classes."""

    train: Scenes
    valid: Scenes
    classes: Sequence[str]
    skipped: Sequence[str] = field(default=())
    """What ``on_error=skip`` left out: one line each, as an error would have said it."""
    epoch_order: EpochOrder = Shuffled()  # has no state
    """`Data.epoch_order`."""
    identity: str = ""
    """A hash of the samples and their order, where it is known without reading all of them."""

    @property
    def has_masks(self) -> bool:
        """Whether every object has one."""
        return all(part.objects[0].masks is not None for part in (self.train, self.valid))


class DetectionSource(ABC):
    """One format or set of pictures with boxes."""

    name: str

    def fetch(self, root: Path) -> None:
        """Bring what is missing to ``root``. Runs in one process a node, before any of them opens the set.

        Raises UserError that says which file to put where.
        """
        return  # most sets lie where they are said to

    def adopt_classes(self, classes: Sequence[str]) -> None:  # noqa: B027 # most sets name theirs
        """Called before `open` where a model of these classes is evaluated: a set that does not say which
        classes it has takes them."""

    def forgiving(self) -> "DetectionSource":
        """The same set, opened without what is wrong in it (``on_error=skip``)."""
        return self

    @abstractmethod
    def open(self, root: Path) -> DetectionSet:
        """The set, checked; the same on every rank. ``root``: the folder of sets without a path of their own.

        Raises UserError that lists every problem found: file, line or id, value, rule.
        """
