"""A headless Chromium, of Debian's packages where none is installed, driven through its DevTools protocol."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from debian import unpack

_PACKAGE = "chromium-headless-shell"
_NAMES = (_PACKAGE, "chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


@dataclass
class Tab:
    """One page, and all that it has complained of and asked for."""

    _pipe: "_Pipe"
    _session: str
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings on its console, exceptions, what its policy has refused."""
    requests: list[str] = field(default_factory=list)
    """Addresses, data: ones left out."""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._pipe.call(method, params, self._session, self._heed)

    def open(self, url: str, timeout: float = 60) -> float:
        """Load it whole; the seconds until its load event, by its own clock."""
        return self._loaded_by("Page.navigate", timeout, url=url)

    def reload(self, timeout: float = 60) -> float:
        return self._loaded_by("Page.reload", timeout)

    def _loaded_by(self, method: str, timeout: float, **params: Any) -> float:
        self._pipe.loaded.discard(self._session)
        self.call(method, **params)
        deadline = time.monotonic() + timeout
        while self._session not in self._pipe.loaded:
            self._pipe.read(deadline, self._heed)
        timing = "const t = performance.getEntriesByType('navigation')[0]; t.loadEventStart / 1000"
        return float(self.evaluate(timing))

    def evaluate(self, script: str) -> Any:
        """The value of the script's last expression, once it is there."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, timeout: float = 60) -> Any:
        """Until a script's value is true; returns it."""
        deadline = time.monotonic() + timeout
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, f"not within {timeout} s: {script}\n{self.text()[:3000]}"
            time.sleep(0.2)
        return value

    def text(self) -> str:
        """What can be read on the page, inside of its web components too."""
        return str(self.evaluate(_ALL_TEXT))

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """As PNG; ``whole``: all of the page, not only what fits into the window."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _heed(self, event: dict[str, Any]) -> None:
        if event.get("sessionId") != self._session:
            return
        params = event["params"]
        match event["method"]:
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith("data:"):
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"]["text"])


_ALL_TEXT = """(() => {
  const hosts = (node) => [node, ...node.querySelectorAll("*")].filter((inner) => inner.shadowRoot);
  const inside = (host) => [...host.shadowRoot.children].filter((child) => child.localName !== "style");
  const read = (node) => [node.innerText || "", ...hosts(node).flatMap(inside).map(read)].join("\\n");
  return read(document.body);
})()"""


class _Pipe:
    """Messages to the browser and from it, each ended by a zero."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer = b""
        self._number = 0
        self.loaded: set[str] = set()
        """Sessions whose page has loaded."""

    def call(
        self, method: str, params: dict[str, Any], session: str = "", heed: Any = None
    ) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        left = json.dumps(message).encode() + b"\0"
        while left:
            left = left[os.write(self._write, left) :]
        deadline = time.monotonic() + 60
        while (answer := self.read(deadline, heed)).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def read(self, deadline: float, heed: Any = None) -> dict[str, Any]:
        """The next message."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        if message.get("method") == "Page.loadEventFired":
            self.loaded.add(message["sessionId"])
        if "method" in message and heed is not None:
            heed(message)
        return message


class Browser:
    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe

    @contextlib.contextmanager
    def tab(self, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Tab]:
        target = self._pipe.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._pipe.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        tab = Tab(self._pipe, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height, dark)
        try:
            yield tab
        finally:
            self._pipe.call("Target.closeTarget", {"targetId": target})


@contextlib.contextmanager
def headless_chromium(folder: Path) -> Iterator[Browser]:
    """Bring one up, from packages unpacked into ``folder`` where none is installed. Raises CannotRun."""
    program, libraries = _program(folder)
    (folder / "home").mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, "HOME": str(folder / "home"), "LD_LIBRARY_PATH": ":".join(map(str, libraries))}
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    # it reads from 3 and writes to 4
    start = f'exec "$@" 3<&{to_read} 4>&{from_write}'
    words = [program, *_OPTIONS, f"--user-data-dir={folder / 'profile'}"]
    with (folder / "browser.log").open("wb") as said:
        process = subprocess.Popen(
            ["bash", "-c", start, "bash", *words],
            pass_fds=(to_read, from_write),
            env=variables,
            stdout=said,
            stderr=said,
        )
    os.close(to_read)
    os.close(from_write)
    pipe = _Pipe(to_write, from_read)
    try:
        yield Browser(pipe)
    finally:
        with contextlib.suppress(AssertionError, OSError):
            pipe.call("Browser.close", {})
        os.close(to_write)
        os.close(from_read)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _program(folder: Path) -> tuple[str, list[Path]]:
    """The browser, and where the libraries lie that came with it."""
    installed = [path for path in map(shutil.which, _NAMES) if path]
    if installed:
        return installed[0], []
    root = folder / "root"
    if not root.exists():
        root = unpack([_PACKAGE], folder)
    libraries = [path for path in root.glob("usr/lib/*-linux-gnu*") if path.is_dir()]
    libraries += [path for library in libraries for path in library.iterdir() if path.is_dir()]
    return str(root / "usr/lib/chromium" / _PACKAGE), libraries
