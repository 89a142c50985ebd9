"""Pictures with boxes for training, from any `DetectionSource`."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from ddptrain.api.order import EpochOrder
from ddptrain.api.recipe import Data, Loading
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.agreement import note_checkpoints_own
from ddptrain.data.detection.augment import DetectionAugment
from ddptrain.data.detection.batch import Batch, coloured, stacked
from ddptrain.data.detection.check import write_check
from ddptrain.data.detection.letterbox import (
    COARSEST,
    GREY,
    Letterbox,
    Shape,
    canvases,
    fitted,
    in_canvas,
    letterbox,
)
from ddptrain.data.detection.samples import BoxedPictures, BoxTransform, decoded_bytes
from ddptrain.data.detection.source import DetectionSet, DetectionSource, Scenes
from ddptrain.data.detection.write import write_coco, write_yolo
from ddptrain.data.left_out import in_words, tell
from ddptrain.data.pictures import check_free
from ddptrain.data.pipeline import Pipeline, Samples
from ddptrain.data.workers import check_workers, spare_cores
from ddptrain.distributed.comm import once_a_node
from ddptrain.errors import UserError

_LARGEST_AUTO = 640
_RESIDENT = 2 * 2**30  # Bytes up to which ``resident=auto`` keeps the decoded pictures in a node's memory
_LARGEST = 4096


class _Known(NamedTuple):
    """What a trained model's `metadata` tells, too."""

    classes: tuple[str, ...]
    size: int
    masks: bool
    device: torch.device


class _Prepared(NamedTuple):
    """bytes: of the decoded pictures. seed: the run's."""

    opened: DetectionSet
    pipeline: Pipeline
    bytes: int
    seed: int


@final
class DetectionData(Data):
    """Batches of `ddptrain.data.detection.batch.Batch`.

    root: the folder of a source that downloads (VOC). size: pixels of the squares in which pictures
    are put, a multiple of 32; ``auto`` takes the median of the pictures' longer sides, 640 at most. resident:
    keep the decoded pictures in memory; ``auto`` if they are small enough. workers: loader processes of a
    rank; ``auto`` by the cores at hand, and none where the training itself needs them (on a CPU).
    rectangular: validation pictures are put in the smallest rectangle that holds all of them, those of a
    prediction each in its own, in place of squares.
    """

    def __init__(
        self,
        source: DetectionSource,
        augment: DetectionAugment,
        root: str = "data",
        size: int | Literal["auto"] = "auto",
        resident: bool | Literal["auto"] = "auto",
        workers: int | Literal["auto"] = "auto",
        channels_last: bool = True,
        rectangular: bool = False,
    ) -> None:
        check_workers(workers)
        if size != "auto" and (not COARSEST <= size <= _LARGEST or size % COARSEST):
            raise UserError(
                f"data.size={size}: must be a multiple of {COARSEST} pixels, at most {_LARGEST}, or auto."
            )
        self._source = source
        self._augment = augment
        self._root = Path(root)
        self._configured_size = size
        self._resident = resident
        self._configured_workers = workers
        self._channels_last = channels_last
        self.rectangular = rectangular
        self._known: _Known | None = None
        self._prepared: _Prepared | None = None

    def prepare(self, world: World, seed: int) -> None:
        once_a_node(world, lambda: self._source.fetch(self._root))
        opened = self._source.open(self._root)
        parts = opened.train, opened.valid
        for part, scenes in zip(("training", "validation"), parts, strict=True):
            if all(bool(on_it.crowd.all()) for on_it in scenes.objects):
                raise UserError(f"data: none of the {len(scenes):,} {part} pictures has a box on it.")
        tell(opened.skipped)
        size = self._size_for(opened)
        decoded = sum(decoded_bytes(scenes, size) for scenes in parts)
        resident = decoded * world.local_size <= _RESIDENT if self._resident == "auto" else self._resident
        spare = 0 if world.device.type == "cpu" else spare_cores(world)
        workers = spare if self._configured_workers == "auto" else self._configured_workers
        train = self._samples(opened.train, size, resident, "square", seed)
        valid = self._samples(opened.valid, size, resident, "common" if self.rectangular else "square")
        pipeline = Pipeline(train, valid, workers, world.device, self._on_device, resident)
        self._known = _Known(tuple(opened.classes), size, opened.has_masks, world.device)
        self._prepared = _Prepared(opened, pipeline, decoded, seed)

    def _size_for(self, opened: DetectionSet) -> int:
        if self._configured_size != "auto":
            return self._configured_size
        # the smallest multiple of 32 that holds the median of the longer sides
        usual = -(-int(opened.train.sizes.amax(1).median()) // COARSEST) * COARSEST
        return min(usual, _LARGEST_AUTO)

    def _samples(
        self, scenes: Scenes, size: int, resident: bool, shape: Shape, seed: int | None = None
    ) -> Samples:
        is_training = seed is not None  # masks of the others are compared at their pictures' own size
        pictures = BoxedPictures(scenes, size, resident, shape, masks=is_training)
        return Samples(pictures, BoxTransform(size, self._augment), stacked, seed, scenes.stream)

    @property
    def _ready(self) -> _Prepared:
        assert self._prepared is not None, "prepare comes first"
        return self._prepared

    @property
    def _facts(self) -> _Known:
        assert self._known is not None, "prepare or load_metadata comes first"
        return self._known

    @property
    def _own_shape(self) -> Shape:
        return "own" if self.rectangular else "square"

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names, into which a label is an index; known after `prepare` or `load_metadata`."""
        return self._facts.classes

    @property
    def size(self) -> int:
        """Pixels of the squares' sides."""
        return self._facts.size

    @property
    def masks(self) -> bool:
        """Whether the objects have masks."""
        return self._facts.masks

    @property
    def seed(self) -> int:
        """The run's."""
        return self._ready.seed

    @property
    def outputs(self) -> Sequence[str]:
        return self.classes

    @property
    def valid(self) -> Scenes:
        """The validation part: what is truly on its pictures."""
        return self._ready.opened.valid

    @property
    def train_size(self) -> int:
        return len(self._ready.opened.train)

    @property
    def valid_size(self) -> int:
        return len(self._ready.opened.valid)

    @property
    def epoch_order(self) -> EpochOrder:
        return self._ready.opened.epoch_order

    @property
    def loading(self) -> Loading:
        return replace(self._ready.pipeline.loading, left_out=len(self._ready.opened.skipped))

    def metadata(self) -> Mapping[str, Any]:
        known = {"classes": list(self.classes), "size": self.size}
        return {**known, "masks": True} if self.masks else known

    def preparation(self) -> Mapping[str, Any]:
        """How a program makes a model's input of a picture file, and reads its boxes (docs/detection.md), as
        JSON has it.

        resize: the longer side becomes ``size``, the rest of the square is ``fill`` on both sides alike, in
        0..255. mean, std: in 0..255, of the channels.
        """
        return {
            "classes": list(self.classes),
            "mode": "RGB",
            "size": [self.size, self.size],
            "resize": {"rule": "longer side", "fill": GREY},
            "mean": [0.0] * 3,
            "std": [255.0] * 3,
            "boxes": "x1, y1, x2, y2 in pixels of the square",
        }

    def adopt_metadata(self, metadata: Mapping[str, Any]) -> None:
        if self._configured_size not in ("auto", metadata["size"]):
            note_checkpoints_own("data.size", self._configured_size, metadata["size"])
        self._configured_size = int(metadata["size"])
        self._source.adopt_classes(metadata["classes"])

    def load_metadata(self, metadata: Mapping[str, Any], world: World) -> None:
        self.adopt_metadata(metadata)
        classes, size = tuple(metadata["classes"]), int(metadata["size"])
        self._known = _Known(classes, size, metadata.get("masks", False), world.device)

    def write(
        self,
        folder: Path,
        layout: Literal["yolo", "coco", "stream", "check"] = "yolo",
        block_mb: float = 32.0,
    ) -> Iterator[str]:
        """As PNG and text files in the layout of YOLO's family, as PNG and JSON in COCO's, or as blocks that
        ``data=stream_boxes`` reads; check: the likely mistakes in its labels. block_mb: about so many 10^6
        bytes a block."""
        from ddptrain.data.stream.boxes import write_boxes

        if layout != "stream":  # which goes on where it was stopped
            check_free(folder)  # now, and not after a download
        self._source.fetch(self._root)
        if layout == "check":
            opened = self._source.forgiving().open(self._root)
            yield from write_check(opened, folder, self._size_for(opened))
            return
        opened = self._source.open(self._root)
        tell(opened.skipped)
        if layout != "coco" and opened.has_masks:
            raise UserError(
                f"data.source.masks=true: layout={layout} holds boxes alone. Use layout=coco, or leave"
                " data.source.masks out."
            )
        if layout == "stream":
            yield from write_boxes(opened, folder, block_mb)
            return
        yield from {"yolo": write_yolo, "coco": write_coco}[layout](opened, folder)

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Batch]:
        return self._ready.pipeline.train_batches(sampler, steps)

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Batch]:
        return self._ready.pipeline.valid_batches(chunks)

    def batches_of(self, scenes: Scenes) -> Iterator[Batch]:
        """Any pictures, one at a time, scaled as the validation's are."""
        samples = self._samples(scenes, self.size, False, self._own_shape)
        pipeline = Pipeline(samples, samples, 0, self._facts.device, self._on_device)
        return pipeline.valid_batches([range(i, i + 1) for i in range(len(scenes))])

    def model_input(self, picture: Tensor) -> tuple[Tensor, Letterbox]:
        """uint8 (3, h, w) -> the model's input, float32 (1, 3, H, W) on the device, scaled as the
        validation's are, and where the picture lies in it."""
        from torchvision.transforms.v2 import functional

        sizes = torch.tensor([picture.shape[1:]])
        canvas = canvases(sizes, self.size, self._own_shape)
        placed = letterbox(sizes, self.size, canvas).of(0)
        inner = fitted(sizes, self.size)[0].tolist()
        scaled = picture if list(picture.shape[1:]) == inner else functional.resize(picture, inner)
        device = self._facts.device
        filled = in_canvas(scaled, placed, canvas[0]).to(device)
        memory = torch.channels_last if self._channels_last else torch.contiguous_format
        images = filled[None].to(torch.float32, memory_format=memory) / 255
        return images, Letterbox(placed.scale.to(device), placed.corner.to(device))

    def preview(self) -> Tensor:
        """The first 16 training samples as epoch 0 shows them, with their boxes and masks."""
        from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

        batch = self._ready.pipeline.train.first(16, epoch=0)
        pictures = (coloured(batch, channels_last=False).images * 255).to(torch.uint8)
        for i, there in enumerate(batch.labels >= 0):
            if there.any():
                if batch.masks is not None:
                    own = batch.masks[i][there].bool()
                    pictures[i] = draw_segmentation_masks(pictures[i], own, alpha=0.5, colors="red")
                pictures[i] = draw_bounding_boxes(pictures[i], batch.boxes[i][there], colors="red")
        return pictures

    def describe(self) -> str:
        opened, pipeline, decoded, _ = self._ready
        objects = f"{sum(map(len, opened.train.objects)):,} {'masks' if self.masks else 'boxes'}"
        where = f"in memory ({decoded / 2**20:.0f} MiB), " if pipeline.in_memory else ""
        sides = f"{self.size}x{self.size}"
        if self.rectangular:
            height, width = canvases(opened.valid.sizes, self.size, "common")[0].tolist()
            sides += f" (valid {width}x{height})"
        return (
            f"{self._source.name}: {self.train_size:,} train with {objects}, {self.valid_size:,}"
            f" valid, {len(self.classes)} classes, {sides}, {where}"
            f"{pipeline.describe()}{in_words(opened.skipped)}"
        )

    @cached_property
    def identity(self) -> str:
        opened = self._ready.opened
        sha256 = hashlib.sha256(repr((self.size, self.classes)).encode())
        if opened.identity:
            sha256.update(opened.identity.encode())
            return sha256.hexdigest()
        for part in (opened.train, opened.valid):
            for i, on_it in enumerate(part.objects):
                sha256.update(part.fingerprint(i))
                for tensor in (part.sizes[i], on_it.boxes, on_it.labels, on_it.crowd):
                    sha256.update(tensor.numpy().tobytes())
                for mask in on_it.masks or ():
                    sha256.update(mask)
        return sha256.hexdigest()

    def _on_device(self, batch: Batch) -> Batch:
        return coloured(batch, self._channels_last)
