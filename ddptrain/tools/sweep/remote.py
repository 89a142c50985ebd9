"""Jobs on the nodes of a scheduler. A sweep may die and come back: it finds what ran on meanwhile, and what
has ended, by `AttemptFile` and the scheduler's list of names."""

import hashlib
import math
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, final

from ddptrain.config.schema import Config
from ddptrain.distributed.cpu import CORES
from ddptrain.errors import ExitCode, UserError
from ddptrain.text import counted, say
from ddptrain.tools.sweep.attempt_file import AttemptFile
from ddptrain.tools.sweep.ledger import Job
from ddptrain.tools.sweep.machines import OUTPUT, Attempt, Machines
from ddptrain.tools.sweep.slots import memory_share

_MOST_AT_ONCE = 100
"""Jobs in a scheduler's hands, unless ``sweep.max_parallel`` says otherwise."""
_QUERY_EVERY_S = 5.0
_LOST_AFTER_S = 30.0
"""How long a scheduler has to know nothing of an attempt that has not told its end: over NFS that may come
late."""
_GIVEN_UP_AFTER_S = 60.0
"""How long what was killed may take to tell so."""
_CODES = {"CANCELLED": int(ExitCode.STOPPED), "OUT_OF_MEMORY": -9}
"""Of what is not to be continued, by the fate that a scheduler gives."""


class BusyError(Exception):
    """The scheduler takes no more jobs for now."""


class Scheduler(ABC):
    """Runs commands on nodes, each once, under unique names."""

    name: str
    """As ``sweep.on`` has it."""
    cores: int | None
    """Of a job; None: those that the scheduler binds it to."""

    @abstractmethod
    def submit(self, name: str, words: Sequence[str], log: Path) -> None:
        """log: a file for what it has to say. Raises UserError with its reason, BusyError where it may take
        it later."""

    @abstractmethod
    def names(self) -> set[str] | None:
        """Of all that wait or run; None where it does not answer now."""

    @abstractmethod
    def cancel(self, name: str) -> None:
        """It may have ended."""

    def fate(self, name: str) -> str:
        """Why something is gone, in a word of the scheduler's, if it knows."""
        return ""


@final
class RemoteAttempt(Attempt):
    """One attempt, waiting for a node or on one."""

    def __init__(self, job: Job, folder: Path, scheduler: Scheduler, words: Sequence[str] = ()) -> None:
        """words: what is submitted; none where an earlier sweep process has done so."""
        super().__init__(job, folder)
        self.name = f"ddptrain-{_digest(folder.resolve())}-{job.folder}-{job.attempt}"
        self._scheduler = scheduler
        self._words = words
        self._file = AttemptFile(folder, job.attempt)
        self._facts: dict[str, Any] = self._file.read()
        # by this host's clock, for the node's may show another time; adopted, as far as both agree
        began: float = self._facts.get("began", math.inf)
        self._began_at = time.monotonic() - max(0.0, time.time() - began)
        self._gone_since = math.inf
        self._fate = ""
        self._killed_at = math.inf
        self._began_with = _last_saved(folder)
        if request := self._file.stop_request():
            self.stopped_for, self._kill_at = request["why"], time.monotonic() + request["grace"]

    @property
    def waits(self) -> bool:
        return not self._facts

    @property
    def node(self) -> str:
        return str(self._facts.get("node", ""))

    @property
    def seconds(self) -> float:
        if "began" not in self._facts:
            return 0.0
        if "ended" not in self._facts:
            return time.monotonic() - self._began_at
        return float(self._facts["ended"] - self._facts["began"])

    @property
    def got_further(self) -> bool:
        return _last_saved(self.folder) > self._began_with

    def submit(self) -> None:
        """Unless it has been. Raises BusyError where it is for the next time."""
        if self._words:
            self._scheduler.submit(self.name, self._words, self._file.log)
            self._words = ()

    def look(self) -> None:
        """Read what its node has written."""
        if "code" not in self._facts:
            waited = self.waits
            self._facts = self._file.read()
            if waited and self._facts:
                self._began_at = time.monotonic()

    def note(self, known: bool) -> None:
        """Whether the scheduler knows it. One that is gone without a word is given up after a while."""
        if known or self._words or "code" in self._facts:
            self._gone_since = math.inf
            return
        self._gone_since = min(self._gone_since, time.monotonic())
        if time.monotonic() - self._gone_since < _LOST_AFTER_S:
            return
        fate = self._scheduler.fate(self.name)
        if not fate:  # should it run unseen, two would write one run
            self._scheduler.cancel(self.name)
        self._fate = fate or "lost"
        code = _CODES.get(self._fate, int(ExitCode.CRASH))
        if self._facts or self._file.claim({"code": code}):  # else it begins just now
            ended = self._facts.get("began", 0.0) + self.seconds
            self._facts = {"ended": ended, **self._facts, "code": code}

    def returncode(self) -> int | None:
        if time.monotonic() - self._killed_at > _GIVEN_UP_AFTER_S:  # neither node nor scheduler answers
            self._facts.setdefault("code", -int(signal.SIGKILL))
        return self._facts.get("code")

    def output(self) -> tuple[BinaryIO, int]:
        return (self.folder / OUTPUT).open("rb"), self._facts.get("output_from", 0)

    def ask_to_stop(self, grace: float) -> None:
        if self.waits and self._file.claim({"code": int(ExitCode.STOPPED)}):
            self._scheduler.cancel(self.name)
        else:
            self._file.ask_to_stop(self.stopped_for, grace)
        self.look()

    def kill(self) -> None:
        if self._killed_at == math.inf:
            self._killed_at = time.monotonic()
            self.ask_to_stop(0)
            self._scheduler.cancel(self.name)

    def leave(self) -> None:
        """It runs on."""

    def interrupted(self, code: int) -> str:
        if code != ExitCode.STOPPED and not self._fate:
            return ""
        fate = self._fate or self._scheduler.fate(self.name)
        return "" if fate in _CODES else f"interrupted ({fate or 'asked to stop'})"


@final
class RemoteMachines(Machines):
    """The nodes of a scheduler."""

    tick = 0.5
    outlive = True

    def __init__(self, scheduler: Scheduler, config: Config) -> None:
        sweep = config.sweep
        self.name = scheduler.name
        self.on_cpu = config.device == "cpu"
        self.ranks = int(sweep.gpus_per_job)
        self.parallel = sweep.max_parallel or _MOST_AT_ONCE
        self._cores = scheduler.cores
        self._variables = memory_share(sweep.jobs_per_gpu)
        if self._cores is not None:
            self._variables[CORES] = str(self._cores)
        self._scheduler = scheduler
        self._last_query = -math.inf
        self._said = ""

    def describe(self) -> str:
        each = counted(self.ranks, "rank" if self.on_cpu else "GPU")
        cores = "" if self._cores is None else f" and {counted(self._cores, 'core')}"
        return f"{self.name}: {counted(self.parallel, 'job')} at once at most, each {each}{cores}"

    def start(self, job: Job, words: Sequence[str], folder: Path, gpus: Sequence[str]) -> Attempt:
        variables = [f"{name}={value}" for name, value in self._variables.items()]
        node_job = [sys.executable, "-m", "ddptrain.tools.sweep.node_job", str(folder), str(job.attempt)]
        attempt = RemoteAttempt(job, folder, self._scheduler, ["env", *variables, *node_job, *words])
        self._submit([attempt])
        return attempt

    def adopt(self, job: Job, folder: Path) -> Attempt:
        return RemoteAttempt(job, folder, self._scheduler)

    def refresh(self, attempts: Sequence[Attempt]) -> None:
        """Asks the scheduler now and then only: jobs tell themselves when they begin and end."""
        remote = [attempt for attempt in attempts if isinstance(attempt, RemoteAttempt)]
        for attempt in remote:
            attempt.look()
        if time.monotonic() - self._last_query < _QUERY_EVERY_S:
            return
        self._last_query = time.monotonic()
        self._submit(remote)
        names = self._scheduler.names()
        if names is not None:
            for attempt in remote:
                attempt.note(attempt.name in names)

    def _submit(self, attempts: Sequence[RemoteAttempt]) -> None:
        """What the scheduler takes of them; what it says instead is told once."""
        said = ""
        for attempt in attempts:
            try:
                attempt.submit()
            except BusyError as busy:
                said = str(busy)
                break
        if said and said != self._said:
            with suppress(OSError):  # whoever looked may have gone
                say(f"{self.name}: {said}; it is asked again")
        self._said = said


def check_remote(config: Config) -> None:
    """Raise UserError for what only this machine's own GPUs can be asked for."""
    sweep = config.sweep
    wrong = []
    if sweep.gpus != "auto":
        wrong.append(f"sweep.gpus={sweep.gpus}: the scheduler chooses the GPUs; leave it out.")
    if sweep.gpus_per_job == "all":
        wrong.append("sweep.gpus_per_job=all: nodes differ; give a number.")
    if config.device not in ("auto", "cuda", "cpu"):
        wrong.append(f"device={config.device}: must be cuda or cpu.")
    shares_gpus = sweep.on == "ray" and sweep.gpus_per_job == 1 and config.device != "cpu"
    if sweep.jobs_per_gpu > 1 and not shares_gpus:
        wrong.append(f"sweep.jobs_per_gpu={sweep.jobs_per_gpu}: only Ray gives a GPU to several jobs.")
    if wrong:
        raise UserError("\n".join(f"{line[:-1]} (sweep.on={sweep.on})." for line in wrong))


def _digest(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:8]


def _last_saved(folder: Path) -> int:
    """The step of the last checkpoint in a job's folder; 0 where there is none."""
    steps = [
        path.parent.name.removeprefix("step-") for path in folder.glob("checkpoints/step-*/manifest.json")
    ]
    return max((int(step) for step in steps if step.isdecimal()), default=0)
