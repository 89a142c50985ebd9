"""A loopback server of CIFAR-10's archive, in small, that behaves well or badly."""

import contextlib
import hashlib
import http.server
import io
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ddptrain.data.images.cifar10 import ARCHIVE, Cifar10

BATCHES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
LABELS = [(number + i) % 10 for number in range(5) for i in range(4)]
"""Those of the training part of `small_archive`."""


def small_archive(padding: int = 0) -> bytes:
    """In CIFAR-10's layout: 4 training images a batch, 3 test images, and a readme of ``padding`` bytes that
    don't compress."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for number, name in enumerate(BATCHES):
            count = 3 if name.startswith("test") else 4
            records = (bytes([(number + i) % 10]) + bytes([10 * number + i]) * 3072 for i in range(count))
            add(tar, f"cifar-10-batches-bin/{name}", b"".join(records))
        noise = b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(padding // 32))
        add(tar, "cifar-10-batches-bin/readme.html", noise)
    return buffer.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@dataclass
class Served:
    """A running server: what it serves, how, and which requests it has had."""

    content: bytes
    way: str
    pause: float
    requests: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{ARCHIVE}"

    @property
    def source(self) -> Cifar10:
        return Cifar10(self.url, hashlib.sha256(self.content).hexdigest())


@contextmanager
def served(content: bytes, way: str = "right", pause: float = 0.0) -> Iterator[Served]:
    """Serve ``content``.

    way: right; slow (a pause after each 4 KiB); cut (half of what its header says); other (as many other
    bytes); missing (404); endless; silent (accepts, answers nothing); dripping (a byte a pause); dripping
    headers.
    """
    state = Served(content, way, pause)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.requests.append(self.path)
            with contextlib.suppress(OSError):  # the client has had enough
                _answer(self, state)

        def log_message(self, *_: Any) -> None:
            pass

    with _Quiet(("127.0.0.1", 0), Handler) as server:
        state.port = server.server_port
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield state
        state.way = "over"
        server.shutdown()


class _Quiet(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        pass


def _answer(to: http.server.BaseHTTPRequestHandler, state: Served) -> None:
    way, content = state.way, state.content
    if way == "missing":
        to.send_error(404)
        return
    if way == "silent":
        while state.way == way:
            time.sleep(0.05)
        return
    if way == "dripping headers":
        to.wfile.write(b"HTTP/1.0 200 OK\r\n")
        while state.way == way:
            to.wfile.write(b"X")
            time.sleep(state.pause)
        return
    to.send_response(200)
    if way != "endless":
        to.send_header("Content-Length", str(len(content)))
    to.end_headers()
    if way == "other":
        content = bytes(len(content))
    if way == "cut":
        content = content[: len(content) // 2]
    step = 1 if way == "dripping" else 4096
    while True:
        for start in range(0, len(content), step):
            to.wfile.write(content[start : start + step])
            if state.pause:
                time.sleep(state.pause)
            if state.way == "over":
                return
        if way != "endless":
            return
