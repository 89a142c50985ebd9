"""A lock on a folder with one writer; the system releases it when the process ends."""

import errno
import fcntl
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from ddptrain.errors import UserError

log = logging.getLogger(__name__)

LOCK = ".lock"
_PATIENCE_S = 5.0
"""How long to try: rank 0 of a restarted job may still be ending."""
_LEASE_S = 120.0
"""The same, where the owner is on another host: a server of NFSv4 keeps a dead host's locks for 90 s."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Of this machine since it was started; a pod of Kubernetes has its name again on another one."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class _Owner(NamedTuple):
    """Who holds a lock, as its file says; empty where it is not known."""

    host: str = ""
    process: str = ""
    boot: str = ""

    @property
    def is_elsewhere(self) -> bool:
        boot = _boot()
        return self.boot != boot if boot and self.boot else self.host not in ("", socket.gethostname())


class Lost(NamedTuple):
    """What has become of a locked folder."""

    why: str
    """What follows its name in a sentence."""
    now: Path | None
    """Where it is, still locked; None where that is not known."""
    beside: Path
    """A new name beside the one that it had, for what must not be lost with it."""


@dataclass
class _Held:
    file: int
    """The open lock file."""
    inside: int
    """The open folder: as long as it is held, no other one has its number."""
    place: Path
    """The folder, absolute."""
    owner: str
    """What this process has written into the lock file; the host may get another name."""
    lost: Lost | None = None


_held: dict[Path, _Held] = {}
"""What this process has locked, by the folder as it was named."""


def lock_folder(folder: Path, key: str = "run.dir", does: str = "is training") -> None:
    """Make this process the only writer of a folder, until it ends or unlocks it. Readers need no lock.

    key: the config key of the folder. does: what a process with this lock does.
    Raises UserError if another process holds it, or the folder can't be written.
    """
    began, warned = time.monotonic(), False
    try:
        while not _lock(folder):
            owner = _owner(folder)
            waited = time.monotonic() - began
            if waited > (_LEASE_S if owner.is_elsewhere else _PATIENCE_S):
                raise _in_use(folder, key, does)
            if waited > _PATIENCE_S and not warned:
                log.warning("%s: locked by %s; if that host is gone, its lock ends soon", folder, owner.host)
                warned = True
            time.sleep(0.1)
    except OSError as error:
        raise unwritable(folder, error, key) from error


def unlock_folder(folder: Path) -> None:
    """End what `lock_folder` began; nothing where another process holds the lock."""
    if folder in _held:
        _close(_held.pop(folder))


def lost(folder: Path) -> Lost | None:
    """What has become of a folder that this process has locked, where it may not write there any more; None
    while it may, and for a folder that it has never locked. Three system calls.

    Once lost, a folder stays so: what was left out meanwhile is missing in it. What has become of it is asked
    each time, for it may be found half deleted.
    """
    held = _held.get(folder)
    if held is None:
        return None
    current = _become_of(folder, held)
    if current is not None:
        held.lost = current if held.lost is None else current._replace(beside=held.lost.beside)
    return held.lost


def was_taken(path: Path, file: int) -> bool:
    """Whether somebody has deleted an open file of a locked folder, or put another in its place, so that it
    has to be put back: not where the folder itself is lost, for what is there belongs to another run."""
    try:
        return not _is_at(path, file) and lost(path.parent) is None
    except OSError:  # the disk fails: the next write tells of it
        return False


def is_locked(folder: Path) -> bool:
    """Whether a living process holds the folder's lock."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def lock_file(file: int | IO[Any], how: int) -> None:
    """As `fcntl.flock`, and nothing on a file system without locks. Raises BlockingIOError."""
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def unwritable(folder: Path, error: OSError, key: str = "run.dir") -> UserError:
    """The error for a folder that can't be written."""
    if folder.is_file():
        return UserError(f"{key}={folder}: is a file. Name a folder: {key}=...")
    return UserError(
        f"{key}={folder}: can't be written ({error.strerror}). Make it writable, or name another"
        f" folder: {key}=..."
    )


def _lock(folder: Path) -> bool:
    """Take the lock, unless another process has it, and write this process into it."""
    path = folder / LOCK
    file, taken = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), False
    try:
        if any(os.path.samestat(os.fstat(file), os.fstat(held.file)) for held in _held.values()):
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning(
                "%s: its file system does not support locks (%s); start no second run in it",
                folder, error.strerror,
            )  # fmt: skip
        if os.path.samestat(os.fstat(file), path.stat()):  # else the previous owner has renamed its folder
            os.ftruncate(file, 0)
            owner = f"{socket.gethostname()} {os.getpid()} {_boot()}".rstrip()
            os.pwrite(file, owner.encode(), 0)
            inside = os.open(folder, os.O_RDONLY)
            if folder in _held:  # renamed since: nothing is written there any more
                _close(_held[folder])
            _held[folder] = _Held(file, inside, folder.absolute(), owner)
            taken = True
    finally:
        if not taken:
            os.close(file)
    return taken


def _become_of(folder: Path, held: _Held) -> Lost | None:
    """Compares the lock file with what its path names now: that tells a folder that was deleted, moved or
    replaced, and on a file system without locks a second process, which has written itself into it."""
    beside = held.place.with_name(f"{held.place.name}.lost-{time.strftime('%Y-%m-%d_%H-%M-%S')}")
    try:
        if _is_at(folder / LOCK, held.file):
            writer = os.pread(held.file, 1000, 0).decode(errors="replace")
            if writer == held.owner:
                return None
            return Lost(f"was taken by {_named(_as_owner(writer))}", None, beside)
    except OSError:
        return None  # the disk fails: the next write tells of it
    now = _place_of(held.inside)
    if now is not None and now != held.place.resolve():
        return Lost(f"is {now} now", now if _is_at(now / LOCK, held.file) else None, beside)
    if not _is_at(folder, held.inside):
        return Lost("was replaced" if os.path.lexists(folder) else "was deleted", None, beside)
    return Lost(f"its lock file ({LOCK}) was deleted, so that another process may write there", None, beside)


def _is_at(path: Path, file: int) -> bool:
    """Whether an open file, or folder, is what its path names. Raises OSError where the disk fails."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return False


def _place_of(inside: int) -> Path | None:
    """Where an open folder is; None where it was deleted, or the system does not tell."""
    try:
        path = Path(os.readlink(f"/proc/self/fd/{inside}"))
        return path if os.path.samestat(path.stat(), os.fstat(inside)) else None
    except OSError:
        return None


def _close(held: _Held) -> None:
    os.close(held.file)
    os.close(held.inside)


def _owner(folder: Path) -> _Owner:
    try:
        return _as_owner((folder / LOCK).read_text(errors="replace"))
    except OSError:  # it is gone with its owner
        return _Owner()


def _as_owner(text: str) -> _Owner:
    return _Owner(*text.split()[:3])


def _boot() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _named(owner: _Owner) -> str:
    return f"process {owner.process} on {owner.host}" if owner.process else "another process"


def _in_use(folder: Path, key: str, does: str) -> UserError:
    owner = _owner(folder)
    gone = f" If {owner.host} is gone, delete {folder / LOCK}." if owner.is_elsewhere else ""
    return UserError(
        f"{key}={folder}: {_named(owner)} {does} in it, and it has one writer. Stop that one or wait for its"
        f" end, or name another folder: {key}=...{gone}"
    )


def _forget_locks() -> None:
    """Close the lock files in a forked child: a lock is held until the last copy of its file is closed."""
    while _held:
        _close(_held.popitem()[1])


os.register_at_fork(after_in_child=_forget_locks)
