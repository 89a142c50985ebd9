"""Jobs of several ranks, started as a user starts them, and what is left of them."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import marked
from shell import RANK_VARIABLES

FAULTY = [f"--config-dir={Path(__file__).parent / 'faulty'}", "recipe=faulty", "device=cpu", "run.dir=r"]
WITH_WORKERS = [
    *("recipe=cnn_cifar10", "data=shapes", "data.source.train=300", "data.source.valid=30", "device=cpu"),
    *("train.batch_size=60", "train.epochs=100000", "data.workers=2", "data.resident=false", "log.every=1"),
    *("observers=[console,jsonl,plots]", "checkpoint.every=100", "run.dir=r"),
]
"""Without an end."""


@dataclass
class Job:
    """A started launcher; every process of the job inherits a mark in its environment."""

    launcher: subprocess.Popen[str]
    mark: str
    log: Path

    def wait(self, timeout: float = 240.0) -> tuple[int, str]:
        """The exit code, and all that was said."""
        code = self.launcher.wait(timeout)
        return code, self.log.read_text()

    def wait_for(self, words: str, timeout: float = 120.0) -> None:
        deadline = time.monotonic() + timeout
        while words not in self.log.read_text():
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.launcher.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def ranks(self) -> list[int]:
        """Process ids of the launcher's children that lead a session: not of what forks them."""
        return [
            pid for pid in self.living() if marked.parent(pid) == self.launcher.pid and os.getsid(pid) == pid
        ]

    def prefork(self) -> int:
        """Process id of what forks the ranks of ``launch``."""
        (pid,) = (pid for pid in self.living() if marked.name(pid) == "ddptrain-fork")
        return pid

    def living(self) -> dict[int, str]:
        """All processes of the job, and their command lines; zombies don't count."""
        return marked.living(self.mark)

    def left_after(self, seconds: float) -> dict[int, str]:
        """What still lives after so long, at most."""
        return marked.left_after(self.mark, seconds)


Start = Callable[[Path, Sequence[str], Sequence[str]], Job]
"""`launch` or `torchrun`: in a folder, with options, and with the ranks' arguments."""


def start(folder: Path, launcher: Sequence[str], arguments: Sequence[str]) -> Job:
    """``launcher``: the words after ``python -m``."""
    mark, log = uuid.uuid4().hex, folder / "said.txt"
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment = {**inherited, "OMP_NUM_THREADS": "1", marked.MARK: mark}
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *launcher, *arguments], cwd=folder, env=environment, stdout=said,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    return Job(process, mark, log)


def launch(folder: Path, options: Sequence[str], arguments: Sequence[str]) -> Job:
    return start(folder, ["ddptrain", "launch", *options], arguments)


def torchrun(folder: Path, options: Sequence[str], arguments: Sequence[str]) -> Job:
    return start(folder, ["torch.distributed.run", "--standalone", *options, "-m", "ddptrain"], arguments)
