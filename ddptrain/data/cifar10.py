"""CIFAR-10 (Krizhevsky 2009), from its binary archive: plain bytes, so nothing is unpickled."""

import hashlib
import http.client
import os
import platform
import tarfile
import urllib.request
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ddptrain.data.source import ArraySplit, ImageSource, Opened
from ddptrain.errors import UserError

ARCHIVE = "cifar-10-binary.tar.gz"
URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_RECORD = 1 + 3 * 32 * 32
_TIMEOUT_S = 30


@final
class Cifar10(ImageSource):
    """50,000 + 10,000 colour images, 32x32.

    url, sha256: where the archive comes from (a mirror of your own, say) and what it must hash to.
    """

    name = "cifar10"

    def __init__(self, url: str = URL, sha256: str = SHA256) -> None:
        self._url = url
        self._sha256 = sha256

    def fetch(self, root: Path) -> None:
        archive = root / ARCHIVE
        if not archive.exists():
            self._download(archive)
        elif _sha256(archive) != self._sha256:
            raise UserError(
                f"{archive}: its SHA-256 is not {self._sha256}, so it is damaged or another file."
                " Delete it and start again, or put the right one there."
            )

    def open(self, root: Path) -> Opened:
        with tarfile.open(root / ARCHIVE) as archive:
            train = [_read(archive, f"data_batch_{i}.bin") for i in range(1, 6)]
            images, labels = (torch.cat(part) for part in zip(*train, strict=True))
            return Opened(
                train=ArraySplit(images, labels),
                valid=ArraySplit(*_read(archive, "test_batch.bin")),
                classes=CLASSES,
                mean=[125.3, 123.0, 113.9],
                std=[63.0, 62.1, 66.7],
            )

    def _download(self, archive: Path) -> None:
        part = archive.with_name(f".{archive.name}.{platform.node()}.{os.getpid()}.part")
        try:
            archive.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(self._url, timeout=_TIMEOUT_S) as reply, part.open("wb") as out:
                while block := reply.read(1 << 20):
                    out.write(block)
            if _sha256(part) != self._sha256:
                raise UserError(
                    f"data=cifar10: what {self._url} sent is cut short or another file: its SHA-256 is not"
                    f" {self._sha256}. Start again, or put {ARCHIVE} into {archive.parent}/ yourself."
                )
            part.rename(archive)
        except UserError:
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: no URL at all
            raise UserError(
                f"data=cifar10: {archive} is not there and {self._url} can't be downloaded ({error})."
                f" Put {ARCHIVE} into {archive.parent}/ (data.root=... names another folder), or use"
                " data=shapes, which needs no download."
            ) from error
        finally:
            part.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(archive: tarfile.TarFile, name: str) -> tuple[Tensor, Tensor]:
    """uint8 (n, 32, 32, 3), int64 (n,): records of a label byte and three 32x32 planes."""
    member = archive.extractfile(f"cifar-10-batches-bin/{name}")
    assert member is not None  # the hash says it is there
    records = torch.frombuffer(bytearray(member.read()), dtype=torch.uint8).view(-1, _RECORD)
    planes = records[:, 1:].view(-1, 3, 32, 32)
    return planes.permute(0, 2, 3, 1).contiguous(), records[:, 0].to(torch.int64)
