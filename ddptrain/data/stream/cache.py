"""Blocks on a node's own disk: a bounded folder that its ranks, their workers and other jobs share.

A block appears under its name when it is whole. Readers open it for the moment of a read, so that one may be
removed at any time. The oldest use goes first; what a job still needs it touches again and again
(`BlockPrefetch`).
"""

import errno
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar, final

import torch
from torch import Tensor

from ddptrain.data.disk import take_room
from ddptrain.data.stream.block_table import Block, BlockTable
from ddptrain.data.stream.store import Damaged, Store
from ddptrain.errors import UserError

log = logging.getLogger("ddptrain")

_DIGEST_BYTES = 32
_PIECE = 2**22
_FETCHED, _PART = ".block", ".part"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_WAIT_S = 60.0
FETCHED, BYTES, DAMAGED, NETWORK_S, DECODING_S = range(5)
"""Of `BlockCache.counts`."""


Result = TypeVar("Result")


@final
class BlockCache:
    """A set's blocks, in ``folder`` once they were needed; None: they are read in the store's own folder.

    limit: bytes of all blocks in the folder, of whatever set. convert: a fetched object's file as a block's
    bytes; None where it is one. counts: float64, what this set's readers on the node have seen, by `FETCHED`,
    ...; shared by a rank and its workers.
    """

    def __init__(
        self, store: Store, blocks: BlockTable, folder: Path | None, limit: int,
        convert: Callable[[IO[bytes]], bytes] | None = None,
    ) -> None:  # fmt: skip
        self._store = store
        self.blocks = blocks
        self.in_place = folder is None
        self._folder = Path(store.folder or "") if folder is None else folder
        self.limit = limit
        self._convert = convert
        self.counts: Tensor = torch.zeros(5, dtype=torch.float64).share_memory_()
        """Added to by several processes without a lock: an addition may be lost, now and then."""
        self._sound: Tensor = torch.zeros(len(blocks), dtype=torch.bool).share_memory_()
        """Blocks that this rank or its workers have fetched, or looked at."""

    def path(self, i: int) -> Path:
        """Where the i-th block is, or would be."""
        return self._path_of(self.blocks[i])

    def _path_of(self, block: Block) -> Path:
        if self.in_place:
            return self._folder / block.key
        about = f"{self._store.url} {block.key} {block.size} {block.sha256} {self._convert is not None}"
        return self._folder / (hashlib.sha256(about.encode()).hexdigest()[:32] + _FETCHED)

    def touch(self, i: int) -> bool:
        """Say that a block is needed; whether it is there."""
        try:
            os.utime(self.path(i))
        except FileNotFoundError:
            return False
        return True

    def fetched(self, i: int) -> Path:
        """The i-th block's file, fetched if need be, and looked at before its first use. Raises UserError
        naming what stands against it."""
        path = self.path(i)
        if self.in_place:
            return path
        began = time.monotonic()
        while not path.exists() or (not self._sound[i] and self.drop_if_damaged(i)):
            if not self.fetch(i):
                time.sleep(0.01)  # another process is at it
        self.counts[NETWORK_S] += time.monotonic() - began
        return path

    def is_sound(self, i: int) -> bool:
        """Whether a block has been looked at, or was fetched since."""
        return bool(self._sound[i])

    def fetch(self, i: int) -> bool:
        """Fetch a block, unless it is there. False: another process is just doing so."""
        path = self.path(i)
        try:
            with self._part_of(path) as part:
                if part is None or path.exists():
                    return path.exists()
                self._download(self.blocks[i], part)
                os.rename(path.with_suffix(_PART), path)
        except FileNotFoundError:  # the folder has vanished
            return False
        except OSError as error:
            raise self._refused(error) from error
        self._sound[i] = True
        return True

    def learn(self, i: int, look: Callable[[IO[bytes]], Result]) -> tuple[Block, Result]:
        """Fetch a block of which only the key is known. Returns what is now known of it, and what ``look``
        finds in its file."""
        block = self.blocks[i]
        if self.in_place:
            return self._learn_in_place(block, look)
        while True:
            try:
                with self._part_of(self.path(i)) as part:
                    if part is not None:
                        known = self._download(block, part)
                        result = look(part)
                        os.rename(self.path(i).with_suffix(_PART), self._path_of(known))
                        return known, result
            except OSError as error:
                raise self._refused(error) from error
            time.sleep(0.05)

    def _learn_in_place(self, block: Block, look: Callable[[IO[bytes]], Result]) -> tuple[Block, Result]:
        path = self._path_of(block)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                return block._replace(size=size, sha256=_digest(file, size).hex()), look(file)
        except OSError as error:
            raise UserError(
                f"{path}: can't be read ({error.strerror}), and belongs to the set.", everywhere=False
            ) from error

    def drop_if_damaged(self, i: int) -> bool:
        """Look at a block's every byte; a damaged one is removed, counted, and said."""
        path = self.path(i)
        if self.in_place:
            return False
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
                if size >= 0 and _digest(file, size) == file.read(_DIGEST_BYTES):
                    self._sound[i] = True
                    return False
        except FileNotFoundError:
            return False
        path.unlink(missing_ok=True)
        self.counts[DAMAGED] += 1
        log.warning("data       %s (%s) is damaged; it is fetched again", path, self.blocks[i].key)
        return True

    def _download(self, block: Block, part: IO[bytes]) -> Block:
        """The block's object, brought into the form of a block, its digest behind it. Returns the block with
        size and SHA-256 of the object."""
        expected = block.size if block.size >= 0 else self._store.size(block.key)
        self._make_room(expected + _DIGEST_BYTES, part)
        known = [block]

        def check() -> None:
            size = os.fstat(part.fileno()).st_size
            if block.size >= 0 and size != block.size:
                raise Damaged(f"it has {size} bytes, and should have {block.size}")
            part.seek(0)
            digest = _digest(part, size).hex()
            if block.sha256 and digest != block.sha256:
                raise Damaged("its SHA-256 is another one than the set's index says")
            known[0] = block._replace(size=size, sha256=digest)
            if self._convert is not None:
                part.seek(0)
                content = self._convert(part)
                part.seek(0)
                part.write(content)
                part.truncate()

        self._store.download(block.key, part, check)
        size = os.fstat(part.fileno()).st_size
        digest = bytes.fromhex(known[0].sha256)
        if self._convert is not None:
            part.seek(0)
            digest = _digest(part, size)
        part.seek(size)
        part.write(digest)
        part.flush()
        self.counts[FETCHED] += 1
        self.counts[BYTES] += size
        return known[0]

    @contextmanager
    def _part_of(self, path: Path) -> Iterator[IO[bytes] | None]:
        """A file to fetch into, held by this process alone; None where another one holds it. The system takes
        the lock back from a process that dies."""
        name = path.with_suffix(_PART)
        self._folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(name, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as part:
            if not _locked(part) or not _is(name, part):
                yield None
                return
            try:
                yield part
            finally:
                if _is(name, part):  # else it has become the block
                    name.unlink()

    def _make_room(self, size: int, part: IO[bytes]) -> None:
        """Remove what was not needed for longest, and take the room."""
        until = time.monotonic() + _LONGEST_WAIT_S
        while not self._took_room(size, part):
            if time.monotonic() > until:
                raise UserError(
                    f"data.source.cache_gb: {self._folder} may hold {self.limit / 1e9:.3g} GB, and all of it"
                    " is being fetched by others at once. Make it larger.",
                    everywhere=False,
                )
            time.sleep(0.05)

    def _took_room(self, size: int, part: IO[bytes]) -> bool:
        with (self._folder / "room.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            own = os.fstat(part.fileno())
            files = [(entry.stat(), entry.path) for entry in _entries(self._folder)]
            files = [(status, name) for status, name in files if not os.path.samestat(status, own)]
            used = sum(status.st_size for status, _ in files)
            for status, name in sorted(files, key=lambda file: file[0].st_mtime_ns):
                if used + size <= self.limit:
                    break
                if _removed(name):
                    used -= status.st_size
            if used + size > self.limit:
                return False
            take_room(part.fileno(), size)
        return True

    def _refused(self, error: OSError) -> UserError:
        full = error.errno in _NO_ROOM
        helps = "Make room, or data.source.cache_gb smaller" if full else "Name another folder"
        return UserError(
            f"data.source.cache={self._folder}: can't be written ({error.strerror}). {helps}.",
            everywhere=False,
        )


def _entries(folder: Path) -> "Iterator[os.DirEntry[str]]":
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((_FETCHED, _PART)):
                with suppress(FileNotFoundError):
                    entry.stat()
                    yield entry


def _removed(name: str) -> bool:
    """A block, or what a process that died was fetching."""
    if name.endswith(_FETCHED):
        Path(name).unlink(missing_ok=True)
        return True
    try:
        with open(name, "rb") as part:
            if not _locked(part) or not _is(Path(name), part):  # it is at work, or has become a block
                return False
            Path(name).unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    return True


def _locked(file: IO[bytes]) -> bool:
    """Whether it is now held by this process, until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(name: Path, file: IO[bytes]) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(name.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _digest(file: IO[bytes], size: int) -> bytes:
    """SHA-256 of the next ``size`` bytes."""
    digest = hashlib.sha256()
    while size and (piece := file.read(min(_PIECE, size))):
        digest.update(piece)
        size -= len(piece)
    return digest.digest()
