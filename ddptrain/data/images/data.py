"""Labelled images for training, from any `ImageSource`, by either loading path."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from ddptrain.api.blocks import Blocks
from ddptrain.api.order import EpochOrder, Weighted
from ddptrain.api.recipe import Data, Loading
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.images.augment import Augment, Normalise
from ddptrain.data.images.loaders import (
    AugmentedBatch,
    Labelled,
    ResidentLoader,
    in_memory,
    keyed,
    padded_shape,
)
from ddptrain.data.images.source import ImageSet, ImageSource, LabelledImage, Split
from ddptrain.data.images.transforms import ImageTransform, MixTransform, Transforms
from ddptrain.data.left_out import OnError, check_skip, in_words, opened_set
from ddptrain.data.pictures import fitted
from ddptrain.data.pipeline import Pipeline, Samples
from ddptrain.data.stream.samples import StreamSamples
from ddptrain.data.stream.write import PartToWrite, Writer
from ddptrain.data.workers import check_workers, worker_count
from ddptrain.distributed.comm import once_a_node
from ddptrain.errors import UserError
from ddptrain.text import first_few

log = logging.getLogger("ddptrain")

if TYPE_CHECKING:
    from ddptrain.data.pictures import Named

_RESIDENT_ON_CPU = 2 * 2**30  # Bytes up to which ``resident=auto`` keeps a set in a CPU rank's memory
_RESIDENT_SHARE_OF_GPU = 0.25


class _Known(NamedTuple):
    """What a trained model's `metadata` tells, too."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    resize: int | None
    multi_label: bool
    normalise: Normalise


class _Prepared(NamedTuple):
    """train: the training samples, as they are augmented one by one or as batches."""

    opened: ImageSet
    train: Samples
    batches: Pipeline | ResidentLoader
    identity: str


@final
class ImageData(Data):
    """Batches of (float32 (n, C, H, W), int64 (n,)); soft targets, float32 (n, classes), for the second where
    training samples are mixed.

    augment: how training images are varied: `Augment` on the device, for resident sets; `Transforms`, or a
    module of one's own, on the CPU. root: folder where the set lies or goes. workers: loader
    processes of a rank, ``auto`` by the cores at hand. resident: keep the uint8 set on the device, or, where
    the CPU varies the images, in its memory; ``auto`` if it is small enough. Both ways give the same pixels.
    channels_last: memory format of the batches. balance: how far classes of few training images are made up
    for, in [0, 1]: 0, each image is seen once an epoch; 1, each class is seen equally often; between, in
    proportion to its number of images to the power of ``1 - balance``. on_error: of files that can't be read,
    "stop" ends the run at the first; "skip" reads all before the training and leaves those out.
    """

    def __init__(
        self,
        source: ImageSource,
        augment: Augment | Transforms | nn.Module,
        root: str = "data",
        workers: int | Literal["auto"] = "auto",
        resident: bool | Literal["auto"] = "auto",
        channels_last: bool = True,
        balance: float = 0.0,
        on_error: OnError = "stop",
    ) -> None:
        check_workers(workers)
        if not 0 <= balance <= 1:
            raise UserError(f"data.balance={balance}: must be from 0 (off) to 1.")
        check_skip(on_error, source.no_skip)
        self._source = source
        self._augment = Transforms({"augment": augment}) if isinstance(augment, nn.Module) else augment
        if source.packed and isinstance(augment, Transforms) and augment.resized_crop is not None:
            raise UserError(
                "data.source.cache: holds pictures that are cut and scaled already, and"
                " data.augment.resized_crop needs them at full resolution. Set one of the two to null."
            )
        self._root = Path(root)
        self._workers = workers
        self._resident = resident
        self._channels_last = channels_last
        self._balance = balance
        self._on_error = on_error
        self._models_normal: Mapping[str, Any] = {}
        """A trained model's mean and deviation, in place of the set's own."""
        self._known: _Known | None = None
        self._prepared: _Prepared | None = None

    def adopt_metadata(self, metadata: Mapping[str, Any]) -> None:
        self._source.bring_to(_shape_of(metadata), metadata.get("resize"))
        self._models_normal = {name: metadata[name] for name in ("mean", "std")}

    def normalise_as(self, mean: Sequence[float], std: Sequence[float]) -> bool:
        self._models_normal = {"mean": list(mean), "std": list(std)}
        return True

    def prepare(self, world: World, seed: int) -> None:
        once_a_node(world, lambda: self._source.fetch(self._root))
        workers = worker_count(self._workers, world)
        opened = opened_set(self._source, self._root, self._on_error, world, workers)
        if self._models_normal:
            opened = opened.normalised_as(**self._models_normal)
        # before a picture is read: a dataset of one's own may keep what it has read
        identity = opened.identity
        if not identity:
            identity = opened.digest() if self._source.each_rank else once_a_node(world, opened.digest)
        classes, counts = tuple(opened.classes), opened.train.class_counts(len(opened.classes))
        unseen = (counts == 0).nonzero().flatten().tolist()
        if unseen:
            shown = first_few([repr(classes[i]) for i in unseen], 5)
            log.warning("note       data: no training sample has the class %s", shown)
        normalise = self._normaliser(opened.mean, opened.std, world.device)
        several = opened.train.labels.ndim == 2
        self._known = _Known(classes, opened.train.shape, opened.resize, several, normalise)
        fill = normalise.mean.round().to(torch.uint8)
        augment = self._augment
        if isinstance(augment, Augment):
            train, valid = opened.train, opened.valid
            samples = Samples(train, keyed, AugmentedBatch(augment, fill.cpu(), seed), stream=train.stream)
        else:
            train, valid = self._stored(opened, augment, world)
            samples = _one_by_one(train, augment, len(classes), seed, opened.train.stream)
        batches: Pipeline | ResidentLoader
        if isinstance(augment, Augment) and self._is_resident(opened, augment, world):
            batches = ResidentLoader(train, valid, augment, normalise, fill, seed)
        else:
            as_it_is = Samples(valid, stream=valid.stream)
            batches = Pipeline(samples, as_it_is, workers, world.device, self._on_device)
        self._prepared = _Prepared(opened, samples, batches, identity)

    def _stored(self, opened: ImageSet, transforms: Transforms, world: World) -> tuple[Split, Split]:
        """Both parts, in memory where they are to be."""
        train, valid = opened.train, opened.valid
        larger = transforms.resized_crop is not None and train.full_size
        if larger and self._resident is True:
            raise UserError(
                "data.resident=true: keeps pictures that are cut and scaled already, and"
                " data.augment.resized_crop needs them at full resolution. Set data.resident=false."
            )
        resident = not larger and self._is_resident(opened, None, world)
        return (in_memory(train), in_memory(valid)) if resident else (train, valid)

    @property
    def _ready(self) -> _Prepared:
        assert self._prepared is not None, "prepare comes first"
        return self._prepared

    @property
    def _facts(self) -> _Known:
        assert self._known is not None, "prepare or load_metadata comes first"
        return self._known

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names, into which a label is an index. Known, as all below, after `prepare` or
        `load_metadata`."""
        return self._facts.classes

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels)"""
        return self._facts.shape

    @property
    def resize(self) -> int | None:
        """`ImageSet.resize`."""
        return self._facts.resize

    @property
    def multi_label(self) -> bool:
        """Whether an image has any number of classes: labels are then float32 (n, classes), 0 or 1."""
        return self._facts.multi_label

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.classes

    @property
    def recalled(self) -> bool:
        """Whether only a checkpoint's `metadata` is known of the set."""
        return self._prepared is None

    @property
    def all_labels(self) -> tuple[Tensor, Tensor]:
        """Of training and of validation, as `Split.labels`. Needs the prepared set."""
        opened = self._ready.opened
        return opened.train.labels, opened.valid.labels

    @property
    def class_counts(self) -> Tensor:
        """int64 (classes,): training images of each class; of several labels an image, those that have it.
        Needs the prepared set."""
        return self._ready.opened.train.class_counts(len(self.classes))

    @property
    def epoch_order(self) -> EpochOrder:
        opened = self._ready.opened
        if not self._balance:
            return opened.epoch_order
        labels = opened.train.labels
        if labels.ndim == 2:
            raise UserError("data.balance: is for images of one class each. Set data.balance=0.")
        if isinstance(opened.epoch_order, Blocks):
            raise UserError(
                "data.balance: draws from the whole set at once, and this one is read a few blocks at a time."
                " Set data.balance=0, or weigh the classes in the loss: task.class_weights."
            )
        return Weighted(self.class_counts.double().pow(-self._balance)[labels])

    @property
    def identity(self) -> str:
        return self._ready.identity

    @property
    def loading(self) -> Loading:
        return replace(self._ready.batches.loading, left_out=len(self._ready.opened.skipped))

    def metadata(self) -> Mapping[str, Any]:
        opened = self._ready.opened
        mean, std = ([float(value) for value in of] for of in (opened.mean, opened.std))
        known = {"classes": list(self.classes), "shape": list(self.shape), "mean": mean, "std": std}
        further = {"resize": self.resize, "multi_label": self.multi_label}
        return {**known, **{name: value for name, value in further.items() if value}}

    def preparation(self) -> Mapping[str, Any]:
        """How a program makes the model's input of a picture file (docs/finetuning.md), as JSON has it.

        mean, std: in 0..255, of the channels.
        """
        height, width, channels = self.shape
        normalise = self._facts.normalise
        middle = {"rule": "middle", "draft": max(height, width)}
        return {
            "classes": list(self.classes),
            "mode": "RGB" if channels == 3 else "L",
            "size": [height, width],
            "resize": middle if self.resize is None else {"rule": "short side", "pixels": self.resize},
            "mean": normalise.mean.tolist(),
            "std": normalise.std.tolist(),
        }

    def load_metadata(self, metadata: Mapping[str, Any], world: World) -> None:
        shape, resize = _shape_of(metadata), metadata.get("resize")
        self._source.bring_to(shape, resize)
        normalise = self._normaliser(metadata["mean"], metadata["std"], world.device)
        several = metadata.get("multi_label", False)
        self._known = _Known(tuple(metadata["classes"]), shape, resize, several, normalise)

    def normalised(self, pictures: Tensor) -> Tensor:
        """uint8 (n, H, W, C), of any pictures -> float32 (n, C, H, W) on the device, as in batches."""
        normalise = self._facts.normalise
        return normalise(pictures.to(normalise.mean.device))

    def _on_device(self, batch: LabelledImage) -> Labelled:
        return self._facts.normalise(batch.image), batch.label

    def preprocess(self, sample: "Named") -> Tensor:
        """A picture, by its file's path or as a PIL image -> float32 (1, C, H, W) on the device, as in
        evaluation. (A large JPEG is read from its path at a fraction of its size, as `fitted` does it, so its
        pixels are not quite those of the whole image.)

        Raises UserError for a file that can't be read.
        """
        return self.normalised(fitted(sample, self.shape, self.resize)[None])

    def examples(self, count: int) -> Tensor | None:
        """The first training samples as they are, for models whose first weights follow from them: normalised
        float32 (n, C, H, W) on the device. None where the set was only recalled."""
        if self.recalled:
            return None
        train = self._ready.opened.train
        return self.normalised(train.images(torch.arange(min(count, len(train)))))

    @property
    def train_size(self) -> int:
        return len(self._ready.opened.train)

    def write(
        self, folder: Path, layout: Literal["stream"] = "stream", block_mb: float = 32.0
    ) -> Iterator[str]:
        """As blocks that ``data=stream`` reads from a bucket, a web server or a folder (and litdata, too).

        block_mb: about so many 10^6 bytes a block.
        """
        if self._source.packed:
            raise UserError("data.source.cache: holds pictures that are cut already; write without it: null.")
        self._source.fetch(self._root)
        world = World()
        workers = worker_count(self._workers, world)
        opened = opened_set(self._source, self._root, self._on_error, world, workers)
        about = {
            "classes": list(opened.classes), "channels": opened.train.shape[2],
            "mean": [float(value) for value in opened.mean], "std": [float(value) for value in opened.std],
        }  # fmt: skip
        label = "int" if opened.train.labels.ndim == 1 else "bytes"
        writer = Writer(folder, "classes", {"image": "bytes", "label": label}, about, block_mb)
        parts = [("train", opened.train), ("valid", opened.valid)]
        yield from writer.write([_to_write(name, split) for name, split in parts])

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Labelled]:
        return self._ready.batches.train_batches(sampler, steps)

    @property
    def valid_size(self) -> int:
        return len(self._ready.opened.valid)

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Labelled]:
        return self._ready.batches.valid_batches(chunks)

    def preview(self) -> Tensor:
        """The first 64 training samples as epoch 0 shows them."""
        batch: LabelledImage = self._ready.train.first(64, epoch=0)
        return batch.image.permute(0, 3, 1, 2).expand(-1, 3, -1, -1)

    def describe(self) -> str:
        opened, _, batches, _ = self._ready
        height, width, channels = self.shape
        held_out = " (every tenth, held out)" if opened.held_out else ""
        return (
            f"{self._source.name}: {self.train_size:,} train, {self.valid_size:,} valid{held_out},"
            f" {len(self.classes)} classes, {height}x{width}x{channels}, {batches.describe()}"
            f"{in_words(opened.skipped)}"
        )

    def _normaliser(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> Normalise:
        middle, spread = (torch.tensor(list(of)).to(device) for of in (mean, std))
        return Normalise(middle, spread, self._channels_last)

    def _is_resident(self, opened: ImageSet, on_device: Augment | None, world: World) -> bool:
        """Whether the set is kept in memory; by itself if it is small enough for the device, padded for its
        augmentation there, or for the host."""
        if self._resident != "auto":
            return self._resident
        parts = (opened.train, on_device or Augment()), (opened.valid, Augment())
        size = sum(math.prod(padded_shape(part, augment)) for part, augment in parts)
        if world.device.type == "cuda" and on_device is not None:
            total = torch.cuda.get_device_properties(world.device).total_memory
            return size * world.sharers <= _RESIDENT_SHARE_OF_GPU * total
        return size <= _RESIDENT_ON_CPU


def _one_by_one(
    train: Split, transforms: Transforms, classes: int, seed: int, stream: StreamSamples | None
) -> Samples:
    """Training samples that are varied, and mixed, one at a time. stream: of the set, also where it has been
    read into memory."""
    varied = Samples(train, ImageTransform(transforms), seed=seed, stream=train.stream)
    if transforms.mix is None:
        return varied
    height, width, _ = train.shape
    mixing = MixTransform(transforms.mix, seed, (height, width), train.labels, classes, stream)
    return Samples(varied, mixing, seed=seed, stream=train.stream)


def _shape_of(metadata: Mapping[str, Any]) -> tuple[int, int, int]:
    height, width, channels = metadata["shape"]
    return height, width, channels


def _to_write(name: str, split: Split) -> PartToWrite:
    def sample(i: int) -> list[bytes]:
        return [split.encoded(i), split.labels[i].numpy().tobytes()]

    fingerprints = split.fingerprints(range(len(split)))
    return PartToWrite(name, len(split), sample, lambda order: {"labels": split.labels[order]}, fingerprints)
