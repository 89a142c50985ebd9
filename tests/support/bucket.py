"""A real S3 server on loopback (moto's), with a door before it that can be slow, lie, or be shut."""

import http.client
import http.server
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BUCKET = "sets"
KEYS = {
    "AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "never-in-a-log", "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}  # fmt: skip


@dataclass
class Answer:
    """What the door says in the server's place. body: None hands on the server's own. cut: after so many
    bytes the line goes dead. wait: seconds until a write is looked at."""

    status: int = 200
    body: bytes | None = None
    cut: int | None = None
    wait: float = 0.0


Fault = Callable[[str, int], Answer | None]
"""By an object's path and which request of it this is, from 0; None: nothing is wrong."""


@dataclass
class Door:
    """fault: see above, of what is read; write_fault: of what is written or deleted."""

    port: int = 0
    fault: Fault = lambda path, number: None
    write_fault: Fault = lambda path, number: None
    asked: Counter[str] = field(default_factory=Counter)
    """Requests by path."""
    lock: Any = field(default_factory=threading.Lock)

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment of who comes by it."""
        return {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}


@contextmanager
def bucket() -> Iterator[Door]:
    """An empty bucket, `BUCKET`, and the door before it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    _, inner = server.get_host_and_port()
    door = Door()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            with door.lock:
                number, door.asked[path] = door.asked[path], door.asked[path] + 1
            answer = door.fault(path, number) or Answer()
            if answer.status == 0:  # the line goes dead
                self.close_connection = True
                return
            status, headers, content = answer.status, {}, answer.body
            if content is None and status == 200:
                connection = http.client.HTTPConnection("127.0.0.1", inner)
                connection.request("GET", self.path, headers=dict(self.headers))
                reply = connection.getresponse()
                status, content, headers = reply.status, reply.read(), dict(reply.headers)
            content = content or b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            for name in ("ETag", "Last-Modified"):
                if name in headers:
                    self.send_header(name, headers[name])
            self.end_headers()
            if answer.cut is not None:
                content, self.close_connection = content[: answer.cut], True
            self.wfile.write(content)

        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            with door.lock:
                number, door.asked[f"write {path}"] = (
                    door.asked[f"write {path}"],
                    door.asked[f"write {path}"] + 1,
                )
            answer, etag = door.write_fault(path, number) or Answer(), None
            time.sleep(answer.wait)
            if answer.status == 0:
                self.close_connection = True
                return
            if answer.status == 200 and answer.body is None:
                connection = http.client.HTTPConnection("127.0.0.1", inner)
                connection.request(self.command, self.path, content, dict(self.headers))
                reply = connection.getresponse()
                answer, etag = Answer(reply.status, reply.read()), reply.getheader("ETag")
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(answer.body or b"")))
            if etag:
                self.send_header("ETag", etag)
            self.end_headers()
            self.wfile.write(answer.body or b"")

        do_POST = do_DELETE = do_PUT  # noqa: N815 # the server's names

        def do_HEAD(self) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", inner)
            connection.request("HEAD", self.path, headers=dict(self.headers))
            reply = connection.getresponse()
            self.send_response(reply.status)
            for name in ("Content-Length", "ETag", "Last-Modified"):
                if name in reply.headers:
                    self.send_header(name, reply.headers[name])
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as outer:
        outer.daemon_threads = True
        door.port = outer.server_address[1]
        threading.Thread(target=outer.serve_forever, daemon=True).start()
        _client(inner).create_bucket(Bucket=BUCKET)
        door.upload = lambda folder, prefix: _upload(inner, folder, prefix)  # type: ignore[attr-defined]
        try:
            yield door
        finally:
            outer.shutdown()
            server.stop()


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """An empty bucket's, of which this process' environment knows."""
    with bucket() as opened:
        for name, value in opened.variables.items():
            monkeypatch.setenv(name, value)
        yield opened


def upload(door: Door, folder: Path, prefix: str) -> str:
    """All files of a folder; returns their address."""
    door.upload(folder, prefix)  # type: ignore[attr-defined]
    return f"s3://{BUCKET}/{prefix}"


def _upload(port: int, folder: Path, prefix: str) -> None:
    client = _client(port)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            client.put_object(
                Bucket=BUCKET,
                Key=f"{prefix}/{file.relative_to(folder)}",
                Body=file.read_bytes(),
                ACL="public-read",
            )


def _client(port: int) -> Any:
    import boto3

    return boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1",
        aws_access_key_id="test-key", aws_secret_access_key="never-in-a-log",
    )  # fmt: skip
