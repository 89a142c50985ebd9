"""CIFAR-10 (Krizhevsky 2009), from its binary archive: plain bytes, so nothing is unpickled, and nothing is
unpacked to the disk."""

import gzip
import http.client
import io
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ddptrain.data.download import DownloadLimits, download, sha256_of
from ddptrain.data.images.source import ArraySplit, ImageSet, ImageSource
from ddptrain.errors import UserError

ARCHIVE = "cifar-10-binary.tar.gz"
URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
LIMITS = DownloadLimits(largest=256 * 2**20)
"""The archive has 170,052,171 bytes."""

_RECORD = 1 + 3 * 32 * 32
_MOST_RECORDS = 10_000
_TRAIN = [f"data_batch_{i}.bin" for i in range(1, 6)]
_VALID = "test_batch.bin"
_MOST_MEMBERS = 32
_MOST_UNPACKED = 256 * 2**20  # Bytes; the right archive has 184,380,000 and a little


@final
@dataclass(frozen=True, eq=False)
class Cifar10(ImageSource):
    """50,000 + 10,000 colour images, 32x32.

    url, sha256: where the archive comes from (a mirror of your own, say) and what it must hash to.
    """

    name = "cifar10"

    url: str = URL
    sha256: str = SHA256

    def fetch(self, root: Path) -> None:
        archive = root / ARCHIVE
        if not archive.exists():
            try:
                download(self.url, self.sha256, archive, LIMITS)
            except UserError as error:
                raise UserError(f"data=cifar10: {error}") from error
            except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: no URL at all
                raise UserError(
                    f"data=cifar10: {archive} is not there and {self.url} can't be downloaded ({error})."
                    f" Put {ARCHIVE} into {archive.parent}/ (data.root=... names another folder), or use"
                    " data=shapes, which needs no download."
                ) from error
        if sha256_of(archive) != self.sha256:
            raise UserError(
                f"{archive}: its SHA-256 is not {self.sha256}, so it is damaged or another file."
                " Delete it and start again, or put the right one there."
            )

    def open(self, root: Path) -> ImageSet:
        batches = _read(root / ARCHIVE)
        train = [batches[name] for name in _TRAIN]
        images, labels = (torch.cat(part) for part in zip(*train, strict=True))
        return ImageSet(
            train=ArraySplit(images, labels),
            valid=ArraySplit(*batches[_VALID]),
            classes=CLASSES,
            mean=[125.3, 123.0, 113.9],
            std=[63.0, 62.1, 66.7],
        )


class _Capped(io.RawIOBase):
    """A stream that ends in an error beyond so many bytes: a small archive can unpack to terabytes."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file
        self._left = _MOST_UNPACKED

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(block)
        if self._left < 0:
            raise tarfile.ReadError(f"it unpacks to more than {_MOST_UNPACKED:,} bytes")
        return block


def _read(archive: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Every batch by its name. The archive is read once, from start to end: its SHA-256 comes from a config,
    which may be a stranger's, so what lies in it is checked before it is read."""
    batches: dict[str, tuple[Tensor, Tensor]] = {}
    try:
        with gzip.open(archive) as file, tarfile.open(fileobj=_Capped(file), mode="r|") as tar:
            for count, member in enumerate(tar):
                _check(member, count, batches)
                if (name := Path(member.name).name) in (*_TRAIN, _VALID):
                    batches[name] = _batch(tar, member)
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise UserError(
            f"{archive}: is no archive of CIFAR-10 ({error}). Put the right one there, with SHA-256 {SHA256}."
        ) from error
    missing = [name for name in (*_TRAIN, _VALID) if name not in batches]
    if missing:
        raise UserError(f"{archive}: is no archive of CIFAR-10: it has no {', '.join(missing)}.")
    return batches


def _check(member: tarfile.TarInfo, count: int, batches: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Refuse what the archive can't hold, before it is read. Raises tarfile.ReadError."""
    if count >= _MOST_MEMBERS:
        raise tarfile.ReadError(f"it has more than {_MOST_MEMBERS} members")
    if not member.isdir() and (member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse()):
        raise tarfile.ReadError(f"{member.name} is a link, a device or the like")
    name = Path(member.name).name
    if name in (*_TRAIN, _VALID):
        records, rest = divmod(member.size, _RECORD)
        if not member.isfile() or rest or not 0 < records <= _MOST_RECORDS:
            raise tarfile.ReadError(
                f"{name} has {member.size:,} bytes, not 1 to {_MOST_RECORDS:,} times {_RECORD}"
            )
        if name in batches:
            raise tarfile.ReadError(f"{name} is there twice")


def _batch(tar: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[Tensor, Tensor]:
    """uint8 (n, 32, 32, 3), int64 (n,): records of a label byte and three 32x32 planes."""
    file = tar.extractfile(member)
    content = file.read() if file is not None else b""
    if len(content) != member.size:
        raise tarfile.ReadError(f"{member.name} is cut short")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, _RECORD)
    labels = records[:, 0].to(torch.int64)
    if int(labels.max()) >= len(CLASSES):
        raise tarfile.ReadError(
            f"{member.name} has label {int(labels.max())}; there are {len(CLASSES)} classes"
        )
    planes = records[:, 1:].view(-1, 3, 32, 32)
    return planes.permute(0, 2, 3, 1).contiguous(), labels
