"""A mirrored run whose node is lost at any moment of training and upload, and that goes on where nothing of
it is: the same bits as undisturbed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from bucket import BUCKET, bucket
from compare import assert_same
from shell import RANK_VARIABLES

from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.saved_checkpoint import read, unpack

WORDS = (
    "recipe=cnn_digits device=cpu model.width=8 train.steps=1500 checkpoint.every=100 log.every=50"
    " train.eval_every=300 observers=[console,jsonl] run.dir=run"
)
KILLS = 5


def start(home: Path, address: str) -> "subprocess.Popen[str]":
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    line = [sys.executable, "-m", "ddptrain", *WORDS.split(), f"run.mirror={address}"]
    return subprocess.Popen(
        line, cwd=home, env={**inherited, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )


def lose_the_node(job: "subprocess.Popen[str]", home: Path, address: str) -> None:
    """The training, the process that sends, and the folder."""
    job.kill()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if address.encode() in words and b"ddptrain.observe.mirror.send" in words:
                os.kill(int(folder.name), signal.SIGKILL)
    job.communicate()
    shutil.rmtree(home / "run", ignore_errors=True)


def outcome(run: Path) -> dict[str, Any]:
    saved, best = Checkpointer(run / "checkpoints", keep=2).newest(), read(run / "checkpoints/best")
    assert saved is not None
    return {
        "state": unpack(saved),
        "best": {**unpack(best), "manifest step": best.manifest["step"]},
        "metrics": (run / "metrics.jsonl").read_text().splitlines(),
    }


@pytest.mark.timeout(3600)
@pytest.mark.faults
@pytest.mark.parametrize("runs", [40])
def test_lost_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    (tmp_path / "whole").mkdir()
    job = start(tmp_path / "whole", str(tmp_path / "unused"))
    _, said = job.communicate(timeout=120)
    assert job.returncode == 0, said
    expected = outcome(tmp_path / "whole/run")
    draw, resumed = random.Random(runs), 0
    with bucket() as door:
        for name, value in door.variables.items():
            monkeypatch.setenv(name, value)
        for number in range(runs):
            home, address = tmp_path / str(number), f"s3://{BUCKET}/{time.time_ns()}"
            home.mkdir()
            for _ in range(KILLS):
                job = start(home, address)
                until = time.monotonic() + 60
                while not (home / "run/command.txt").exists() and time.monotonic() < until:
                    time.sleep(0.01)
                time.sleep(draw.uniform(0, 4))
                lose_the_node(job, home, address)
            job = start(home, address)
            _, said = job.communicate(timeout=180)
            assert job.returncode == 0, said
            resumed += "resumed    " in said
            assert_same(outcome(home / "run"), expected)
            shutil.rmtree(home)
    assert resumed > 0.5 * runs
