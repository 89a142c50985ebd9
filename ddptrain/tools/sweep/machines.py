"""Where the jobs of a sweep run: one file for each kind of machines, chosen by ``sweep.on``."""

import math
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ddptrain.config.schema import Config
from ddptrain.config.strategy import is_ddp
from ddptrain.errors import ExitCode
from ddptrain.text import json_object, quoted_if_needed
from ddptrain.tools.sweep.ledger import Job

OUTPUT = "output.txt"
"""In the job's folder: what it prints, attempt after attempt."""
COSTS = ("samples_per_s", "seconds", "peak_memory_mib")
"""What a summary has beside metrics that a sweep may have for an objective."""
_LAST_BYTES = 4096
_AGENT_SAYS = "ddptrain launch: "


class Attempt(ABC):
    """One attempt at a job."""

    def __init__(self, job: Job, folder: Path) -> None:
        """folder: the job's."""
        self.job = job
        self.folder = folder
        self.stopped_for = ""
        """Why it was asked to stop: timeout, stopped."""
        self._kill_at = math.inf

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Since it began to run; 0 while it waits for a place."""

    @property
    def waits(self) -> bool:
        """It has been handed to a scheduler, and has not begun to run."""
        return False

    @property
    def got_further(self) -> bool:
        """Than the checkpoint that it began with; asked of one that was interrupted."""
        return True

    @property
    def node(self) -> str:
        """Where it runs, if not on this machine."""
        return ""

    @abstractmethod
    def returncode(self) -> int | None:
        """Once it has ended: its exit code, or -n where signal n has ended it."""

    @abstractmethod
    def ask_to_stop(self, grace: float) -> None:
        """Have it save and stop, within so many seconds."""

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    def leave(self) -> None:
        """The sweep's process ends before this attempt does: by an error, or by SIGHUP where jobs go on."""

    @abstractmethod
    def output(self) -> tuple[BinaryIO, int]:
        """The job's output, open for reading, and where in it this attempt's begins, in bytes. Raises
        OSError."""

    def interrupted(self, code: int) -> str:
        """Why it has ended, if neither it nor the sweep is the cause, and it is to be continued; else
        empty."""
        return ""

    def stop(self, why: str, grace: float) -> None:
        """Ask it to save and stop; after so many seconds it is killed."""
        if not self.stopped_for:
            self.stopped_for, self._kill_at = why, time.monotonic() + grace
            self.ask_to_stop(grace)

    def ended(self) -> int | None:
        """The exit code, once it has ended; 128 + n where signal n has ended it."""
        if time.monotonic() > self._kill_at:
            self.kill()
        code = self.returncode()
        return 128 - code if code is not None and code < 0 else code

    def outcome(self, code: int, pruned: bool) -> tuple[str, str, dict[str, Any]]:
        """Once it has ended: its status, why, and, of one that is done, the figures it left."""
        summary = json_object(self.folder / "summary.json")
        if code == 0 and summary.get("outcome") in ("done", "stopped early"):
            return "done", "", _figures(summary)
        if pruned and code == ExitCode.STOPPED:
            return "pruned", "", {}
        if self.stopped_for:
            return self.stopped_for, "", {}
        if why := self.interrupted(code):
            return "stopped", why, {}
        if code == ExitCode.STOPPED:
            return "stopped", "", {}
        return "failed", self._last_words(code) if code else "it ended without a summary", {}

    def _last_words(self, code: int) -> str:
        """The last message of a failed attempt: its own, which rank a signal ended, or the exception."""
        raw = self.returncode() or 0
        if raw < 0:
            memory = " (out of memory?)" if -raw == signal.SIGKILL else ""
            return f"killed by {signal.Signals(-raw).name}{memory}"
        lines = self._last_lines()
        own = [line.removeprefix("ddptrain: ") for line in lines if line.startswith("ddptrain: ")]
        agent = [line.removeprefix(_AGENT_SAYS) for line in lines if line.startswith(_AGENT_SAYS)]
        others = [line.strip() for line in lines if line.strip() and not line.startswith(_AGENT_SAYS)]
        return (own or (agent if code > 128 else others) or others or [""])[-1]

    def _last_lines(self) -> list[str]:
        try:
            file, begin = self.output()
            with file:
                file.seek(max(begin, file.seek(0, os.SEEK_END) - _LAST_BYTES))
                return file.read().decode(errors="replace").splitlines()
        except OSError:  # the folder is gone
            return []


class Machines(ABC):
    """Where jobs run, and how many at once."""

    name: str
    """As ``sweep.on`` has it."""
    on_cpu: bool
    parallel: int
    """Most jobs at once."""
    ranks: int
    """Of each job."""
    outlive = False
    """Jobs go on without their sweep."""
    tick: float
    """Seconds between two looks at the jobs."""

    @abstractmethod
    def describe(self) -> str:
        """For the plan."""

    def take(self) -> tuple[str, ...]:
        """GPUs for the next job, where they have names. Fewer than ``parallel`` jobs run."""
        return ()

    @abstractmethod
    def start(self, job: Job, words: Sequence[str], folder: Path, gpus: Sequence[str]) -> Attempt:
        """folder: the job's. gpus: as taken."""

    def release(self, gpus: Sequence[str], failed: bool) -> Sequence[str]:
        """They are free again, but for those that are returned: they are lost, which is looked at after a job
        that failed."""
        return ()

    def adopt(self, job: Job, folder: Path) -> Attempt:
        """The attempt that an earlier sweep process has started, which may still run."""
        raise AssertionError("jobs of this machine end with their sweep")

    def refresh(self, attempts: Sequence[Attempt]) -> None:  # noqa: B027
        """Once in each turn, before the attempts are looked at."""

    def command(self, job: Job, folder: Path, config: Config) -> list[str]:
        """The line that runs a job: ``launch`` for several ranks, for one a plain process, which is up
        sooner. A job that is given a GPU asks for it: should it be lost meanwhile, device=auto would train on
        the CPU.

        folder: the sweep's.
        """
        launches = self.ranks > 1 or is_ddp(config.strategy)  # there one rank has a process group too
        launch = ["launch", f"--nproc-per-node={self.ranks}"] if launches else []
        own = [
            *([] if self.on_cpu else ["device=cuda"]),
            f"run.dir={quoted_if_needed(folder / job.folder)}",
        ]
        if config.run.mirror is not None:  # a place of its own for each point, whatever sweep asks for it
            place = f"{config.run.mirror}/{job.folder}-{job.key[:8]}"
            own.append(f"run.mirror={quoted_if_needed(place)}")
        return [sys.executable, "-m", "ddptrain", *launch, *job.words, *own]


def _figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    best = summary.get("best", {})
    metric = next((name for name in best if name != "step"), None)
    costs = {name: summary.get(name) for name in COSTS}
    results = {**summary.get("metrics", {}), **costs, **({metric: best[metric]} if metric else {})}
    finite = {name: value if _is_finite(value) else None for name, value in results.items()}
    if metric is None:
        return {"results": finite}
    facts = {name: summary[name] for name in ("step", "steps")}
    facts["higher_is_better"] = bool(summary["higher_is_better"])
    return {"metric": metric, "value": best[metric], **facts, "results": finite}


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
