"""Files that several processes make and share: locks, flushing, names by content, mapping into memory."""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ddptrain.errors import UserError

log = logging.getLogger(__name__)


@contextmanager
def exclusive_lock(lock: Path) -> Iterator[None]:
    """Hold a lock that the system takes back from a process that dies. Its file stays: whoever removed it
    could remove one that another process has just locked. Raises OSError where there can be none."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that holds %s", lock)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def flush_folder(path: Path) -> None:
    """Bring a folder's own entries to the disk, so that a rename outlives a power cut: the names in it, not
    what the files hold."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def take_room(file: int, size: int) -> None:
    """Room on the disk for ``size`` bytes of an open file, so that a full disk shows now. Raises OSError."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(file, 0, size)


def size_and_time(file: Path) -> tuple[int, int]:
    """Bytes, and time of the last change in ns. Raises UserError where the file can't be read."""
    try:
        status = file.stat()
    except OSError as error:
        raise UserError(f"{file}: can't be read ({error.strerror}).", everywhere=False) from error
    return status.st_size, status.st_mtime_ns


def folder_by_content(parent: Path, name: str, made_of: object) -> Path:
    """A folder for what is made of ``made_of``, a plain value: another one for each value."""
    digest = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
    return parent / f"{name}-{digest[:16]}"


def map_file(file: Path, count: int, dtype: torch.dtype) -> Tensor:
    """The first ``count`` values of a file, mapped into memory. Raises UserError where it can't be."""
    try:
        # private pages: what is read is shared with other processes, and nothing can be written back
        return torch.from_file(str(file), shared=False, size=count, dtype=dtype)
    except RuntimeError:
        size_and_time(file)  # says what is wrong with it
        raise
