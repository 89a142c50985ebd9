"""A rank that stalls or fails ends the job in time, and is named."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import FAULTY, Job, faulty_words

TIMEOUT_S = 4
HANGS = {
    "stopped": ["data.fault=stop"],
    "asleep in data": ["data.fault=sleep"],
    "asleep in backward": ["task.fault=sleep", "task.place=backward"],
    "endless loop": ["task.fault=loop"],
    "collective left out": ["task.fault=skip"],
    "asleep in evaluation": ["task.fault=sleep", "task.place=evaluate"],
}
CASES = [(kind, rank) for rank in (0, 1, 2, 1) for kind in HANGS]
MARKED = [
    pytest.param(kind, rank, i, marks=[] if i == 7 else pytest.mark.faults)
    for i, (kind, rank) in enumerate(CASES)
]


@pytest.mark.parametrize(("kind", "rank", "number"), MARKED)
def test_a_hang_is_ended_and_the_rank_named(tmp_path: Path, kind: str, rank: int, number: int) -> None:
    section = HANGS[kind][0].partition(".")[0]
    words = faulty_words(
        *HANGS[kind],
        f"{section}.rank={rank}",
        f"{section}.step=12",
        f"hang_timeout={TIMEOUT_S}",
        "data.pace=0.02",
    )
    job = Job(words, tmp_path, 3)
    job.wait_for("step 10/40")
    while not (tmp_path / "happened.txt").exists() and job.process.poll() is None:
        time.sleep(0.02)
    began = time.monotonic()
    code = job.wait(TIMEOUT_S + 60)
    seconds = time.monotonic() - began
    assert code == 76, job.text[-4000:]
    assert seconds < TIMEOUT_S + 10, f"{seconds:.1f} s"
    blamed = re.findall(r"^rank (\d) (?:holds it up|\(pid)", job.text, re.MULTILINE)
    assert blamed == [str(rank)], job.text[-4000:]
    assert job.text.count("the job has stood still for hang_timeout=4 s") == 1
    step = r"step \d+, [a-z ]+"
    assert re.search(rf"rank {rank} .* at {step}", job.text)
    if kind != "stopped":
        assert "faulty.py" in job.text or kind == "collective left out", "its stack"
    assert len(re.findall(rf"^rank \d waits for it at {step}", job.text, re.MULTILINE)) == 2
    deadline = time.monotonic() + 2
    while job.pids() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert job.pids() == []


def test_a_lone_process_is_watched_too(tmp_path: Path) -> None:
    words = faulty_words("data.fault=sleep", "data.step=12", "hang_timeout=3")
    job = Job(words, tmp_path, 1, launcher="python")
    assert job.wait(60) == 76
    assert "rank 0 holds it up at step 12, waiting for a batch. Its stack:" in job.text
    assert "time.sleep" in job.text


@pytest.mark.long
def test_slow_work_on_one_rank_is_no_hang(tmp_path: Path) -> None:
    """A first step, and each report, not the first one alone, that take longer than hang_timeout."""
    words = faulty_words(
        "data.fault=sleep", "data.seconds=5", "data.step=0", "data.once=false", "hang_timeout=2",
        "task.fault=sleep", "task.place=report", "task.seconds=5", "task.once=false", "train.steps=10",
        "train.eval_every=5",
    )  # fmt: skip
    began = time.monotonic()
    job = Job(words, tmp_path, 2)
    assert job.wait(120) == 0, job.text[-3000:]
    assert time.monotonic() - began > 15


@pytest.mark.faults
@pytest.mark.parametrize("ends_by", ["", "train.time_limit=1"])
def test_a_slow_disk_at_the_end_is_no_hang(tmp_path: Path, ends_by: str) -> None:
    """The last checkpoint is written in the background, and waited for."""
    words = (
        "recipe=cnn_digits device=cpu train.steps=4 checkpoint.every=4 hang_timeout=1 run.dir=run"
        f" observers=[console] --config-dir={FAULTY} +observers.slow._target_=faulty.SlowDisk"
        " +observers.slow.seconds=2"
    )
    longer = f"{ends_by} train.steps=100000 checkpoint.every=20" if ends_by else ""
    line = [sys.executable, "-m", "ddptrain", *words.split(), *longer.split()]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == (75 if ends_by else 0), done.stderr[-3000:]


FAILURES = {
    "config": ["+train.typo=1"],
    "data": ["data.fault=raise", "data.step=12"],
    "forward": ["task.fault=raise", "task.step=12"],
    "backward": ["task.fault=raise", "task.step=12", "task.place=backward"],
    "save": ["task.fault=raise", "task.place=save"],
    "eval": ["task.fault=raise", "task.place=evaluate"],
    "end": ["task.fault=raise", "task.place=report", "train.eval_every=100"],
}


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("place", FAILURES)
def test_a_ranks_own_message_comes_last_and_others_are_quiet(tmp_path: Path, place: str, ranks: int) -> None:
    rank = 0 if place == "end" else ranks - 1  # the report is rank 0's
    section = FAILURES[place][0].partition(".")[0]
    words = FAILURES[place] + ([f"{section}.rank={rank}"] if place != "config" else [])
    job = Job(faulty_words(*words), tmp_path, ranks)
    if place != "config":
        while not (tmp_path / "happened.txt").exists() and job.process.poll() is None:
            time.sleep(0.02)
    began = time.monotonic()
    code = job.wait(60)
    assert time.monotonic() - began < 10
    lines = [re.sub(r"^\[rank\d\]: ", "", line) for line in job.text.splitlines() if line.strip()]
    if place == "config":
        assert code == 2
        assert lines[-1].startswith("ddptrain: train.typo: there is no such key in train.")
        assert len(lines) == 1
        return
    assert code == 1, job.text[-3000:]
    assert job.text.count("Traceback (most recent call last)") == 1, job.text[-5000:]
    message = next(i for i, line in enumerate(lines) if line.startswith("ZeroDivisionError: this recipe was"))
    assert len(lines) - message <= 2, lines[message:]  # launch says which rank it was
    assert all(f"rank {rank}" in line for line in lines[message + 1 :])
    assert "another rank is gone" not in job.text
