"""A lock on a folder with one writer; the system releases it when the process ends."""

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from ddptrain.errors import UserError

log = logging.getLogger(__name__)

LOCK = ".lock"
_PATIENCE_S = 5.0
"""How long to try: rank 0 of a restarted job may still be ending."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_held: list[int] = []
"""Open files that this process has locked."""


def lock_folder(folder: Path, key: str = "run.dir", does: str = "is training") -> None:
    """Make this process the only writer of a folder, until it ends. Readers need no lock.

    key: the config key of the folder. does: what a process with this lock does.
    Raises UserError if another process holds it, or the folder can't be written.
    """
    until = time.monotonic() + _PATIENCE_S
    try:
        while not _lock(folder / LOCK):
            if time.monotonic() > until:
                raise _in_use(folder, key, does)
            time.sleep(0.1)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise unwritable(folder, error, key) from error
        why = error.strerror
        log.warning("%s: its file system does not support locks (%s); start no second run in it", folder, why)


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


def unwritable(folder: Path, error: OSError, key: str = "run.dir") -> UserError:
    """The error for a folder that can't be written."""
    return UserError(
        f"{key}={folder}: can't be written ({error.strerror}). Make it writable, or name another"
        f" folder: {key}=..."
    )


def _lock(path: Path) -> bool:
    """Take the lock, unless another process has it, and write this process into it."""
    file, taken = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), False
    try:
        if any(os.path.samestat(os.fstat(file), os.fstat(held)) for held in _held):
            return True
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), path.stat()):  # else the previous owner has renamed its folder
            os.ftruncate(file, 0)
            os.write(file, f"{socket.gethostname()} {os.getpid()}".encode())
            _held.append(file)
            taken = True
    except BlockingIOError:
        pass
    finally:
        if not taken:
            os.close(file)
    return taken


def _in_use(folder: Path, key: str, does: str) -> UserError:
    host, _, process = (folder / LOCK).read_text(errors="replace").partition(" ")
    who = f"process {process} on {host}" if process else "another process"
    return UserError(
        f"{key}={folder}: {who} {does} in it, and it has one writer. Stop that one or wait for its"
        f" end, or name another folder: {key}=..."
    )


def _forget_locks() -> None:
    """Close the lock files in a forked child: a lock is held until the last copy of its file is closed."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_locks)
