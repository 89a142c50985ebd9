"""A run's end is told to a web address, whatever ends it: by a real server on this machine."""

import json
import os
import re
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
from running import Job, faulty_words
from shell import ddptrain

from ddptrain.api.observer import End, Result, RunInfo, Start, Times
from ddptrain.api.timing import Timing
from ddptrain.errors import UserError
from ddptrain.observe.webhook import Webhook
from ddptrain.observe.webhook_post import message
from ddptrain.text import SAVED

RUN = "recipe=cnn_digits device=cpu model.width=8 observers=[console,jsonl,webhook] run.dir=run log.every=1"

VARIABLE = "DDPTRAIN_WEBHOOK_URL"


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


def ended(url: str, folder: Path, outcome: str = "done", accuracy: float = 0.5, why: str = "") -> None:
    """A run's first and last event."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(VARIABLE, url)
        observer = Webhook()
    last = f"2026-11-26 15:00:00,000 ended      {why}\n" if why else ""
    (folder / "log.txt").write_text("".join(f"line {i}\n" for i in range(30)) + last)
    run = RunInfo(folder, {"recipe": "mine"})
    observer.start(Start(0, 40, False, None, run))
    result = Result(outcome, {"accuracy": accuracy, "of/one": 0.1}, {"accuracy": 0.75, "step": 20}, True)
    observer.end(End(40, 40, result, Times(Timing(), [], 65.0, 0.0)))


@pytest.mark.parametrize("outcome", ["diverged", "failed"])
def test_a_failure_is_told_with_its_reason(receiver: Receiver, tmp_path: Path, outcome: str) -> None:
    ended(receiver.url, tmp_path, outcome, why="RuntimeError: no, not this")
    told = receiver.received()
    assert told["text"].endswith(
        f"{outcome} at step 40 of 40 after 1:05: accuracy 0.5: RuntimeError: no, not this"
    )
    assert (told["outcome"], told["why"]) == (outcome, "RuntimeError: no, not this")


HUNG = "2026-11-26 15:00:00,000 ended      it stood still.\nIts stack:\n  File one\n"
STEP = "2026-11-26 15:00:00,000 step 3/40  epoch 0.1\n"


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (STEP + HUNG, "it stood still.\nIts stack:\n  File one"),
        (HUNG + STEP, ""),
        (STEP, ""),
        ("", ""),
        ("neither\n", ""),
    ],
)  # fmt: skip
def test_last_words_are_those_of_the_log(log: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(log)
    told = message({"run": str(tmp_path), "recipe": "mine", "host": "here", "steps": 40}, None)
    assert told["why"] == why
    assert told["text"].endswith(f" ended: {why}") if why else " without a last message" in told["text"]


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "code", "why"),
    [
        ("sleep", 76, r"(?s)stood still for hang_timeout=3 s.*rank {rank} .*time\.sleep"),
        ("raise", 1, "ZeroDivisionError: this recipe was told to fail"),
    ],
)
def test_what_any_rank_has_said_last_is_told(
    receiver: Receiver, tmp_path: Path, fault: str, code: int, why: str, rank: int
) -> None:
    words = [f"data.fault={fault}", "data.step=12", f"data.rank={rank}", "hang_timeout=3"]
    observers = "observers=[console,jsonl,webhook]"
    job = Job(faulty_words(*words, observers), tmp_path, 2, variables={VARIABLE: receiver.url})
    assert job.wait(90) == code, job.text[-3000:]
    told = receiver.received()
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.search(why.format(rank=rank), log)
    assert len(re.findall(" ended      ", log)) == 1
    assert re.search(why.format(rank=rank), told["why"])


@pytest.mark.parametrize("outcome", ["done", "stopped early"])
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


@pytest.mark.parametrize(
    ("why", "tried"), [(f"{SAVED}; figures or trackers were not done.", 0), ("it stood still.", 1)]
)
def test_nor_is_one_that_came_while_figures_were_drawn(
    receiver: Receiver, tmp_path: Path, why: str, tried: int
) -> None:
    (tmp_path / "log.txt").write_text(f"2026-11-26 15:00:00,000 ended      {why}\n")
    run = {"run": str(tmp_path), "recipe": "mine", "host": "here", "steps": 40}
    begun = json.dumps({"url": receiver.url, "pid": os.getpid(), "run": run})
    process = [sys.executable, "-m", "ddptrain.observe.webhook_post"]
    subprocess.run(process, input=f"{begun}\n", text=True, check=True, timeout=60)
    assert receiver.tried == tried


def test_what_is_not_finite_is_json(receiver: Receiver, tmp_path: Path) -> None:
    ended(receiver.url, tmp_path, "done", float("nan"))
    told = receiver.received()
    assert told["metrics"] == {"accuracy": None, "of/one": 0.1}
    assert told["text"].endswith("accuracy nan")


@pytest.mark.faults
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


@pytest.mark.faults
def test_nobody_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ended("http://127.0.0.1:9/secret", tmp_path)
    assert "was not told of the end: 127.0.0.1: " in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "", "ftp://host/x", "host/x", "http://", "file:///etc/passwd", "http://[bad", "http://host:port/x",
        "http://host/a b", "http://host/\u00e9", "https://user:password@host/x",
    ],
)  # fmt: skip
def test_other_addresses_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, url)
    with pytest.raises(UserError, match=VARIABLE) as refused:
        Webhook()
    assert "password" not in str(refused.value)


def test_other_ranks_need_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    Webhook()


def test_a_redirect_is_an_error(receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Followed, it would lose the content."""
    receiver.answers = [301]
    ended(receiver.url, tmp_path)
    assert receiver.messages == []
    assert "127.0.0.1 answers 301" in caplog.text


@pytest.mark.parametrize("tells", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_process_that_outlives_the_run_delays_nothing(
    receiver: Receiver, tmp_path: Path, tells: bool
) -> None:
    """One that was forked holds the run's end of the pipe."""
    program = """
import os, sys, time
from pathlib import Path
from test_webhook import ended, Webhook
from ddptrain.observe import webhook

def tell(self, facts, real=webhook.Webhook._tell):
    real(self, facts)
    if "url" in facts:
        child = os.fork()
        if child == 0:
            os.close(1)
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
        if sys.argv[2] == "False":
            os._exit(1)

webhook.Webhook._tell = tell
ended(os.environ["DDPTRAIN_WEBHOOK_URL"], Path(sys.argv[1]))
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, VARIABLE: receiver.url, "PYTHONPATH": path}
    line = [sys.executable, "-c", program, str(tmp_path), str(tells)]
    began = time.monotonic()
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, timeout=100)
    told = receiver.received()
    assert told["outcome"] == ("done" if tells else "gone")
    assert time.monotonic() - began < 40
    os.kill(int(done.stdout), signal.SIGKILL)


def test_a_run_tells_and_keeps_the_address_to_itself(receiver: Receiver, tmp_path: Path) -> None:
    done = ddptrain(tmp_path, f"{RUN} train.steps=3", **{VARIABLE: receiver.url})
    assert done.code == 0, done.err
    told = receiver.received()
    assert (told["outcome"], told["step"], told["recipe"]) == ("done", 3, "cnn_digits")
    assert told["metrics"]["accuracy"] > 0
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"/secret" not in path.read_bytes(), path


def test_a_killed_run_is_told_of(receiver: Receiver, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "ddptrain", *f"{RUN} train.epochs=1000".split()]
    environment = {**os.environ, VARIABLE: receiver.url}
    run = subprocess.Popen(line, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    for printed in run.stderr:
        if printed.startswith("step 3/"):
            break
    run.send_signal(signal.SIGKILL)
    told = receiver.received()
    run.wait()
    run.stderr.close()
    assert told["outcome"] == "gone"
    assert "ended without a last message: it was killed" in told["text"]
    assert any("step " in line for line in told["log"])
