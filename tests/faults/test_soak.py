"""Trainings of ten minutes with a random fault every twenty seconds. ``pytest -m soak``"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from marked import left_after
from running import Job, assert_same_outcome, faulty_words

RANKS = 3
LAST = 4000
CALENDAR = [f"train.steps={LAST}", "checkpoint.every=50", "train.eval_every=500", "log.every=100"]
EVERY_S = 20.0
MOST_S = 600.0
"""No fault after so long, so that the run comes to its end."""
FAULTS = ["kill a rank", "stop a rank", "kill the agent", "ask to stop", "damage a checkpoint"]


class Size(NamedTuple):
    """What a process holds."""

    descriptors: int
    threads: int
    memory_mib: float


def size_of(pid: int) -> Size:
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return Size(
        len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0]) / 1024
    )


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_ten_minutes_of_faults(seed: int, tmp_path: Path, undisturbed: Callable[..., Path]) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    seen: set[int] = set()
    words = faulty_words("data.pace=0.06", "hang_timeout=5", *CALENDAR)
    dice = random.Random(f"soak {seed}")
    coming: list[str] = []
    done: list[str] = []
    first: Size | None = None
    last: Size | None = None
    job = start(words, tmp_path)
    began = time.monotonic()
    while job.process.poll() != 0:
        if job.process.poll() is not None:  # 75, or the agent was killed
            # 143: asked to in the first seconds of an attempt, before its ranks handle signals
            early = (143,) if done[-1:] == ["ask to stop"] else ()
            assert job.process.returncode in (75, -9, *early), job.text[-3000:]
            job.end()
            job = start(words, tmp_path)
        deadline = time.monotonic() + EVERY_S * dice.uniform(0.5, 1.5)
        while job.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        if job.process.poll() is None and time.monotonic() < began + MOST_S:
            last = size_of(job.process.pid)
            seen |= set(job.pids())
            first = first or last
            coming = coming or dice.sample(FAULTS, len(FAULTS))
            fault = coming.pop()
            if happen(fault, job, tmp_path / "run", dice):
                done.append(fault)
    minutes = (time.monotonic() - began) / 60
    print(f"{minutes:.1f} minutes, {len(done)} faults: { {fault: done.count(fault) for fault in FAULTS} }")
    assert_same_outcome(tmp_path / "run", undisturbed(RANKS, *faulty_words(*CALENDAR)))
    assert minutes > 5
    assert set(done) == set(FAULTS)
    left = set(os.listdir("/dev/shm")) - shared_memory
    assert not [name for name in left if any(str(pid) in name for pid in seen)]
    # the process that draws figures ends when it reads that its rank has: at once, but not before
    assert left_after(job.mark, 2) == {}
    assert first is not None
    assert last is not None
    print(f"the agent at first {first}, at last {last}")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_rank_does_not_grow(tmp_path: Path) -> None:
    """Five minutes without a fault: no descriptor, no thread, and no memory beyond 5 % more."""
    job = Job(
        faulty_words("train.steps=60000", "train.epochs=null", "checkpoint.every=100", "log.every=50"),
        tmp_path,
        2,
    )
    job.wait_for("step 2000/60000", timeout=300)
    pids = [job.process.pid, *job.rank_pids().values()]
    early = [size_of(pid) for pid in pids]
    deadline = time.monotonic() + 300
    late, readings = early, 0
    while job.process.poll() is None and time.monotonic() < deadline:
        time.sleep(2)
        try:
            late = [size_of(pid) for pid in pids]
        except (OSError, KeyError):
            break
        readings += 1
    steps, code = job.text.count("loss "), job.process.poll()
    job.end()
    print(f"{steps} log lines, {readings} readings; early {early}, late {late}")
    assert code in (None, 0), job.text[-3000:]
    assert readings >= 20
    for before, after in zip(early, late, strict=True):
        assert after.descriptors <= before.descriptors
        assert after.threads <= before.threads
        assert after.memory_mib <= 1.05 * before.memory_mib


def start(words: list[str], cwd: Path) -> Job:
    job = Job(words, cwd, RANKS, restarts=1000)
    job.wait_for("plan       steps")
    return job


def happen(fault: str, job: Job, run: Path, dice: random.Random) -> bool:
    ranks = sorted(job.rank_pids().values())
    if fault == "damage a checkpoint":
        saved = sorted(
            (run / "checkpoints").glob("step-*/state.pt"), key=lambda path: int(path.parent.name[5:])
        )
        if len(saved) < 2 or not ranks:  # the one before must be whole
            return False
        newest = saved[-1]
        if newest.parent.name == f"step-{LAST}":
            # the last evaluation may have replaced the best that the one before knows: the saved state then
            # names none until the evaluation comes again, and after that no more is saved
            return False
        with newest.open("r+b") as file:  # and then a rank, so that it is read
            file.seek(dice.randrange(newest.stat().st_size))
            file.write(b"\x55")
        return job.kill(dice.choice(ranks))
    if fault == "kill the agent":
        return job.kill(job.process.pid)
    if fault == "ask to stop":
        return job.kill(job.process.pid, signal.SIGTERM)
    number = signal.SIGSTOP if fault == "stop a rank" else signal.SIGKILL
    return bool(ranks) and job.kill(dice.choice(ranks), number)
