"""Labelled images for training, from any `ImageSource`, by either loading path."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import Tensor, nn

from ddptrain.api.blocks import Blocks
from ddptrain.api.order import EpochOrder, Weighted
from ddptrain.api.recipe import Data, Loading
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.augment import Augment, Normalise
from ddptrain.data.left_out import OnError, check_skip, in_words, opened_set
from ddptrain.data.loaders import (
    AugmentedImages,
    FileLoader,
    ImagePipeline,
    Labelled,
    ResidentLoader,
    in_memory,
)
from ddptrain.data.packed import PackedSplit
from ddptrain.data.pictures import fitted
from ddptrain.data.source import ImageSource, Split
from ddptrain.data.stream.write import PartToWrite, Writer
from ddptrain.data.transformed import OwnTransform, TransformedImages
from ddptrain.data.transforms import Transforms
from ddptrain.data.workers import asked_workers, check_workers
from ddptrain.distributed.comm import once_a_node
from ddptrain.errors import UserError
from ddptrain.text import first_few

log = logging.getLogger("ddptrain")

if TYPE_CHECKING:
    from ddptrain.data.pictures import Named

_RESIDENT_ON_CPU = 2 * 2**30  # Bytes up to which ``resident=auto`` keeps a set in a CPU rank's memory
_RESIDENT_SHARE_OF_GPU = 0.25


@final
@dataclass(eq=False)
class ImageData(Data):
    """Batches of (float32 (n, C, H, W), int64 (n,)); soft targets, float32 (n, classes), for the second where
    training samples are mixed.

    Once prepared: classes, their names, into which a label is an index; shape, (height, width, channels);
    resize, `ImageSet.resize`; multi_label, whether an image has any number of classes: labels are then
    float32 (n, classes), 0 or 1.

    augment: how training images are varied: `Augment` on the device, for resident sets; `Transforms`, or a
    module of one's own (`OwnTransform`), on the CPU. root: folder where the set lies or goes. workers: loader
    processes of a rank, ``auto`` by the cores at hand. resident: keep the uint8 set on the device, or, where
    the CPU varies the images, in its memory; ``auto`` if it is small enough. Both ways give the same pixels.
    channels_last: memory format of the batches. balance: how far classes of few training images are made up
    for, in [0, 1]: 0, each image is seen once an epoch; 1, each class is seen equally often; between, in
    proportion to its number of images to the power of ``1 - balance``. on_error: of files that can't be read,
    "stop" ends the run at the first; "skip" reads all before the training and leaves those out.
    """

    source: ImageSource
    augment: Augment | Transforms | nn.Module
    root: str = "data"
    workers: int | Literal["auto"] = "auto"
    resident: bool | Literal["auto"] = "auto"
    channels_last: bool = True
    balance: float = 0.0
    on_error: OnError = "stop"

    def __post_init__(self) -> None:
        check_workers(self.workers)
        if not 0 <= self.balance <= 1:
            raise UserError(f"data.balance={self.balance}: must be from 0 (off) to 1.")
        check_skip(self.on_error, self.source.no_skip)
        self._normalise: Normalise | None = None
        self._training: Split | None = None
        self._normal: Mapping[str, Any] = {}
        """A trained model's mean and deviation, in place of the set's own."""

    def adopt_metadata(self, metadata: Mapping[str, Any]) -> None:
        self.source.bring_to(_shape_of(metadata), metadata.get("resize"))
        self._normal = {name: metadata[name] for name in ("mean", "std")}

    def normalise_as(self, mean: Sequence[float], std: Sequence[float]) -> bool:
        self._normal = {"mean": list(mean), "std": list(std)}
        return True

    def prepare(self, world: World, seed: int) -> None:
        once_a_node(world, lambda: self.source.fetch(Path(self.root)))
        self._world = world
        workers = asked_workers(self.workers, world)
        opened = opened_set(self.source, Path(self.root), self.on_error, world, workers)
        self._set = opened.normalised_as(**self._normal) if self._normal else opened
        self._identity = opened.identity or once_a_node(world, opened.digest)
        self._training = self._set.train
        self.classes, self.shape = tuple(self._set.classes), self._set.train.shape
        self.resize, self.multi_label = self._set.resize, self._set.train.labels.ndim == 2
        unseen = (self.class_counts[: len(self.classes)] == 0).nonzero().flatten().tolist()
        if unseen:
            shown = first_few([repr(self.classes[i]) for i in unseen], 5)
            log.warning("note       data: no training sample has the class %s", shown)
        self._normalise = normalise = self._normaliser(self._set.mean, self._set.std)
        fill = normalise.mean.round().to(torch.uint8)
        augment = self.augment
        if isinstance(augment, Augment):
            pipeline = ImagePipeline(self._set.train, self._set.valid, augment, normalise, fill, seed)
            resident = self._fits(augment.crop) if self.resident == "auto" else self.resident
            self._samples: AugmentedImages | TransformedImages = AugmentedImages(self._set.train, pipeline)
            self._loader = ResidentLoader(pipeline) if resident else FileLoader(pipeline, workers)
            return
        transforms = augment if isinstance(augment, Transforms) else OwnTransform(augment)
        train, valid = self._stored(transforms)
        pipeline = ImagePipeline(train, valid, Augment(), normalise, fill, seed)
        self._samples = TransformedImages(train, transforms, len(self.classes), fill.cpu(), seed)
        self._loader = FileLoader(pipeline, workers, self._samples)

    def _stored(self, transforms: Transforms | OwnTransform) -> tuple[Split, Split]:
        """Both parts, in memory where they are to be."""
        train, valid = self._set.train, self._set.valid
        crops = transforms.resized_crop is not None
        if crops and isinstance(train, PackedSplit):
            raise UserError(
                "data.source.cache: holds pictures that are cut and scaled already, and"
                " data.augment.resized_crop needs them at full resolution. Set one of the two to null."
            )
        larger = crops and train.full_size
        if larger and self.resident is True:
            raise UserError(
                "data.resident=true: keeps pictures that are cut and scaled already, and"
                " data.augment.resized_crop needs them at full resolution. Set data.resident=false."
            )
        resident = not larger and (self._fits(0) if self.resident == "auto" else self.resident)
        return (in_memory(train), in_memory(valid)) if resident else (train, valid)

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.classes

    @property
    def recalled(self) -> bool:
        """Whether only a checkpoint's `metadata` is known of the set."""
        return self._training is None

    @property
    def all_labels(self) -> tuple[Tensor, Tensor]:
        """Of training and of validation, as `Split.labels`. Needs the prepared set."""
        return self._set.train.labels, self._set.valid.labels

    @property
    def class_counts(self) -> Tensor:
        """int64 (classes,): training images of each class; of several labels an image, those that have it.
        Needs the prepared set."""
        labels = self._set.train.labels
        return labels.long().sum(0) if labels.ndim == 2 else labels.bincount(minlength=len(self.classes))

    @property
    def epoch_order(self) -> EpochOrder:
        if not self.balance:
            return self._set.epoch_order
        labels = self._set.train.labels
        if labels.ndim == 2:
            raise UserError("data.balance: is for images of one class each. Set data.balance=0.")
        if isinstance(self._set.epoch_order, Blocks):
            raise UserError(
                "data.balance: draws from the whole set at once, and this one is read a few blocks at a time."
                " Set data.balance=0, or weigh the classes in the loss: task.class_weights."
            )
        return Weighted(self.class_counts.double().pow(-self.balance)[labels])

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def loading(self) -> Loading:
        return replace(self._loader.loading, left_out=len(self._set.skipped))

    def metadata(self) -> Mapping[str, Any]:
        mean, std = ([float(value) for value in of] for of in (self._set.mean, self._set.std))
        known = {"classes": list(self.classes), "shape": list(self.shape), "mean": mean, "std": std}
        further = {"resize": self.resize, "multi_label": self.multi_label}
        return {**known, **{name: value for name, value in further.items() if value}}

    def preparation(self) -> Mapping[str, Any]:
        """How a program makes the model's input of a picture file (docs/finetuning.md), as JSON has it.

        mean, std: in 0..255, of the channels.
        """
        height, width, channels = self.shape
        if self._normalise is None:
            self._normalise = self._normaliser_of_source()
        middle = {"rule": "middle", "draft": max(height, width)}
        return {
            "classes": list(self.classes),
            "mode": "RGB" if channels == 3 else "L",
            "size": [height, width],
            "resize": middle if self.resize is None else {"rule": "short side", "pixels": self.resize},
            "mean": self._normalise.mean.tolist(),
            "std": self._normalise.std.tolist(),
        }

    def load_metadata(self, metadata: Mapping[str, Any], world: World) -> None:
        self.classes, self.shape = tuple(metadata["classes"]), _shape_of(metadata)
        self.source.bring_to(self.shape, metadata.get("resize"))
        self.resize, self.multi_label = metadata.get("resize"), metadata.get("multi_label", False)
        self._world = world
        self._normalise = self._normaliser(metadata["mean"], metadata["std"]) if "mean" in metadata else None

    def normalised(self, pictures: Tensor) -> Tensor:
        """uint8 (n, H, W, C), of any pictures -> float32 (n, C, H, W) on the device, as in batches.

        Needs the data set only where it was recalled from a checkpoint that knows neither mean nor deviation.
        """
        if self._normalise is None:
            self._normalise = self._normaliser_of_source()
        return self._normalise(pictures.to(self._world.device))

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
        if self._training is None:
            return None
        return self.normalised(self._training.images(torch.arange(min(count, len(self._training)))))

    @property
    def train_size(self) -> int:
        return len(self._set.train)

    def write(
        self, folder: Path, layout: Literal["stream"] = "stream", block_mb: float = 32.0
    ) -> Iterator[str]:
        """As blocks that ``data=stream`` reads from a bucket, a web server or a folder (and litdata, too).

        block_mb: about so many 10^6 bytes a block.
        """
        self.source.fetch(Path(self.root))
        world = World()
        workers = asked_workers(self.workers, world)
        opened = opened_set(self.source, Path(self.root), self.on_error, world, workers)
        about = {
            "classes": list(opened.classes), "channels": opened.train.shape[2],
            "mean": [float(value) for value in opened.mean], "std": [float(value) for value in opened.std],
        }  # fmt: skip
        label = "int" if opened.train.labels.ndim == 1 else "bytes"
        writer = Writer(folder, "classes", {"image": "bytes", "label": label}, about, block_mb)
        parts = [("train", opened.train), ("valid", opened.valid)]
        yield from writer.write([_to_write(name, split) for name, split in parts])

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Labelled]:
        return self._loader.train_batches(sampler, steps)

    @property
    def valid_size(self) -> int:
        return len(self._set.valid)

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Labelled]:
        return self._loader.valid_batches(chunks)

    def preview(self) -> Tensor:
        """The first 64 training samples as epoch 0 shows them."""
        batch = self._samples.__getitems__([(0, i, 0.0) for i in range(min(64, self.train_size))])
        if isinstance(batch, UserError):
            raise batch
        return batch[0].permute(0, 3, 1, 2).expand(-1, 3, -1, -1)

    def describe(self) -> str:
        height, width, channels = self.shape
        held_out = " (every tenth, held out)" if self._set.held_out else ""
        return (
            f"{self.source.name}: {self.train_size:,} train, {self.valid_size:,} valid{held_out},"
            f" {len(self.classes)} classes, {height}x{width}x{channels}, {self._loader.describe()}"
            f"{in_words(self._set.skipped)}"
        )

    def _normaliser_of_source(self) -> Normalise:
        self.source.fetch(Path(self.root))
        opened = self.source.open(Path(self.root))
        return self._normaliser(opened.mean, opened.std)

    def _normaliser(self, mean: Sequence[float], std: Sequence[float]) -> Normalise:
        middle, spread = (torch.tensor(list(of)).to(self._world.device) for of in (mean, std))
        return Normalise(middle, spread, self.channels_last)

    def _fits(self, crop: int) -> bool:
        """Whether a set padded by ``crop`` is small enough for where it would lie."""
        height, width, channels = self.shape
        padded = self.train_size * (height + 2 * crop) * (width + 2 * crop) * channels
        size = padded + self.valid_size * height * width * channels
        if self._world.device.type == "cuda" and isinstance(self.augment, Augment):
            total = torch.cuda.get_device_properties(self._world.device).total_memory
            return size * self._world.sharers <= _RESIDENT_SHARE_OF_GPU * total
        return size <= _RESIDENT_ON_CPU


def _shape_of(metadata: Mapping[str, Any]) -> tuple[int, int, int]:
    height, width, channels = metadata["shape"]
    return height, width, channels


def _to_write(name: str, split: Split) -> PartToWrite:
    def sample(i: int) -> list[bytes]:
        return [split.encoded(i), split.labels[i].numpy().tobytes()]

    return PartToWrite(name, len(split), sample, lambda order: {"labels": split.labels[order]})
