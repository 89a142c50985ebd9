"""One process at a time at a piece of work, among all that can see a file."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def alone(lock: Path) -> Iterator[None]:
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
