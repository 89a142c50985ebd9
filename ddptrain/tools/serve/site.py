"""The web server of ``serve``: a list, its rows as JSON, and reports. It reads no path of a request: what is
asked for is looked up among the runs that were seen."""

import json
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import final
from urllib.parse import parse_qs

from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean
from ddptrain.tools.report.markup import hash_of
from ddptrain.tools.serve.list_page import LIST_PAGE, SCRIPT, STYLE
from ddptrain.tools.serve.runs import Runs

_LOOKS_EVERY_S = 2.0
_WORDS = ("address", "port")


_OTHER_NAME = (
    "This server answers to localhost and 127.0.0.1 only. To use another name, start it with address=<this"
    " machine's address>."
)
_POLICY = (
    f"default-src 'none'; script-src {hash_of(SCRIPT)}; style-src {hash_of(STYLE)}; connect-src 'self';"
    " frame-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Of the list. A report has its own in it."""


def run(folder: Path, settings: Mapping[str, str]) -> None:
    """Serve until Ctrl-C. settings: ``address``, ``port``. Raises UserError."""
    for name, value in settings.items():
        if name not in _WORDS:
            raise UserError(f"{name}={value}: serve takes no such word.{did_you_mean(name, _WORDS)}")
    if not folder.is_dir():
        raise UserError(f"serve {folder}: there is no such folder.")
    address, port = settings.get("address", "127.0.0.1"), settings.get("port", "8765")
    if not address:
        raise UserError("address=: must be an address: 127.0.0.1, or 0.0.0.0 for all networks.")
    if not port.isdecimal() or int(port) > 65535:
        raise UserError(f"port={port}: must be 0 to 65535.")
    runs = Runs(folder.resolve())
    try:
        kind = _Ipv6Server if ":" in address else ThreadingHTTPServer
        server = kind((address, int(port)), _handler(runs, is_loopback(address)))
    except OSError as error:
        raise UserError(
            f"serve: can't listen at {address}:{port} ({error.strerror}). Name another one: port=<n>."
        ) from error
    server.daemon_threads = True
    over = threading.Event()
    threading.Thread(target=_follow, args=[runs, over], daemon=True).start()
    print(
        f"http://{address}:{server.server_port}/  shows the runs below {folder}; Ctrl-C ends it", flush=True
    )
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        over.set()
    finally:
        server.server_close()


def _follow(runs: Runs, over: threading.Event) -> None:
    while True:
        try:
            runs.look()
        except OSError as error:  # a folder went away under it: the next look finds what there is
            print(f"serve: {error}", file=sys.stderr, flush=True)
        if over.wait(_LOOKS_EVERY_S):
            return


@final
class _Ipv6Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6


def is_loopback(address: str) -> bool:
    """Whether nobody but this machine can reach it."""
    try:
        return address == "localhost" or ip_address(address).is_loopback
    except ValueError:
        return False


def _handler(runs: Runs, on_loopback: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 30

        def do_GET(self) -> None:
            with suppress(ConnectionError):  # the browser shows another page by now
                self._get()

        def _get(self) -> None:
            host = (self.headers.get("Host") or "").rsplit(":", 1)[0].strip("[]")
            if on_loopback and not is_loopback(host):
                # a page of another site that has given its own name this address
                self._answer(403, "text/plain", _OTHER_NAME)
                return
            path, _, query = self.path.partition("?")
            if path == "/":
                self._answer(200, "text/html", LIST_PAGE, _POLICY)
            elif path == "/runs":
                self._answer(200, "application/json", json.dumps(runs.rows()))
            elif path == "/page":
                text = runs.page(parse_qs(query).get("path", []))
                if text is None:
                    self._answer(404, "text/plain", "there is no such run")
                else:
                    self._answer(200, "text/html", text, "frame-ancestors 'self'")
            else:
                self._answer(404, "text/plain", "there is no such page")

        def _answer(self, status: int, kind: str, text: str, policy: str = "default-src 'none'") -> None:
            content = text.encode(errors="replace")
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Security-Policy", policy)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
