"""One file from the network: whole and right, or absent; once, however many jobs start on a node."""

import hashlib
import http.client
import logging
import os
import queue
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddptrain.data.disk import exclusive_lock, flush_folder
from ddptrain.errors import UserError

log = logging.getLogger(__name__)

_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """What a server may do before it is given up.

    largest: bytes of the file. window, least: seconds in which at least so many bytes must come. A minute
    spans what a busy mirror or a lost packet takes; 64 KiB in it, 1 KB/s, is below any line on which a data
    set could be waited for.
    """

    largest: int
    window: float = 60.0
    least: int = 64 * 1024


def sha256_of(path: Path) -> str:
    """The hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(url: str, sha256: str, target: Path, limits: DownloadLimits) -> None:
    """Bring ``target`` from ``url`` unless it is there, or comes while another process downloads it.

    It is written aside as ``.<name>.part``, checked, flushed and renamed; a part that a killed process has
    left is written anew. Raises OSError and its like where network or disk refuse, UserError where what
    comes is not what it must be.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("a download starts with http:// or https://")
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(target.with_name(f".{target.name}.lock")):
        if target.exists():
            return
        part = target.with_name(f".{target.name}.part")
        try:
            size, digest = _write(part, url, limits)
            if digest != sha256:
                raise UserError(
                    f"{url}: what it sent ({size:,} bytes) is cut short or another file: its SHA-256 is not"
                    f" {sha256}. Start again, or put {target.name} into {target.parent}/ yourself."
                )
            part.rename(target)
            flush_folder(target.parent)
        finally:
            part.unlink(missing_ok=True)


def _write(part: Path, url: str, limits: DownloadLimits) -> tuple[int, str]:
    """Write what comes, down to the disk; its bytes and their SHA-256."""
    part.unlink(missing_ok=True)
    digest, size = hashlib.sha256(), 0
    with part.open("xb") as file:  # x: never through a link that lies there
        for block in _blocks(url, limits):
            size += len(block)
            if size > limits.largest:
                raise UserError(f"{url}: sends more than {limits.largest:,} bytes; it is another file.")
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _blocks(url: str, limits: DownloadLimits) -> Iterator[bytes]:
    """What the server sends, as it comes. Raises TimeoutError where too little comes.

    Read in a thread: a server that drips byte by byte, in its headers too, lets no blocking read time out.
    """
    arriving: queue.Queue[bytes | Exception] = queue.Queue(maxsize=16)

    def pull() -> None:
        try:
            with urllib.request.urlopen(url, timeout=limits.window) as reply:
                while block := reply.read1(_BLOCK):
                    arriving.put(block)
            arriving.put(b"")
        except (OSError, ValueError, http.client.HTTPException) as error:
            arriving.put(error)

    threading.Thread(target=pull, daemon=True, name=f"download of {url}").start()
    ends, got = time.monotonic() + limits.window, 0
    while True:
        if time.monotonic() >= ends:
            if got < limits.least:
                raise TimeoutError(f"only {got:,} bytes came in {limits.window:g} seconds")
            ends, got = time.monotonic() + limits.window, 0
        try:
            block = arriving.get(timeout=max(0.01, ends - time.monotonic()))
        except queue.Empty:
            continue
        if isinstance(block, Exception):
            raise block
        if not block:
            return
        got += len(block)
        yield block
