"""Whole trainings as separate processes: started, ended and killed. Imports no torch.

What ``prove`` stands on: it judges the command that a user types, not the engine's parts.
"""

import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from ddptrain.config.schema import Config
from ddptrain.distributed.launcher.process import AGENT, environment_of_no_rank
from ddptrain.errors import UserError
from ddptrain.text import quoted_if_needed

log = logging.getLogger("ddptrain")

_STEPS = 40
_ENDS_WITHIN_S = 180.0
"""After a rank was killed: torchrun alone gives the others 30 s."""
_TAIL_LINES = 25
_OF_TORCHRUN = re.compile(r"[EW]\d{4} .*torch/distributed/")
_PLACES = ("--config-dir=", "-cd=", "hydra.searchpath=", "--trust=")
"""Where recipes and what they name are found: the one thing that a run's folder does not tell."""


class TrialFailed(Exception):
    """A command did not end as it has to. The message holds the end of what it printed."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class ProofResult(NamedTuple):
    """What a proof has found."""

    holds: bool
    summary: str
    table: Table


def short(overrides: Sequence[str]) -> list[str]:
    """The overrides that make a proof's trainings short, with saves, evaluations and log lines in turn, where
    the user's own say nothing of it."""
    given = {word.lstrip("+").partition("=")[0]: word.partition("=")[2] for word in overrides}
    own: dict[str, Any] = {} if any("observers" in key for key in given) else {"observers": "[console,jsonl]"}
    steps = given.get("train.steps", "" if "train.epochs" in given else str(_STEPS))
    if steps.isdecimal():  # how many steps epochs have, only the data knows: the recipe's own intervals stand
        own |= {
            "train.steps": steps,
            "checkpoint.every": _prime(int(steps) // 6 + 1),
            "log.every": max(1, int(steps) // 8),
            "train.eval_every": max(1, int(steps) // 3),
        }
    return [f"{key}={value}" for key, value in own.items() if key not in given]


class RunningCommand:
    """A command of ddptrain that runs, on one rank or more."""

    def __init__(self, words: Sequence[str], ranks: int, threads: int, output: Path) -> None:
        launcher = [sys.executable, "-m"]
        if ranks > 1:
            launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        # it ends with this process, whatever ends that; torchrun is ended by `end`
        end = {AGENT: str(os.getpid())} if ranks == 1 else {}
        self._ranks, self._output, self._printed = ranks, output, output.with_suffix(".out")
        with output.open("wb") as errors, self._printed.open("wb") as printed, _cores_for(ranks * threads):
            self._process = subprocess.Popen(
                [*launcher, "ddptrain", *words],
                env={**environment_of_no_rank(), **end, "OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=errors,
            )

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def pids(self) -> dict[int, int]:
        """The process of each rank that has started."""
        return {0: self._process.pid} if self._ranks == 1 else _pids_of_ranks(self._process.pid)

    def finish(self) -> str:
        """Wait for it; what it printed on standard output. Raises TrialFailed unless it exits with 0."""
        code = self._process.wait()
        if code == 0:
            return self._printed.read_text()
        # torchrun's own is always 1
        of_rank = re.findall(r"exitcode +: (-?\d+)", self._output.read_text(errors="replace"))
        code = int(of_rank[-1]) if of_rank else code
        raise TrialFailed(f"exit code {code}. {self._tail()}", code)

    def kill(self, victims: Sequence[int]) -> None:
        """SIGKILL, and wait for the end of the whole. Raises TrialFailed where the others go on."""
        _kill(victims)
        try:
            self._process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired as error:
            self.end()
            late = f"a rank was killed, and {_ENDS_WITHIN_S:.0f} s later the others still run"
            raise TrialFailed(f"{late}. {self._tail()}", 1) from error

    def end(self) -> None:
        """Leave nothing behind."""
        if not self.is_over:
            _kill([*self.pids().values(), self._process.pid])
            self._process.wait()

    def _tail(self) -> str:
        lines = self._output.read_text(errors="replace").splitlines()
        reports = [i for i, line in enumerate(lines) if _OF_TORCHRUN.match(line)]
        lines = lines[: reports[0]] if reports else lines  # only what the ranks themselves have printed
        return "\n".join([f"The end of {self._output}:", *lines[-_TAIL_LINES:]])


@dataclass(frozen=True, slots=True)
class Trials:
    """Starts commands that differ in ranks and folders only: with the same words, and as many threads a rank,
    because sums that are split in another way round in another way."""

    folder: Path
    words: Sequence[str]
    threads: int

    @contextmanager
    def training(self, name: str, ranks: int, *more: str) -> Iterator[RunningCommand]:
        """``more``: overrides that beat the words of all."""
        began = time.monotonic()
        words = [*self.words, *more, f"run.dir={quoted_if_needed(self.folder / name)}", "run.mirror=null"]
        running = RunningCommand(words, ranks, self.threads, self.folder / f"{name}.txt")
        try:
            yield running
        finally:
            running.end()
        log.info("%-10s %.1f s", name, time.monotonic() - began)

    def trained(self, name: str, ranks: int, *more: str) -> Path:
        """The folder of a whole training."""
        with self.training(name, ranks, *more) as running:
            running.finish()
        return self.folder / name

    def evaluated(self, name: str, run: Path, ranks: int, *more: str) -> str:
        """What ``evaluate`` prints for a run."""
        began = time.monotonic()
        places = [word for word in self.words if word.startswith(_PLACES)]
        words = ["evaluate", f"run={run}", *places, *more]
        running = RunningCommand(words, ranks, self.threads, self.folder / f"{name}.txt")
        try:
            printed = running.finish()
        finally:
            running.end()
        log.info("%-10s %.1f s", name, time.monotonic() - began)
        return printed


@dataclass(frozen=True, slots=True)
class Case:
    """What is to be proved of which training."""

    config: Config
    words: Sequence[str]
    """Hydra's options and the overrides, with which all its trainings are started."""
    folder: Path
    cores: int
    make_model: Callable[[], Any]
    """The model itself, on the CPU."""

    def trials(self, ranks: int, *more: str) -> Trials:
        """Trainings on up to so many ranks. Raises UserError where the batch can't be divided."""
        if ranks > (size := self.config.train.batch_size):
            raise UserError(
                f"ranks={ranks}: the global batch, train.batch_size={size}, has to give each rank a"
                " sample. Take fewer ranks or a larger batch."
            )
        return Trials(self.folder, [*self.words, *more], max(1, self.cores // ranks))

    def strict(self) -> "Case":
        """The same training, with strategy=strict in place of what the command line says of strategies."""
        others = [word for word in self.words if not word.lstrip("+").startswith(("strategy=", "strategy."))]
        return replace(self, words=[*others, "strategy=strict"])

    def says(self, key: str) -> bool:
        """Whether the command line sets this key."""
        return any(word.lstrip("+").partition("=")[0] == key for word in self.words)


def _prime(least: int) -> int:
    """The first prime from ``least`` on: its multiples seldom meet those of the other intervals."""
    return next(n for n in itertools.count(max(2, least)) if all(n % k for k in range(2, n)))


@contextmanager
def _cores_for(count: int) -> Iterator[None]:
    """What is started inside has so many cores: torchrun's ranks divide those they see."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(own)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _pids_of_ranks(agent: int) -> dict[int, int]:
    """torchrun's children, by rank."""
    pids: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes().split(b"\0") if parent == agent else []
            pids |= {int(word[5:]): int(folder.name) for word in variables if word.startswith(b"RANK=")}
    return pids


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
