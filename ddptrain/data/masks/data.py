"""Pictures with a mask each, the class of every pixel, for training and evaluation."""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from ddptrain.api.order import EpochOrder, Shuffled
from ddptrain.api.recipe import Data, Loading
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.agreement import check_renamed, note_checkpoints_own
from ddptrain.data.identity import of_file
from ddptrain.data.images.augment import Normalise
from ddptrain.data.images.folder import IMAGENET_MEAN, IMAGENET_STD
from ddptrain.data.left_out import OnError, check_skip, in_words, skippable
from ddptrain.data.masks.files import (
    Pair,
    Window,
    blended,
    class_names,
    find_pairs,
    listed_names,
    mask_in_square,
    picture_in_square,
    read_pair,
    readable_pairs,
    scaled,
)
from ddptrain.data.pictures import decoded
from ddptrain.data.pipeline import Pipeline, Samples
from ddptrain.data.stream.masks import StreamMasks, StreamPairs, write_masks
from ddptrain.data.stream.samples import StreamSamples
from ddptrain.data.workers import AS_IT_IS, Key, check_workers, worker_count
from ddptrain.distributed.comm import on_all_ranks, once_a_node
from ddptrain.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

    from ddptrain.data.pictures import Named

Masked = tuple[Tensor, Tensor]
"""float32 (n, 3, size, size) pictures and int64 (n, size, size) classes, 255 for what does not count."""

FILL = tuple(round(level) for level in IMAGENET_MEAN)
_LEAST, _MOST = 32, 4096
_SHOWN = 16


@final
class DecodedPairs:
    """Pictures and masks as Pillow has them: the source of `ddptrain.data.pipeline`."""

    def __init__(self, pairs: Sequence[Pair], classes: int) -> None:
        self._pairs = pairs
        self._classes = classes

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> "tuple[Image.Image, Image.Image]":
        pairs = self._pairs
        if isinstance(pairs, StreamPairs):
            return pairs.decoded(index, self._classes)
        with skippable():
            return read_pair(pairs[index], self._classes)


@final
@dataclass(frozen=True, slots=True)
class MaskTransform:
    """Into a square: uint8 (size, size, 3) pixels and uint8 (size, size) classes.

    scale: least and most length of a training picture's longer side, in shares of ``size``. horizontal_flip:
    share of the training samples that are mirrored.
    """

    size: int
    scale: tuple[float, float]
    horizontal_flip: float

    def __call__(self, source: DecodedPairs, key: Key) -> tuple[Tensor, Tensor]:
        picture, mask = source[key.sample]
        training = key.epoch != AS_IT_IS
        if training:
            window = self._window(picture.height, picture.width)
        else:
            window = scaled(picture.height, picture.width, self.size)
        pixels = picture_in_square(picture, window, self.size, FILL)
        classes = mask_in_square(mask, window, self.size)
        if training and random.random() < self.horizontal_flip:
            return pixels.flip(1), classes.flip(1)
        return pixels, classes

    def _window(self, height: int, width: int) -> Window:
        """Of torchvision's references: a random scale, then a random place in what is larger than the
        square."""
        window = scaled(height, width, round(self.size * random.uniform(*self.scale)))
        top = random.randint(0, max(window.height - self.size, 0))
        left = random.randint(0, max(window.width - self.size, 0))
        return window._replace(top=top, left=left)


class _MaskSet(NamedTuple):
    """pairs: of training and of validation; streams: what they are streamed by. identity: of a streamed set.
    skipped: a line for each pair that is left out."""

    pairs: tuple[Sequence[Pair], Sequence[Pair]]
    classes: tuple[str, ...]
    streams: tuple[StreamSamples | None, StreamSamples | None] = (None, None)
    identity: str = ""
    skipped: Sequence[str] = ()


class _Prepared(NamedTuple):
    opened: _MaskSet
    pipeline: Pipeline


@final
class MaskData(Data):
    """Batches of `Masked`, of ``root/train/images/*`` and ``root/train/masks/*.png``, and the same under
    ``root/val`` (or valid, validation, test); without that, or with just ``root/images`` and ``root/masks``,
    every tenth picture is held out.

    A mask has its picture's name and size, is a grey or palette PNG of 8 bits, and holds the class of each
    pixel; 255 does not count. Once prepared: classes, their names, into which a pixel's value is an index.

    source: pictures and masks that are streamed, in place of those under ``root``.
    size: side in pixels of the squares that pictures are brought into. classes: names, or how many there
    are; None to read the names from ``root/classes.txt``, one a line. scale: a training picture's longer side
    becomes ``size`` times a share drawn from this range; of what is larger than the square a random window is
    taken. In evaluation the share is 1. horizontal_flip: share of training samples that are mirrored.
    on_error: as `ddptrain.data.images.data.ImageData` has it, of pictures and masks.
    """

    def __init__(
        self,
        root: str = "data",
        size: int = 480,
        classes: list[str] | int | None = None,
        scale: tuple[float, float] = (0.5, 2.0),
        horizontal_flip: float = 0.5,
        workers: int | Literal["auto"] = "auto",
        channels_last: bool = True,
        source: StreamMasks | None = None,
        on_error: OnError = "stop",
    ) -> None:
        check_workers(workers)
        if not _LEAST <= size <= _MOST:
            raise UserError(f"data.size={size}: must be {_LEAST} to {_MOST} pixels.")
        least, most = scale
        if not 0.1 <= least <= most <= 10:
            raise UserError(f"data.scale=[{least},{most}]: must be a least and a most share, 0.1 to 10.")
        if not 0 <= horizontal_flip <= 1:
            raise UserError(f"data.horizontal_flip={horizontal_flip}: must be from 0 (off) to 1 (always).")
        self._root = Path(root)
        self.size = size
        self._configured_classes = classes
        self._scale = (least, most)
        self._horizontal_flip = horizontal_flip
        self._configured_workers = workers
        self._channels_last = channels_last
        self._source = source
        self._on_error = on_error
        check_skip(on_error, "" if source is None else source.no_skip)
        self.classes: tuple[str, ...] = ()
        """None before the set is prepared, or recalled from a checkpoint."""
        self._normalise = _normaliser(torch.device("cpu"), channels_last)
        self._prepared: _Prepared | None = None

    def adopt_metadata(self, metadata: Mapping[str, Any]) -> None:
        if self.size != metadata["size"]:
            note_checkpoints_own("data.size", self.size, metadata["size"])
        self.size = int(metadata["size"])

    def prepare(self, world: World, seed: int) -> None:
        if self._source is not None:
            once_a_node(world, self._source.fetch)
        workers = worker_count(self._configured_workers, world)
        opened = self._opened(world, workers)
        transform = MaskTransform(self.size, self._scale, self._horizontal_flip)
        train, valid = (
            Samples(DecodedPairs(pairs, len(opened.classes)), transform, seed=drawn_by, stream=stream)
            for pairs, stream, drawn_by in zip(opened.pairs, opened.streams, (seed, None), strict=True)
        )
        self.classes = opened.classes
        self._normalise = _normaliser(world.device, self._channels_last)
        pipeline = Pipeline(train, valid, workers, world.device, self._on_device)
        self._prepared = _Prepared(opened, pipeline)

    @property
    def _ready(self) -> _Prepared:
        assert self._prepared is not None, "prepare comes first"
        return self._prepared

    def _opened(self, world: World, workers: int) -> _MaskSet:
        configured = self._configured_classes
        if self._source is not None:
            streamed = self._source.open()
            if isinstance(configured, list):
                check_renamed(configured, streamed.classes, "data.classes")
            classes = class_names(streamed.classes if configured is None else configured, self._root)
            parts, streams = (streamed.train, streamed.valid), (streamed.train.stream, streamed.valid.stream)
            return _MaskSet(parts, classes, streams, streamed.identity)
        pairs, classes = on_all_ranks(world, self._in_files)  # a node may have a bad copy
        if self._on_error == "skip":
            kept, skipped = readable_pairs(pairs, len(classes), world, workers)
            return _MaskSet(kept, classes, skipped=skipped)
        return _MaskSet(pairs, classes)

    def _in_files(self) -> tuple[tuple[list[Pair], list[Pair]], tuple[str, ...]]:
        pairs, configured = find_pairs(self._root), self._configured_classes
        classes = class_names(configured, self._root)
        if isinstance(configured, list):
            check_renamed(classes, listed_names(self._root), "data.classes")
        return pairs, classes

    def write(
        self, folder: Path, layout: Literal["stream"] = "stream", block_mb: float = 32.0
    ) -> Iterator[str]:
        """As blocks that ``data=stream_masks`` reads. block_mb: about so many 10^6 bytes a block."""
        if self._source is not None:
            self._source.fetch()
        world = World()
        opened = self._opened(world, worker_count(self._configured_workers, world))
        yield from write_masks(opened.pairs, opened.classes, folder, block_mb)

    @property
    def outputs(self) -> Sequence[str]:
        return self.classes

    @cached_property
    def identity(self) -> str:
        sha256 = hashlib.sha256(repr((self.size, self.classes)).encode())
        opened = self._ready.opened
        if self._source is not None:
            return hashlib.sha256(sha256.digest() + opened.identity.encode()).hexdigest()
        for pairs in opened.pairs:
            for file in (file for pair in pairs for file in pair):
                assert isinstance(file, Path)
                sha256.update(of_file(str(file), str(file.relative_to(self._root)), len(pairs)))
        return sha256.hexdigest()

    @property
    def epoch_order(self) -> EpochOrder:
        stream = self._ready.opened.streams[0]
        return Shuffled() if stream is None else stream.blocks

    @property
    def loading(self) -> Loading:
        opened, pipeline = self._ready
        return replace(pipeline.loading, left_out=len(opened.skipped))

    def metadata(self) -> Mapping[str, Any]:
        return {"classes": list(self.classes), "size": self.size}

    def load_metadata(self, metadata: Mapping[str, Any], world: World) -> None:
        self.classes = tuple(metadata["classes"])
        self.adopt_metadata(metadata)
        self._normalise = _normaliser(world.device, self._channels_last)

    def preparation(self) -> Mapping[str, Any]:
        """How a program makes the model's input of a picture file (docs/segmentation.md), as JSON has it."""
        return {
            "classes": list(self.classes),
            "mode": "RGB",
            "size": [self.size, self.size],
            "resize": {"rule": "longer side", "pixels": self.size, "corner": "top left", "fill": list(FILL)},
            "mean": list(IMAGENET_MEAN),
            "std": list(IMAGENET_STD),
        }

    def normalised(self, pictures: Tensor) -> Tensor:
        """uint8 (n, H, W, 3), of any pictures -> float32 (n, 3, H, W) on the device, as in batches."""
        return self._normalise(pictures.to(self._normalise.mean.device))

    def preprocess(self, sample: "Named") -> Tensor:
        """A picture, by its file's path or as a PIL image -> float32 (1, 3, size, size) on the device, scaled
        into the square's upper left, as in evaluation."""
        picture = decoded(sample, "RGB")
        window = scaled(picture.height, picture.width, self.size)
        return self.normalised(picture_in_square(picture, window, self.size, FILL)[None])

    @property
    def train_size(self) -> int:
        return len(self._ready.pipeline.train)

    @property
    def valid_size(self) -> int:
        return len(self._ready.pipeline.valid)

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Masked]:
        return self._ready.pipeline.train_batches(sampler, steps)

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Masked]:
        return self._ready.pipeline.valid_batches(chunks)

    def valid_samples(self, count: int) -> tuple[Tensor, Tensor]:
        """The first validation samples: uint8 (n, size, size, 3) pictures and uint8 (n, size, size) masks, on
        the CPU."""
        pictures, masks = self._ready.pipeline.valid.first(count, AS_IT_IS)
        return pictures, masks

    def preview(self) -> Tensor:
        """The first 16 training samples as epoch 0 shows them, half in their classes' colours."""
        pictures, masks = self._ready.pipeline.train.first(_SHOWN, epoch=0)
        return blended(pictures.permute(0, 3, 1, 2), masks)

    def describe(self) -> str:
        return (
            f"masks: {self.train_size:,} train, {self.valid_size:,} valid, {len(self.classes)} classes,"
            f" {self.size}x{self.size}, {self._ready.pipeline.describe()}"
            f"{in_words(self._ready.opened.skipped)}"
        )

    def _on_device(self, batch: tuple[Tensor, Tensor]) -> Masked:
        pictures, masks = batch
        return self._normalise(pictures), masks.long()


def _normaliser(device: torch.device, channels_last: bool) -> Normalise:
    mean, std = (torch.tensor(of, device=device) for of in (IMAGENET_MEAN, IMAGENET_STD))
    return Normalise(mean, std, channels_last)
