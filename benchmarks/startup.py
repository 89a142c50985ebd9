"""How long ddptrain takes to its first step, and how much memory, beside a script written by hand.

    python benchmarks/startup.py                      # a Markdown table on stdout, in some 8 minutes
    python benchmarks/startup.py --write docs/performance.md    # and into that file

Whole processes take turns, A B, then B A, and a ratio is taken within one round. Both train the same small
network on as many samples, write TensorBoard scalars and a checkpoint (startup_work/). Time runs from the
start of the command to the end of the first optimizer step of the slowest rank, ddptrain's composed config
included.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common import made_with, publish, rounds_parser

NAME = "startup"
"""Of the markers."""
WORK = Path(__file__).parent / "startup_work"
NOTES = "STARTUP_NOTES"
"""As in startup_work/work.py."""
OURS = ["recipe=startup", "device=cpu", "run.dir=run", f"--config-dir={WORK}"]
BY_HAND = str(WORK / "by_hand.py")
LSTM = [
    *("launch", "--nproc-per-node=2", "recipe=lstm_text", "device=cpu", "run.dir=run", "log.every=10"),
    *("observers=[console,jsonl,plots]", "train.steps=1000"),
]
LSTM_STEPS = 30
"""After which its speed is read: over the last ten."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a training."""

    seconds: float
    peak_mb: float
    """Resident memory, of the rank that took most."""
    shared_mb: float
    """Of all its processes together after their first step, each shared page counted once; 0 unless asked."""


def command(ours: bool, ranks: int) -> list[str]:
    if ranks == 1:
        return ["-m", "ddptrain", *OURS] if ours else [BY_HAND]
    count = f"--nproc-per-node={ranks}"
    if ours:
        return ["-m", "ddptrain", "launch", count, *OURS]
    return ["-m", "torch.distributed.run", "--standalone", count, BY_HAND]


def run(words: Sequence[str], ranks: int, weigh: bool = False) -> tuple[Start, int]:
    """Start it, and wait for its end: what it took, and its exit code."""
    folder = Path(tempfile.mkdtemp(prefix="startup-"))
    if weigh:
        (folder / "hold").touch()
    environment = {**os.environ, NOTES: str(folder), "OMP_NUM_THREADS": "1"}
    began = time.time()
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=environment, stdout=quiet, stderr=quiet
    ) as job:
        shared = 0.0
        if weigh:
            while len(list(folder.glob("reached-*"))) < ranks and job.poll() is None:
                time.sleep(0.02)
            shared = _memory_of(str(folder))
            (folder / "hold").unlink()
        code = job.wait()
    notes = [json.loads(path.read_text()) for path in folder.glob("note-*.json")]
    shutil.rmtree(folder)
    if len(notes) < ranks:
        return Start(0.0, 0.0, 0.0), code or 1
    seconds = max(note["first_step"] for note in notes) - began
    return Start(seconds, max(note["peak_mb"] for note in notes), shared), code


def start(ours: bool, ranks: int, weigh: bool = False) -> Start:
    """One that ended well: the script by hand sometimes dies at its exit, when all is done."""
    for _ in range(10):
        measured, code = run(command(ours, ranks), ranks, weigh)
        if code == 0:
            return measured
    raise SystemExit(f"{' '.join(command(ours, ranks))} has failed ten times")


def _memory_of(mark: str) -> float:
    """MB of all processes that have inherited the mark."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{NOTES}={mark}".encode() in (folder / "environ").read_bytes():
                pss = re.search(r"^Pss: +(\d+)", (folder / "smaps_rollup").read_text(), re.MULTILINE)
                total += int(pss[1]) if pss else 0
        except OSError:  # it has ended meanwhile
            continue
    return total / 1024


def in_turns(
    measure: Callable[[bool], float],
    rounds: int,
    unit: str,
    own: str = "ddptrain",
    other: str = "by hand",
) -> tuple[list[float], list[float]]:
    """Of each round: ours, and the other one's. Each is told, by its name."""
    digits = 2 if unit == "s" else 0
    results: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for ours in (True, False) if number % 2 == 0 else (False, True):
            results[ours].append(measure(ours))
        first, second = (f"{results[ours][-1]:,.{digits}f} {unit}" for ours in (True, False))
        print(f"  round {number + 1}: {own} {first}, {other} {second}", file=sys.stderr)
    return results[True], results[False]


def row(title: str, unit: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    digits = 2 if unit == "s" else 0
    own, other = (f"{statistics.median(values):,.{digits}f} {unit}" for values in (ours, theirs))
    ratio = f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {title} | {own} | {other} | {ratio} |"


def _fewer(rounds: int) -> int:
    """For what takes long: half as many, but no fewer than three where that many are asked for."""
    return min(rounds, max(3, rounds // 2))


def _first_step(own: bool, ranks: int) -> float:
    return start(own, ranks).seconds


def measured(rounds: int) -> list[str]:
    lines = ["| | ddptrain | by hand | ratio (min to max) |", "|---|---:|---:|---:|"]
    for ranks, title in ((1, "one process"), (2, "2 ranks: `launch` / torchrun")):
        print(f"first step, {title}", file=sys.stderr)
        ours, theirs = in_turns(partial(_first_step, ranks=ranks), rounds, "s")
        lines.append(row(f"first step, {title}", "s", ours, theirs))
    print("memory, 4 ranks", file=sys.stderr)
    ours, theirs = in_turns(lambda own: start(own, 4, weigh=True).shared_mb, _fewer(rounds), "MB")
    lines.append(row("memory of a job of 4 ranks (PSS)", "MB", ours, theirs))
    print("memory, one process", file=sys.stderr)
    ours, theirs = in_turns(lambda own: start(own, 1).peak_mb, min(3, rounds), "MB")
    lines.append(row("peak memory of one process (RSS)", "MB", ours, theirs))
    return lines


def refused(verb: Sequence[str]) -> float:
    """Seconds until a mistyped config has been refused."""
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "ddptrain", *verb, "recipe=cnn_digits", "optim.lrr=1"], capture_output=True
    )
    if ended.returncode != 2:
        raise SystemExit(f"optim.lrr=1 was not refused: {ended.stderr.decode()}")
    return time.monotonic() - began


def tokens(shared: bool) -> float:
    """Training samples per second of lstm_text on 2 ranks: with shared-out cores, or one thread a rank."""
    folder = Path(tempfile.mkdtemp(prefix="startup-"))
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if not shared:
        environment["DDPTRAIN_CORES"] = "2"
    log = folder / "run/log.txt"
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        [sys.executable, "-m", "ddptrain", *LSTM], cwd=folder, env=environment, stdout=quiet, stderr=quiet
    ) as job:
        while True:
            text = log.read_text() if log.exists() else ""
            if rate := re.search(rf"step {LSTM_STEPS}/.*?([\d,.]+) samples/s", text):
                break
            if job.poll() is not None:
                raise SystemExit(f"lstm_text has ended early: {text}")
            time.sleep(0.1)
        job.kill()  # and its ranks with it
    shutil.rmtree(folder)
    return float(rate[1].replace(",", ""))


def notes(rounds: int) -> list[str]:
    lines = []
    for verb in ([], ["launch"]):
        seconds = [refused(verb) for _ in range(rounds)]
        name = " ".join(["python -m ddptrain", *verb])
        lines.append(f"`{name}` refuses a mistyped config in {statistics.median(seconds):.2f} s.")
    print("threads", file=sys.stderr)
    ours, theirs = in_turns(tokens, _fewer(rounds), "samples/s", "cores shared out", "one thread a rank")
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    span = f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})"
    lines.append(f"`lstm_text` on 2 ranks, with cores shared out: {span} torchrun's one thread a rank.")
    lines.append(f"Medians of {rounds} rounds. {made_with('torch')} Made by `python benchmarks/startup.py`.")
    return [" ".join(lines)]


def main() -> None:
    arguments = rounds_parser(__doc__, NAME, 7).parse_args()
    table = measured(arguments.rounds)
    publish("\n".join([*table, "", *notes(arguments.rounds)]), NAME, arguments.write)


if __name__ == "__main__":
    main()
