"""Jobs of several ranks as users start them, and what can happen to them."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import marked
from compare import assert_same
from shell import RANK_VARIABLES

from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.saved_checkpoint import unpack

FAULTY = Path(__file__).parent / "faulty"


@dataclass
class Job:
    """A running command line. All its processes are found by a variable in their environment."""

    words: Sequence[str]
    cwd: Path
    ranks: int
    restarts: int = 0
    launcher: str = "launch"
    """launch, torchrun, or python for a single process."""
    under: Sequence[str] = ()
    """What the command line is given to, as its last words."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further ones of its environment."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        nproc = [f"--nproc-per-node={self.ranks}", f"--max-restarts={self.restarts}"]
        start = {
            "launch": ["-m", "ddptrain", "launch", *nproc],
            "torchrun": ["-m", "torch.distributed.run", "--standalone", *nproc, "-m", "ddptrain"],
            "python": ["-m", "ddptrain"],
        }[self.launcher]
        inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        own = {marked.MARK: self.mark, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        self.output = self.cwd / f"output-{self.mark}.txt"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [*self.under, sys.executable, *start, *self.words],
                cwd=self.cwd,
                env={**inherited, **own, **self.variables},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, timeout: float = 240) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"still running after {timeout} s:\n{self.text[-3000:]}") from None

    def wait_for(self, text: str, times: int = 1, timeout: float = 120) -> None:
        """Until the output holds a text so many times."""
        deadline = time.monotonic() + timeout
        while self.text.count(text) < times:
            ended = self.process.poll() is not None
            assert not ended or self.text.count(text) >= times, (
                f"ended without {text!r}:\n{self.text[-3000:]}"
            )
            assert time.monotonic() < deadline, f"no {text!r} after {timeout} s:\n{self.text[-3000:]}"
            time.sleep(0.02)

    def wait_for_step(self, step: int, attempt: int = 1, timeout: float = 240) -> bool:
        """Until the ranks, begun for the ``attempt``-th time, have logged this step or a later one; 0: until
        they have begun. False where the job ended before."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            _, *attempts = self.text.split("plan       steps")
            if len(attempts) >= attempt:
                steps = re.findall(r"^step (\d+)/", attempts[attempt - 1], re.MULTILINE)
                if max(map(int, steps), default=0) >= step:
                    return True
            assert time.monotonic() < deadline, f"no step {step} after {timeout} s:\n{self.text[-3000:]}"
            time.sleep(0.01)
        return False

    def pids(self) -> list[int]:
        """All living processes of the job."""
        return list(marked.living(self.mark))

    def left_after(self, seconds: float) -> dict[int, str]:
        """What still lives after so long, at most: the command lines."""
        return marked.left_after(self.mark, seconds)

    def rank_pids(self) -> dict[int, int]:
        """The ranks' processes: children of the agent, by rank."""
        if self.launcher == "python":
            return {0: self.process.pid}
        every = marked.marked(self.mark)
        children = {pid: its for pid, its in every.items() if marked.parent(pid) == self.process.pid}
        ranks = {_rank(pid, its.variables): pid for pid, its in children.items()}
        return {rank: pid for rank, pid in ranks.items() if rank >= 0}

    def kill(self, pid: int, number: int = signal.SIGKILL) -> bool:
        """False where there was nobody left."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def end(self) -> None:
        for pid in [self.process.pid, *self.pids()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def faulty_words(*words: str) -> list[str]:
    """The recipe of `faulty.py` in the run folder ``run``."""
    return [f"--config-dir={FAULTY}", "recipe=faulty", "run.dir=run", *words]


def kill_at_random(job: Job, dice: random.Random, steps: Sequence[int], kills: int, lag: float = 0.0) -> int:
    """Kill random ranks of a job that restarts, each at a random one of these steps; returns how many kills
    have met somebody alive.

    A kill waits for its step's line in the log, and then for a random part of ``lag`` seconds: so it falls
    into the same part of the run on every machine. Where the run goes on for longer than ``lag`` after each
    of the steps, none comes too late. Step 0 is the moment at which the ranks have begun.
    """
    done = 0
    for attempt, step in enumerate(sorted(dice.sample(steps, kills)), 1):
        if not job.wait_for_step(step, attempt):
            break
        time.sleep(dice.uniform(0, lag))
        ranks = sorted(job.rank_pids().values())
        done += bool(ranks) and job.kill(dice.choice(ranks))
    return done


def outcome(run: Path) -> tuple[dict[str, Any], bytes]:
    """What a run has come to: the last checkpoint's state, and its metrics."""
    saved = Checkpointer(run / "checkpoints", keep=2).newest()
    assert saved is not None, f"{run} holds no checkpoint"
    return unpack(saved), (run / "metrics.jsonl").read_bytes()


def assert_same_outcome(run: Path, other: Path) -> None:
    """Weights, buffers, optimizer, scaler, average, sums, and every line of the metrics: to the bit."""
    (state, metrics), (expected, lines) = outcome(run), outcome(other)
    assert_same(expected, state)
    assert metrics == lines
    assert _summary(run) == _summary(other)


def stopped_steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"stopped (?:in the evaluation )?at step (\d+)", text)]


def _summary(run: Path) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text())
    return {name: summary[name] for name in ("outcome", "step", "steps", "metrics", "best")}


def _rank(pid: int, variables: dict[str, str]) -> int:
    """-1 for what is none. A forked rank has its launcher's environment there, and a name of its own."""
    return int(marked.name(pid).partition("ddptrain-rank")[2] or variables.get("RANK", -1))
