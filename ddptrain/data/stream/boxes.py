"""Pictures with boxes of a streamed set."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ddptrain.data.agreement import Relabelling
from ddptrain.data.detection.source import DetectionSet, DetectionSource, Objects, PackedObjects, Scenes
from ddptrain.data.pictures import Encoded, decoded
from ddptrain.data.stream.opened import OpenedPart, Streamed
from ddptrain.data.stream.samples import Name, StreamSamples
from ddptrain.data.stream.write import PartToWrite, Writer


@final
class Numbered(Sequence[str]):
    """Names of pictures that have none."""

    def __init__(self, samples: StreamSamples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> str:  # type: ignore[override]
        return str(Name(self._samples, range(len(self))[i]))


@final
class StreamScenes(Scenes):
    """Pictures as their files have them, decoded when asked for."""

    def __init__(self, part: OpenedPart, relabel: Relabelling | None = None) -> None:
        columns = {name: column.read() for name, column in part.columns.items()}
        self.stream: StreamSamples = part.samples
        self.names = Numbered(part.samples)
        self.sizes = columns["sizes"]
        labels = columns["labels"] if relabel is None else relabel(columns["labels"])
        packed = Objects(columns["boxes"], labels, columns["crowd"])
        self.objects = PackedObjects(columns["starts"], packed)
        self._part = part
        self._relabel = relabel

    def __reduce__(self) -> tuple[object, ...]:
        """A loader's worker reads the columns itself."""
        return StreamScenes, (self._part, self._relabel)

    def image(self, i: int) -> Tensor:
        from torchvision.transforms.v2.functional import pil_to_tensor

        def decode(content: Encoded) -> Tensor:
            return pil_to_tensor(decoded(content, "RGB"))  # type: ignore[no-any-return]

        return self.stream.decode([i], ["image"], decode)[0]

    def encoded(self, i: int) -> bytes:
        ((content,),) = self.stream.read([i], ["image"])
        return content


@final
class StreamBoxes(DetectionSource):
    """Pictures with boxes that lie in a bucket, on a web server or in a folder, in blocks.

    url, valid_url, cache, cache_gb, shuffle_blocks, retry_s: as `Streamed` has them.
    """

    name = "stream"

    def __init__(
        self,
        url: str | None = None,
        valid_url: str | None = None,
        cache: str | None = "data/stream",
        cache_gb: float = 50.0,
        shuffle_blocks: int = 16,
        retry_s: float = 120.0,
    ) -> None:
        self._streamed = Streamed(url, valid_url, cache, cache_gb, shuffle_blocks, retry_s)

    def fetch(self, root: Path) -> None:
        self._streamed.fetch()

    def open(self, root: Path) -> DetectionSet:
        opened = self._streamed.open("boxes")
        relabel = self._streamed.relabelling(opened, opened.about["classes"])
        train, valid = StreamScenes(opened.train), StreamScenes(opened.valid, relabel)
        blocks = opened.train.samples.blocks
        return DetectionSet(
            train, valid, opened.about["classes"], epoch_order=blocks, identity=opened.identity
        )


def write_boxes(opened: DetectionSet, folder: Path, block_mb: float) -> Iterator[str]:
    """A set with boxes as blocks; image files go in as they are, other pictures as PNGs."""
    writer = Writer(folder, "boxes", {"image": "bytes"}, {"classes": list(opened.classes)}, block_mb)
    parts = [("train", opened.train), ("valid", opened.valid)]
    yield from writer.write([
        PartToWrite(
            name, len(scenes), partial(_sample, scenes), partial(_columns, scenes),
            map(scenes.fingerprint, range(len(scenes))),
        )
        for name, scenes in parts
    ])  # fmt: skip


def _sample(scenes: Scenes, i: int) -> list[bytes]:
    return [scenes.encoded(i)]


def _columns(scenes: Scenes, order: Tensor) -> Mapping[str, Tensor]:
    objects = [scenes.objects[i] for i in order.tolist()]
    return {
        "sizes": scenes.sizes[order],
        "starts": torch.tensor([0, *accumulate(map(len, objects))]),
        "boxes": torch.cat([on_it.boxes for on_it in objects]),
        "labels": torch.cat([on_it.labels for on_it in objects]),
        "crowd": torch.cat([on_it.crowd for on_it in objects]),
    }
