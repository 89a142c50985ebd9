"""Pictures with masks of a streamed set."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

from ddptrain.data.agreement import check_alike
from ddptrain.data.identity import of_file
from ddptrain.data.masks.files import Pair, read_pair
from ddptrain.data.pictures import Encoded, content_of
from ddptrain.data.stream.opened import Streamed
from ddptrain.data.stream.samples import StreamSamples
from ddptrain.data.stream.write import PartToWrite, Writer

if TYPE_CHECKING:
    from PIL import Image


_FIELDS = ("image", "mask")


@final
class StreamPairs(Sequence[Pair]):
    """Pictures and masks as their files have them, read when asked for."""

    def __init__(self, samples: StreamSamples) -> None:
        self.stream = samples

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, i: int) -> Pair:  # type: ignore[override]
        (contents,) = self.stream.read([i], _FIELDS)
        return Pair(*self.stream.encoded(i, _FIELDS, contents))

    def decoded(self, i: int, classes: int) -> "tuple[Image.Image, Image.Image]":
        """As `read_pair`."""
        make = partial(_read_pair, classes=classes)
        return self.stream.decode([i], _FIELDS, make)[0]


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

    no_skip = Streamed.no_skip

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
        opened = self._streamed.open("masks")
        classes = opened.about["classes"]
        # the classes are in the pixels of PNGs, which stay as they are
        check_alike(classes, opened.valid_about["classes"], "data.source.valid_url", "data.source.url")
        train, valid = (StreamPairs(part.samples) for part in (opened.train, opened.valid))
        return MaskSet(train, valid, tuple(classes), opened.identity)


def write_masks(
    parts: Sequence[Sequence[Pair]], classes: Sequence[str], folder: Path, block_mb: float
) -> Iterator[str]:
    """Pictures and masks as blocks, their files as they are."""

    def part(name: str, pairs: Sequence[Pair]) -> PartToWrite:
        return PartToWrite(
            name, len(pairs), lambda i: [content_of(file) for file in pairs[i]], lambda order: {},
            (_fingerprint(file, len(pairs)) for pair in pairs for file in pair),
        )  # fmt: skip

    writer = Writer(folder, "masks", dict.fromkeys(_FIELDS, "bytes"), {"classes": list(classes)}, block_mb)
    yield from writer.write(
        [part(name, pairs) for name, pairs in zip(("train", "valid"), parts, strict=True)]
    )


def _read_pair(picture: Encoded, mask: Encoded, classes: int) -> "tuple[Image.Image, Image.Image]":
    return read_pair(Pair(picture, mask), classes)


def _fingerprint(file: Path | Encoded, among: int) -> bytes:
    return file.getvalue() if isinstance(file, Encoded) else of_file(str(file), str(file), among)
