"""Pictures decoded and scaled once, in files that are mapped into memory: for folders that are read again and
again, by epochs or by runs. What lies there is what decoding gave, so a run has the same batches with and
without."""

import errno
import hashlib
import json
import logging
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar, final

import torch
from torch import Tensor

from ddptrain.data.disk import exclusive_lock, flush_folder, folder_by_content, map_file, take_room
from ddptrain.data.images.source import Split
from ddptrain.distributed.cpu import cores
from ddptrain.errors import UserError
from ddptrain.text import parse_json

Item = TypeVar("Item")
Result = TypeVar("Result")
log = logging.getLogger(__name__)

FORMAT = 1
"""Of the files, and of the pixels: raise it when `pictures.fitted` comes to give others."""
_ABOUT = "about.json"
_BLOCK = 16 * 2**20  # Bytes of pixels, about, that are decoded, written and checked at a time
_CHECKED = 64
"""Blocks looked at before a run, a GiB of pixels: all of most sets, and others each time of a larger one."""
_PROGRESS_EVERY_S = 10.0  # Seconds
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_TO_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class _PixelBlock(NamedTuple):
    part: str
    ids: range
    bytes_each: int


@final
class PackedSplit(Split):
    """Packed pictures; their pixels stay on the disk, and in the system's cache, until they are asked for."""

    def __init__(self, file: Path, labels: Tensor, shape: tuple[int, int, int]) -> None:
        self._file = file
        self.labels = labels
        self.shape = shape

    @cached_property
    def _pixels(self) -> Tensor:
        """Mapped when first read: what a worker meets while it starts would be a traceback."""
        return map_file(self._file, _bytes_of(self), torch.uint8).view(-1, *self.shape)

    def images(self, ids: Tensor) -> Tensor:
        return self._pixels.index_select(0, ids)

    def __reduce__(self) -> tuple[object, ...]:
        """A loader's worker maps the file itself; to be sent, the pixels would be copied."""
        return PackedSplit, (self._file, self.labels, self.shape)


def packed_folder(cache: Path, name: str, made_of: object) -> Path:
    """Where packed pictures belong: another folder for all else that they are made of, a plain value."""
    return folder_by_content(cache, name, [FORMAT, made_of])


def pack(folder: Path, parts: Mapping[str, Split], about: Mapping[str, object]) -> None:
    """Make sure that a folder holds the pictures of these splits, whole. Runs in one process a node.

    about: plain values for people to tell packs apart by, kept in its about.json.

    What is there is checked: the files' lengths, and the SHA-256 of the pixels, or of a GiB of them. What is
    missing or damaged is decoded on all cores, written aside, flushed and renamed, while other processes and
    nodes that see the folder wait. Raises UserError where a picture can't be read or the disk refuses.
    """
    size = sum(map(_bytes_of, parts.values()))
    damage = _damage(folder, parts)  # without a lock, for the folder may be one to read only
    if not damage:
        log.info("packed     %s (%s)", folder, _readable_size(size))
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder.with_name(f".{folder.name}.lock")):
            damage = _damage(folder, parts)  # another process may have been at it
            if damage and folder.is_dir():
                log.warning("packed     %s is damaged (%s); it is made anew", folder, damage)
            if damage:
                _write(folder, parts, size, about)
    except OSError as error:
        raise _refused(folder, size, damage, error) from error


def open_packed(folder: Path, part: str, split: Split) -> PackedSplit:
    """The packed pictures of a split. Raises UserError where its folder has not been packed."""
    file = folder / part
    try:
        length = file.stat().st_size
    except OSError as error:
        raise UserError(
            f"{file}: can't be read ({error.strerror}). The pictures that it is made of have changed since"
            " the run began. Start again."
        ) from error
    if length != _bytes_of(split):
        raise UserError(f"{file}: was cut short since the run began. Start again; it is made anew.")
    return PackedSplit(file, split.labels, split.shape)


def _refused(folder: Path, size: int, damage: str, error: OSError) -> UserError:
    """Why packed pictures can't be written, why they would have to be, and what helps."""
    explanation = ""
    if os.path.isdir(folder):
        explanation = f" {folder.name} there is damaged: {damage}."
    elif error.errno in _TO_READ_ONLY:
        others = sorted(other.name for other in folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*"))
        many = f"{others[0]} and {len(others) - 1} more" if len(others) > 1 else "".join(others)
        if others:
            explanation = (
                f" What is packed there ({many}) was made of files in other folders, of other names, sizes or"
                f" times of change, or by another version of Pillow; {_ABOUT} in it says when and of what."
            )
    remedy = "Make room, name" if error.errno in _NO_ROOM else "Name"
    return UserError(
        f"data.source.cache={folder.parent}: {_readable_size(size)} of packed pictures can't be written there"
        f" ({error.strerror}).{explanation} {remedy} another folder, or do without: data.source.cache=null.",
        everywhere=False,
    )


def _write(folder: Path, parts: Mapping[str, Split], size: int, about: Mapping[str, object]) -> None:
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed; the lock is ours
    aside.mkdir()
    try:
        for part, split in parts.items():
            with (aside / part).open("wb") as file:
                take_room(file.fileno(), _bytes_of(split))
                file.truncate(_bytes_of(split))
        blocks = _blocks(parts)
        began = time.monotonic()
        packing = _on_all_cores(lambda block: _packed(aside, parts, block), blocks)
        facts = {
            **about,
            "pictures": {part: len(split) for part, split in parts.items()},
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "sha256": list(_with_progress(blocks, packing)),
        }
        (aside / _ABOUT).write_text(json.dumps(facts, indent=1))  # all but the last for people
        for path in aside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        flush_folder(aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        flush_folder(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    count, seconds = sum(map(len, parts.values())), time.monotonic() - began
    log.info("packed     %s pictures in %.0f s: %s (%s)", f"{count:,}", seconds, folder, _readable_size(size))


def _packed(aside: Path, parts: Mapping[str, Split], block: _PixelBlock) -> str:
    """Decode a block and write it to its place; its SHA-256."""
    pixels = parts[block.part].images(torch.arange(block.ids.start, block.ids.stop)).numpy().data
    with (aside / block.part).open("r+b") as file:
        file.seek(block.ids.start * block.bytes_each)
        file.write(pixels)
    return hashlib.sha256(pixels).hexdigest()


def _damage(folder: Path, parts: Mapping[str, Split]) -> str:
    """What is wrong with packed pictures; "" where nothing is found."""
    blocks = _blocks(parts)
    try:
        digests = parse_json((folder / _ABOUT).read_text())["sha256"]
        for part, split in parts.items():
            length, wanted = (folder / part).stat().st_size, _bytes_of(split)
            if length != wanted:
                return f"{part} has {length:,} bytes instead of {wanted:,}"
        if not isinstance(digests, list) or len(digests) != len(blocks):
            return f"{_ABOUT} is about other files"
        pairs = list(zip(blocks, digests, strict=True))
        if len(pairs) > _CHECKED:
            pairs = random.SystemRandom().sample(pairs, _CHECKED)
        sound = _on_all_cores(lambda pair: _digest(folder, pair[0]) == pair[1], pairs)
        wrong = [block.part for (block, _), right in zip(pairs, sound, strict=True) if not right]
        return f"pixels in {wrong[0]} differ from what was written" if wrong else ""
    except OSError as error:
        return f"{Path(error.filename or folder).name} can't be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return f"{_ABOUT} can't be read"


def _bytes_of(split: Split) -> int:
    return len(split) * math.prod(split.shape)


def _digest(folder: Path, block: _PixelBlock) -> str:
    with (folder / block.part).open("rb") as file:
        file.seek(block.ids.start * block.bytes_each)
        return hashlib.sha256(file.read(len(block.ids) * block.bytes_each)).hexdigest()


def _blocks(parts: Mapping[str, Split]) -> list[_PixelBlock]:
    blocks = []
    for part, split in parts.items():
        bytes_each = math.prod(split.shape)
        stride, count = max(1, _BLOCK // bytes_each), len(split)
        blocks += [
            _PixelBlock(part, range(start, min(start + stride, count)), bytes_each)
            for start in range(0, count, stride)
        ]
    return blocks


def _on_all_cores(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """In order. Threads: Pillow decodes, files are written and hashed without Python's lock."""
    with ThreadPoolExecutor(cores()) as pool:
        yield from pool.map(work, items)  # after a broken picture, none of the others


def _with_progress(blocks: list[_PixelBlock], digests: Iterable[str]) -> Iterator[str]:
    """The same, with a line in the log now and then."""
    count, done, last = sum(len(block.ids) for block in blocks), 0, time.monotonic()
    for block, digest in zip(blocks, digests, strict=True):
        done += len(block.ids)
        if time.monotonic() - last > _PROGRESS_EVERY_S:
            log.info("packing    %s of %s pictures", f"{done:,}", f"{count:,}")
            last = time.monotonic()
        yield digest


def _readable_size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
