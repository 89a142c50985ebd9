"""A part of the first hour on a GPU: what it is given, what it may find, and how its commands are started."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
COMPARED = 20
"""Steps. Later a training that is not deterministic leaves any other: on a CPU one and two threads, so
another order of sums alone, were apart by 2e-6 after 20 steps, 2e-3 after 40 and 1e-2 after 60."""
ALIKE = 1e-4
"""Relative: how well the first losses in fp32 must agree between two ways to train the same."""
TAIL = 40
"""Lines of an output that are kept in the results."""


class Failed(Exception):
    """Something has come out otherwise than it must."""


class NotHere(Exception):
    """This device, or this machine, can't be asked. The message says why."""


def need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


def tail(file: Path) -> str:
    """The end of an output."""
    text = file.read_text(errors="replace") if file.exists() else ""
    return "\n".join(text.splitlines()[-TAIL:])


def write_json(file: Path, value: Any) -> None:
    """Whole or not at all: a part may be killed at any moment."""
    aside = file.with_suffix(".new")
    aside.write_text(json.dumps(value, indent=1))
    aside.replace(file)


class Ran(NamedTuple):
    """A command that has ended."""

    code: int
    seconds: float
    out: str
    said: str
    """On standard error, where the log goes."""


class Trained(NamedTuple):
    """What a training has left behind."""

    ran: Ran
    losses: list[float]
    """Of its log lines."""
    valid: list[Mapping[str, float]]
    """Of its evaluations."""
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """What a part works with. folder: its own, new. small: as few steps as show that the part itself works.
    lacks: abilities that the device has not, and why."""

    folder: Path
    small: bool
    lacks: Mapping[str, str]
    figures: dict[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    def pick(self, whole: int, small: int) -> int:
        return small if self.small else whole

    def tell(self, verdict: str, said: str) -> None:
        """Put down what is known, for the one who started this part."""
        result = {"verdict": verdict, "said": said, "figures": self.figures, "commands": self.commands}
        write_json(self.folder / "result.json", result)

    def figure(self, name: str, value: Any) -> None:
        """Kept even where the part fails or is killed later."""
        self.figures[name] = value
        self.tell("failed", "it was ended before it had finished")

    def run(self, name: str, *words: str, code: int | None = 0, **variables: str) -> Ran:
        """Run Python with such words, to its end, in the part's folder; the output is kept beside.

        code: what it must end with; None: anything.
        """
        with self.started(name, *words, **variables) as process:
            began = time.monotonic()
            ended = process.wait()
            seconds = time.monotonic() - began
        out, said = (self.output(name, kind) for kind in ("out", "err"))
        if code is not None and ended != code:
            last = [line for line in (said or out).splitlines() if line.strip()][-1:]
            raise Failed(f"{name}: exit code {ended}, not {code}: {''.join(last)[:300]}")
        return Ran(ended, seconds, out, said)

    @contextmanager
    def started(self, name: str, *words: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run it beside; it is ended with the block."""
        shown = [f"{key}={value}" for key, value in variables.items()]
        self.commands.append(" ".join([*shown, "python", *words]).replace(str(ROOT), "."))
        environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "140", **variables}
        with (self.folder / f"{name}.out").open("wb") as out, (self.folder / f"{name}.err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=err,
            )  # fmt: skip
        try:
            yield process
        finally:
            end(process)

    def output(self, name: str, kind: str) -> str:
        return (self.folder / f"{name}.{kind}").read_text(errors="replace")

    def train(self, name: str, *words: str, **variables: str) -> Trained:
        """A training on the GPU, which must end well and with numbers. With options of ``launch`` before the
        overrides it is started by that."""
        verb = ["launch"] if words[0].startswith("--") else []
        device = [] if any(word.startswith("device=") for word in words) else ["device=cuda"]
        line = [*verb, *words, *device, "observers=[console,jsonl,plots]", f"run.dir={name}"]
        ran = self.run(name, "-m", "ddptrain", *line, code=0, **variables)
        training = trained(self.folder / name, ran)
        need(bool(training.losses), f"{name}: left no loss")
        numbers = [value for row in training.valid for value in row.values()]
        need(all(map(math.isfinite, [*training.losses, *numbers])), f"{name}: a loss or metric is no number")
        return training


def trained(folder: Path, ran: Ran) -> Trained:
    """Read a run's folder."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["split"] == "train"]
    valid: list[Mapping[str, float]] = [
        {name: value for name, value in row.items() if isinstance(value, float)}
        for row in rows
        if row["split"] == "valid"
    ]
    return Trained(ran, losses, valid, json.loads((folder / "summary.json").read_text()))


def speed(training: Trained) -> dict[str, Any]:
    """What a run says of its time, for the table."""
    summary = training.summary
    kept = {name: summary.get(name) for name in ("samples_per_s", "mfu", "peak_memory_mib")}
    total = sum(summary["time"].values())
    shares = {name: seconds / total for name, seconds in summary["time"].items()} if total else {}
    return {**kept, "time": shares, "seconds": training.ran.seconds, "verdict": summary["verdict"]}


def apart(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Relative differences."""
    return [abs(a - b) / max(abs(b), 1e-9) for a, b in zip(ours, theirs, strict=True)]


def check_same(ours: Sequence[float], theirs: Sequence[float], exactly: bool = False) -> float:
    """How far losses are apart, relative. Raises Failed where the first `COMPARED` of them are
    apart by more than `ALIKE`; exactly: where any is."""
    need(len(ours) == len(theirs), f"{len(ours)} losses and {len(theirs)}")
    steps, limit = (len(ours), 0.0) if exactly else (COMPARED, ALIKE)
    most = max(apart(ours[:steps], theirs[:steps]))
    need(most <= limit, f"losses differ by {most:.2g}, relative; at most {limit:g}")
    return most


def end(process: subprocess.Popen[bytes], everyone: bool = False) -> None:
    """Asked first, for a launcher then ends its ranks. everyone: the rest of the group that it leads, too."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
    if everyone:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
    process.wait()


def ranks_of(process: subprocess.Popen[bytes]) -> dict[int, int]:
    """The process of each rank that ``launch`` has started, by the name that it gives them."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            rank = re.match(r"ddptrain-rank(\d+)", (folder / "comm").read_text())
            if int(parent) == process.pid and rank:
                pids[int(rank[1])] = int(folder.name)
    return pids


def wait_for(job: Job, name: str, text: str, process: subprocess.Popen[bytes]) -> None:
    """Until a command that runs beside has said this."""
    while text not in job.output(name, "err") + job.output(name, "out"):
        need(process.poll() is None, f"{name}: ended with {process.poll()} before it said {text!r}")
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Part:
    """One of the hour's parts.

    do: finds out, and says what it has found in a sentence; raises `Failed` or `NotHere`. usual: seconds on
    a real GPU, roughly. limit: seconds after which it is ended. needs: abilities of the device, see
    abilities.py.
    """

    title: str
    do: Callable[[Job], str]
    usual: float = 60
    limit: float = 300
    needs: tuple[str, ...] = ()
    gpus: int = 1
