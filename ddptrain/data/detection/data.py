"""Pictures with boxes for training, from any `DetectionSource`."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor

from ddptrain.api.order import EpochOrder
from ddptrain.api.recipe import Data, Loading
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.agreement import note_checkpoints_own
from ddptrain.data.detection.augment import DetectionAugment
from ddptrain.data.detection.batch import Batch, coloured
from ddptrain.data.detection.samples import BoxSamples, decoded_bytes
from ddptrain.data.detection.source import DetectionSource, Scenes
from ddptrain.data.detection.write import write_coco, write_yolo
from ddptrain.data.left_out import in_words, tell
from ddptrain.data.stream.samples import training_keys, valid_keys
from ddptrain.data.workers import check_workers, read_by_workers, spare_cores, validation_keys
from ddptrain.distributed.comm import once_a_node
from ddptrain.errors import UserError

_COARSEST = 32  # Pixels of the coarsest stride; a picture's side is a multiple of it
_LARGEST_AUTO = 640
_RESIDENT = 2 * 2**30  # Bytes up to which ``resident=auto`` keeps the decoded pictures in a node's memory
_LARGEST = 4096


@final
class DetectionData(Data):
    """Batches of `ddptrain.data.detection.batch.Batch`.

    Once prepared: classes, their names, into which a label is an index; side; seed, the run's.

    root: folder that the source's relative paths start from. side: pixels of the squares in which pictures
    are put, a multiple of 32; ``auto`` takes the median of the pictures' longer sides, 640 at most. resident:
    keep the decoded pictures in memory; ``auto`` if they are small enough. workers: loader processes of a
    rank; ``auto`` by the cores at hand, and none where the training itself needs them (on a CPU).
    """

    def __init__(
        self,
        source: DetectionSource,
        augment: DetectionAugment,
        root: str = "data",
        side: int | Literal["auto"] = "auto",
        resident: bool | Literal["auto"] = "auto",
        workers: int | Literal["auto"] = "auto",
        channels_last: bool = True,
    ) -> None:
        check_workers(workers)
        if side != "auto" and (not _COARSEST <= side <= _LARGEST or side % _COARSEST):
            raise UserError(
                f"data.side={side}: must be a multiple of {_COARSEST} pixels, at most {_LARGEST}, or auto."
            )
        self._source = source
        self._augment = augment
        self._root = Path(root)
        self._asked_side = side
        self._resident = resident
        self._asked_workers = workers
        self._channels_last = channels_last

    def prepare(self, world: World, seed: int) -> None:
        once_a_node(world, lambda: self._source.fetch(self._root))
        opened = self._set = self._source.open(self._root)
        for part, scenes in (("training", opened.train), ("validation", opened.valid)):
            if all(bool(on_it.crowd.all()) for on_it in scenes.objects):
                raise UserError(f"data: none of the {len(scenes):,} {part} pictures has a box on it.")
        self.classes = tuple(opened.classes)
        tell(opened.skipped)
        # the smallest multiple of 32 that holds the median of the longer sides
        usual = -(-int(opened.train.sizes.amax(1).median()) // _COARSEST) * _COARSEST
        self.side = min(usual, _LARGEST_AUTO) if self._asked_side == "auto" else self._asked_side
        self._bytes = sum(decoded_bytes(part, self.side) for part in (opened.train, opened.valid))
        resident = self._bytes * world.local_size <= _RESIDENT if self._resident == "auto" else self._resident
        self._in_memory = resident
        self._train, self._valid = (
            BoxSamples(part, self.side, self._augment, seed, resident)
            for part in (opened.train, opened.valid)
        )
        spare = 0 if world.device.type == "cpu" else spare_cores(world)
        self._workers = spare if self._asked_workers == "auto" else self._asked_workers
        self._device, self.seed = world.device, seed

    @property
    def outputs(self) -> Sequence[str]:
        return self.classes

    @property
    def valid(self) -> Scenes:
        """The validation part: what is truly on its pictures."""
        return self._set.valid

    @property
    def train_size(self) -> int:
        return len(self._set.train)

    @property
    def valid_size(self) -> int:
        return len(self._set.valid)

    @property
    def epoch_order(self) -> EpochOrder:
        return self._set.epoch_order

    @property
    def loading(self) -> Loading:
        stream = self._set.train.stream
        reading = None if stream is None else stream.reading
        return Loading(self._workers, self._in_memory, reading, len(self._set.skipped))

    def metadata(self) -> Mapping[str, Any]:
        return {"classes": list(self.classes), "side": self.side}

    def adopt_metadata(self, metadata: Mapping[str, Any]) -> None:
        if self._asked_side not in ("auto", metadata["side"]):
            note_checkpoints_own("data.side", self._asked_side, metadata["side"])
        self._asked_side = int(metadata["side"])

    def load_metadata(self, metadata: Mapping[str, Any], world: World) -> None:
        self.classes = tuple(metadata["classes"])
        self.adopt_metadata(metadata)
        self.side = int(metadata["side"])
        self._workers, self._device = 0, world.device

    def write(
        self, folder: Path, layout: Literal["yolo", "coco", "stream"] = "yolo", block_mb: float = 32.0
    ) -> Iterator[str]:
        """As PNG and text files in the layout of YOLO's family, as PNG and JSON in COCO's, or as blocks that
        ``data=stream_boxes`` reads. block_mb: about so many 10^6 bytes a block."""
        from ddptrain.data.stream.boxes import write_boxes

        self._source.fetch(self._root)
        opened = self._source.open(self._root)
        if layout == "stream":
            yield from write_boxes(opened, folder, block_mb)
            return
        yield from {"yolo": write_yolo, "coco": write_coco}[layout](opened, folder)

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Batch]:
        return self._loaded(self._train, training_keys(self._set.train.stream, sampler, steps))

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Batch]:
        return self._loaded(self._valid, valid_keys(self._set.valid.stream, chunks))

    def batches_of(self, scenes: Scenes) -> Iterator[Batch]:
        """Any pictures, one at a time, as the validation's are seen."""
        samples = BoxSamples(scenes, self.side, self._augment, seed=0, resident=False)
        return self._loaded(samples, validation_keys([[i] for i in range(len(scenes))]))

    def preview(self) -> Tensor:
        """The first 16 training samples as epoch 0 shows them, with their boxes."""
        from torchvision.utils import draw_bounding_boxes

        batch = self._train.__getitems__([(0, i, 0.0) for i in range(min(16, self.train_size))])
        if isinstance(batch, UserError):
            raise batch
        pictures = (coloured(batch, channels_last=False).images * 255).to(torch.uint8)
        for i, there in enumerate(batch.labels >= 0):
            if there.any():
                pictures[i] = draw_bounding_boxes(pictures[i], batch.boxes[i][there], colors="red")
        return pictures

    def describe(self) -> str:
        boxes = sum(map(len, self._set.train.objects))
        where = f"in memory ({self._bytes / 2**20:.0f} MiB)" if self._in_memory else "read from disk"
        return (
            f"{self._source.name}: {self.train_size:,} train with {boxes:,} boxes, {self.valid_size:,}"
            f" valid, {len(self.classes)} classes, {self.side}x{self.side}, {where},"
            f" {self._workers} workers{in_words(self._set.skipped)}"
        )

    @cached_property
    def identity(self) -> str:
        sha256 = hashlib.sha256(repr((self.side, tuple(self.classes))).encode())
        if self._set.identity:
            sha256.update(self._set.identity.encode())
            return sha256.hexdigest()
        for part in (self._set.train, self._set.valid):
            for i, on_it in enumerate(part.objects):
                sha256.update(part.fingerprint(i))
                for tensor in (part.sizes[i], on_it.boxes, on_it.labels, on_it.crowd):
                    sha256.update(tensor.numpy().tobytes())
        return sha256.hexdigest()

    def _loaded(self, samples: BoxSamples, keys: Any) -> Iterator[Batch]:
        for batch in read_by_workers(samples, keys, self._workers, self._device):
            yield coloured(batch, self._channels_last)
