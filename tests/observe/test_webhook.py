"""A run's end is told to a web address, whatever ends it: by a real server on this machine."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from shell import ddptrain

from ddptrain.api.observer import End, Result, RunInfo, Start, Times
from ddptrain.api.timing import Timing
from ddptrain.errors import UserError
from ddptrain.observe.webhook import Webhook

RUN = "recipe=cnn_digits device=cpu model.width=8 observers=[console,jsonl,webhook] run.dir=run log.every=1"


class Receiver:
    """Keeps what is posted. answers: codes, one after the other, then 200."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.tried = 0
        self.messages: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                code = outer.answers.pop(0) if outer.answers else 200
                outer.tried += 1
                if code == 200:
                    outer.messages.append(json.loads(body))
                self.send_response(code)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/secret"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def received(self) -> dict[str, Any]:
        """The one message, which may still be on its way."""
        until = time.monotonic() + 30
        while not self.messages and time.monotonic() < until:
            time.sleep(0.05)
        [message] = self.messages
        return message

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def ended(url: str, folder: Path, outcome: str = "done", accuracy: float = 0.5) -> None:
    """A run's first and last event."""
    observer = Webhook(url)
    (folder / "log.txt").write_text("".join(f"line {i}\n" for i in range(30)))
    run = RunInfo(folder, {"recipe": "mine"})
    observer.start(Start(0, 40, False, None, run))
    result = Result(outcome, {"accuracy": accuracy, "of/one": 0.1}, {"accuracy": 0.75, "step": 20}, True)
    observer.end(End(40, 40, result, Times(Timing(), [], 65.0, 0.0)))


@pytest.mark.parametrize("outcome", ["done", "stopped early", "diverged", "failed"])
def test_an_end_is_told(receiver: Receiver, tmp_path: Path, outcome: str) -> None:
    ended(receiver.url, tmp_path, outcome)
    told = receiver.received()
    assert told["text"].endswith(f"({tmp_path}): {outcome} at step 40 of 40 after 1:05: accuracy 0.5")
    assert told["log"] == [f"line {i}" for i in range(20, 30)]
    expected = {"recipe": "mine", "outcome": outcome, "step": 40, "steps": 40, "seconds": 65}
    assert {name: told[name] for name in expected} == expected
    assert told["best"] == {"accuracy": 0.75, "step": 20}


def test_a_stop_is_none(receiver: Receiver, tmp_path: Path) -> None:
    ended(receiver.url, tmp_path, "stopped")
    assert receiver.tried == 0


def test_what_is_not_finite_is_json(receiver: Receiver, tmp_path: Path) -> None:
    ended(receiver.url, tmp_path, "diverged", float("nan"))
    told = receiver.received()
    assert told["metrics"] == {"accuracy": None, "of/one": 0.1}
    assert told["text"].endswith("accuracy nan")


def test_a_server_that_is_busy_is_asked_again(receiver: Receiver, tmp_path: Path) -> None:
    receiver.answers = [503, 429]
    ended(receiver.url, tmp_path)
    assert receiver.received()["outcome"] == "done"
    assert receiver.tried == 3


def test_what_it_refuses_is_said_without_the_address(
    receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [404]
    ended(receiver.url, tmp_path)
    assert receiver.tried == 1
    assert "webhook    was not told of the end: 127.0.0.1 answers 404" in caplog.text
    assert "secret" not in caplog.text


def test_nobody_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ended("http://127.0.0.1:9/secret", tmp_path)
    assert "was not told of the end: 127.0.0.1: " in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("url", ["ftp://host/x", "host/x", "http://", "file:///etc/passwd"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"observers\.webhook\.url: must be an address with http"):
        Webhook(url)


def test_without_an_address_it_says_where_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDPTRAIN_WEBHOOK_URL", raising=False)
    with pytest.raises(UserError, match="needs it, or DDPTRAIN_WEBHOOK_URL"):
        Webhook()


def test_a_run_tells_and_keeps_the_address_to_itself(receiver: Receiver, tmp_path: Path) -> None:
    done = ddptrain(tmp_path, f"{RUN} train.steps=3", DDPTRAIN_WEBHOOK_URL=receiver.url)
    assert done.code == 0, done.err
    told = receiver.received()
    assert (told["outcome"], told["step"], told["recipe"]) == ("done", 3, "cnn_digits")
    assert told["metrics"]["accuracy"] > 0
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"/secret" not in path.read_bytes(), path


def test_a_killed_run_is_told_of(receiver: Receiver, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "ddptrain", *f"{RUN} train.epochs=1000".split()]
    environment = {**os.environ, "DDPTRAIN_WEBHOOK_URL": receiver.url}
    run = subprocess.Popen(line, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    for printed in run.stderr:
        if printed.startswith("step 3/"):
            break
    run.send_signal(signal.SIGKILL)
    told = receiver.received()
    run.wait()
    run.stderr.close()
    assert told["outcome"] == "killed"
    assert "was killed, or ended because it hung" in told["text"]
    assert any("step 3/" in line for line in told["log"])
