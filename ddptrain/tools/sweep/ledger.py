"""The ledger: what a sweep has started and how it ended, one JSON object a line, only ever appended to.

A job is known by a hash of its resolved config: the same point is not run twice, whatever sweep asks for it,
and keeps its number and folder.
"""

import errno
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddptrain.config.schema import Config
from ddptrain.errors import UserError
from ddptrain.observe.lock import lock_folder, unwritable
from ddptrain.text import parse_json

LEDGER = "ledger.jsonl"
_NOT_HASHED = ("sweep", "run")
"""Sections that say how and where a job is run."""
_WAY_OUT = "Put back what the file was, or sweep into another folder: sweep.dir=..."


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A job's metric at a share of its run, in (0, 1]."""

    share: float
    value: float
    """As the job's metric, or its negative where lower is better."""


@dataclass(slots=True)
class Job:
    """One point of a sweep, and what is known of it."""

    number: int
    key: str
    words: tuple[str, ...]
    """Its overrides."""
    status: str = "new"
    """new, queued (on other nodes), running, done, pruned, stopped (half done), failed, timeout."""
    began: float = 0.0
    """Unix time of the last attempt's start."""
    seconds: float = 0.0
    """Over all attempts that ended."""
    code: int | None = None
    why: str = ""
    gpus: tuple[str, ...] = ()
    """The slots it took, where they have names."""
    on_cpu: bool = False
    on: str = "local"
    """As ``sweep.on`` was at its last attempt."""
    attempt: int = 0
    """The number of its last attempt, from 1."""
    metric: str = ""
    value: float | None = None
    """The best value of the metric."""
    higher_is_better: bool = True
    step: int = 0
    steps: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)
    passed: float = 0.0
    """Share of the run up to which pruning has let it go on."""
    also: list[tuple[str, ...]] = field(default_factory=list)
    """Other words that make the same config, with which it was asked for before."""
    results: dict[str, float | None] = field(default_factory=dict)
    """Of one that is done, by name; None where one is not finite."""
    objectives: dict[str, str] = field(default_factory=dict)
    """``sweep.objectives`` when it ended."""

    @property
    def folder(self) -> str:
        """Within the sweep's."""
        return f"{self.number:03}"

    @property
    def score(self) -> float | None:
        """The metric, the higher the better."""
        if self.value is None:
            return None
        return self.value if self.higher_is_better else -self.value

    @property
    def place(self) -> float:
        """For sorting: the best first, those without a score last."""
        return math.inf if self.score is None or math.isnan(self.score) else -self.score

    @property
    def is_sound(self) -> bool:
        """Whether each value has its kind: a damaged ledger may have set any."""
        texts = [self.status, self.why, self.metric, self.on, *self.words, *self.gpus]
        texts += [*self.results, *self.objectives, *self.objectives.values()]
        numbers = [self.began, self.seconds, self.step, self.steps]
        numbers += [value for value in (self.code, self.value, *self.results.values()) if value is not None]
        return (
            all(isinstance(each, str) for each in texts)
            and all(isinstance(each, int | float) for each in numbers)
            and all(isinstance(each, bool) for each in (self.on_cpu, self.higher_is_better))
        )

    def apply(self, event: Mapping[str, Any]) -> None:
        """Update it by an event of the ledger."""
        for name in ("metric", "higher_is_better", "step", "steps"):
            if name in event:
                setattr(self, name, event[name])
        match event["event"]:
            case "started":
                self.on_cpu, self.on, self.why = event["on_cpu"], event.get("on", "local"), ""
                self.status = "running" if self.on == "local" else "queued"
                self.gpus, self.began = tuple(event["gpus"]), event["time"]
                self.attempt += 1
            case "asked":
                words = tuple(event["words"])
                self.also = [known for known in (*self.also, self.words) if known != words]
                self.words = words
            case "began":
                self.status, self.gpus, self.began = "running", (event["node"],), event["time"]
            case "evaluated":
                self._add_evaluation(event["value"])
            case "verdict":
                if event["goes_on"]:
                    self.passed = max(self.passed, event["share"])
            case "promoted":  # half done until it is started, should the sweep be killed in between
                self.status, self.passed = "stopped", max(self.passed, event["share"])
            case "ended":
                self.status, self.code, self.why = event["status"], event["code"], event["why"]
                self.seconds += event["seconds"]
                self.value = event.get("value", self.value)
                self.results = event.get("results", {})
                self.objectives = event.get("objectives", {})

    def _add_evaluation(self, value: float | None) -> None:
        """value: None where it is no number."""
        share, score = self.step / self.steps, math.nan
        if value is not None:
            score = value if self.higher_is_better else -value
            self.value = value if self.score is None or score > self.score else self.value
        if all(share != evaluation.share for evaluation in self.evaluations):  # else a resume repeats it
            self.evaluations.append(Evaluation(share, score))


class Ledger:
    """A sweep's ledger, open for writing: by one process, for as long as it lives."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError where another sweep runs in the folder, or it can't be read or written."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock_folder(folder, "sweep.dir", "is running a sweep")
            path = folder / LEDGER
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            text = path.read_bytes()
            if not text.endswith(b"\n"):  # the line that a kill has cut short
                os.ftruncate(self._file, text.rfind(b"\n") + 1)
        except OSError as error:
            raise unwritable(folder, error, "sweep.dir") from error
        self._jobs = {job.key: job for job in read_ledger(folder, live=False)}

    @property
    def jobs(self) -> list[Job]:
        return list(self._jobs.values())

    def job(self, key: str, words: Sequence[str]) -> Job:
        """The job of this config, with the number it has or the next one; it is run with these words. Raises
        UserError where that one's folder holds something."""
        if key not in self._jobs:
            job = Job(len(self._jobs), key, tuple(words))
            if (self.folder / job.folder).exists():
                raise UserError(
                    f"sweep.dir={self.folder}: there is a folder {job.folder} of which its {LEDGER} knows"
                    " nothing, and a job would go on with what lies there. Sweep into another: sweep.dir=..."
                )
            self._append({"event": "job", "job": job.number, "key": key, "words": list(words)})
            self._jobs[key] = job
        elif self._jobs[key].words != tuple(words):  # another --trust, mirror, or spelling of a value
            self.write(self._jobs[key], "asked", words=list(words))
        return self._jobs[key]

    def write(self, job: Job, event: str, **facts: Any) -> None:
        """What has happened to a job; on the disk before this returns."""
        job.apply(self._append({"event": event, "job": job.number, **facts}))

    def _append(self, facts: dict[str, Any]) -> dict[str, Any]:
        line = {**facts, "time": round(time.time(), 3)}
        text = (json.dumps(line) + "\n").encode()
        try:
            if os.write(self._file, text) < len(text):  # at once, so that a reader sees whole lines
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        except OSError as error:
            raise unwritable(self.folder, error, "sweep.dir") from error
        return line


def read_ledger(folder: Path, live: bool) -> list[Job]:
    """The jobs of a sweep, by number, without a lock. Raises UserError where a line can't be read.

    live: their sweep is running; else what was running on its machine was killed with it, and is half done.
    Jobs on other nodes outlive their sweep.
    """
    path = folder / LEDGER
    jobs: list[Job] = []
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    for number, text in enumerate(lines[:-1], start=1):  # after the last \n is nothing, or a line cut short
        try:
            event = parse_json(text)
            if event["event"] == "job":
                assert event["job"] == len(jobs)
                jobs.append(Job(event["job"], event["key"], tuple(event["words"])))
            else:
                assert event["job"] >= 0
                jobs[event["job"]].apply(event)
        except (LookupError, ValueError, ArithmeticError, TypeError, AttributeError, AssertionError) as error:
            raise UserError(f"{path}: line {number} is damaged. {_WAY_OUT}") from error
    for job in jobs:
        if not job.is_sound:
            raise UserError(f"{path}: what it says of job {job.number} is damaged. {_WAY_OUT}")
        if job.status == "running" and job.on == "local" and not live:
            job.status = "stopped"
    return jobs


def job_key(config: Config, program: str = "") -> str:
    """A hash of all that a job follows from: its config, and what ``--script`` names, as a digest."""
    tree = {name: value for name, value in asdict(config).items() if name not in _NOT_HASHED}
    content = json.dumps(tree, sort_keys=True, default=str) + program
    return hashlib.sha256(content.encode()).hexdigest()[:16]
