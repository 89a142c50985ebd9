"""Pictures with masks of a streamed set."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

from torch import Tensor

from ddptrain.data.mask_files import Pair, read_pair
from ddptrain.data.pictures import Encoded
from ddptrain.data.stream.cache import DECODING_S
from ddptrain.data.stream.opened import Streamed
from ddptrain.data.stream.samples import Name, Samples
from ddptrain.data.stream.write import PartToWrite, Writer
from ddptrain.errors import UserError

if TYPE_CHECKING:
    from PIL import Image


@final
class StreamPairs(Sequence[Pair]):
    """Pictures and masks as their files have them, read when asked for."""

    def __init__(self, samples: Samples) -> None:
        self.stream = samples

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, i: int) -> Pair:  # type: ignore[override]
        return self._read(i)

    def _read(self, i: int, suspect: bool = False) -> Pair:
        ((picture, mask),) = self.stream.read([i], ["image", "mask"], suspect)
        name = Name(self.stream, i)
        return Pair(Encoded(picture, name), Encoded(mask, f"the mask of {name}"))

    def decoded(self, i: int, classes: int) -> "tuple[Image.Image, Image.Image]":
        """As `read_pair`; once more of a sample whose block has suffered on this node's disk."""
        pair, began = self[i], time.monotonic()
        try:
            return read_pair(pair, classes)
        except UserError:
            again = self._read(i, suspect=True)
            if [file.getvalue() for file in again] == [file.getvalue() for file in pair]:  # type: ignore[union-attr]
                raise
        finally:
            self.stream.cache.counts[DECODING_S] += time.monotonic() - began
        return read_pair(again, classes)


class MaskSet(NamedTuple):
    train: StreamPairs
    valid: StreamPairs
    classes: tuple[str, ...]
    identity: str


@final
class StreamMasks:
    """Pictures with masks that lie in a bucket, on a web server or in a folder, in blocks.

    url, valid_url, cache, cache_gb, shuffle_blocks, retry_s: as `Streamed` has them.
    """

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

    def fetch(self) -> None:
        """Runs in one process a node."""
        self._streamed.fetch()

    def open(self) -> MaskSet:
        opened = self._streamed.open()
        if opened.kind != "masks":
            raise UserError(
                f"data.source.url: holds a set of {opened.kind or 'another program'}, not of masks. Write one"
                " by `python -m ddptrain write recipe=... layout=stream out=...`."
            )
        train, valid = (StreamPairs(part.samples) for part in (opened.train, opened.valid))
        return MaskSet(train, valid, tuple(opened.about["classes"]), opened.identity)


def write_masks(
    parts: Sequence[Sequence[Pair]], classes: Sequence[str], folder: Path, block_mb: float
) -> Iterator[str]:
    """Pictures and masks as blocks, their files as they are."""

    def part(name: str, pairs: Sequence[Pair]) -> PartToWrite:
        return PartToWrite(name, len(pairs), lambda i: [_content(file) for file in pairs[i]], _no_columns)

    writer = Writer(
        folder, "masks", {"image": "bytes", "mask": "bytes"}, {"classes": list(classes)}, block_mb
    )
    yield from writer.write(
        [part(name, pairs) for name, pairs in zip(("train", "valid"), parts, strict=True)]
    )


def _content(file: Path | Encoded) -> bytes:
    if isinstance(file, Encoded):
        return file.getvalue()
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: can't be read ({error.strerror}).") from error


def _no_columns(order: Tensor) -> dict[str, Tensor]:
    return {}
