"""A rank that is gone, or out of memory, whatever the others' main threads do meanwhile."""

import re
import time
from pathlib import Path

import pytest
from running import Job, faulty_words


@pytest.mark.faults
@pytest.mark.parametrize("launcher", ["launch", pytest.param("torchrun", marks=pytest.mark.faults)])
def test_the_others_leave_though_no_collective_tells_them(tmp_path: Path, launcher: str) -> None:
    """One of NCCL's waits for a killed rank for ever; here the main thread is asleep."""
    words = faulty_words("task.fault=sleep", "task.rank=0", "task.step=12", "checkpoint.grace=100")
    job = Job(words, tmp_path, 2, launcher=launcher)
    while not (tmp_path / "happened.txt").exists() and job.process.poll() is None:
        time.sleep(0.02)
    time.sleep(3.0)  # a rank hears of the others, and looks for them, every second
    gone = job.rank_pids()[1]
    job.kill(gone)
    code = job.wait(60)
    assert re.search(
        rf"^ddptrain: rank 0: another rank is gone: rank 1 \(pid {gone} on .*\)\.$", job.text, re.M
    )
    assert "asked for by SIGTERM" not in job.text, "what torchrun sends then is no wish to stop"
    assert "checkpoint.grace" not in job.text
    assert code == (137 if launcher == "launch" else 1)


@pytest.mark.faults
def test_what_is_being_written_meanwhile_is_finished_first(tmp_path: Path) -> None:
    """In the background: the next attempt goes on from it."""
    slow = ["observers=[console]", "+observers.slow._target_=faulty.SlowDisk", "+observers.slow.seconds=4"]
    fault = ["task.fault=sleep", "task.rank=0", "task.step=12"]
    job = Job(faulty_words(*fault, *slow, "checkpoint.every=12", "checkpoint.grace=100"), tmp_path, 2)
    while not (tmp_path / "happened.txt").exists() and job.process.poll() is None:
        time.sleep(0.02)
    written = tmp_path / "run/checkpoints/step-12"
    time.sleep(3.0)  # as above
    assert not written.exists()
    job.kill(job.rank_pids()[1])
    assert job.wait(100) == 137
    assert written.is_dir(), job.text
    assert "rank 0: another rank is gone: rank 1" in job.text


FEWER = (
    "train.micro_batch=6 (now 12), or train.micro_batch=auto, which finds the number;"
    " the global batch stays 24."
)
REMEDIES = {
    "forward": FEWER,
    "backward": FEWER,
    "evaluate": "train.eval_batch_size=8 (now 16).",
}


@pytest.mark.parametrize(
    "place",
    [pytest.param(place, marks=[] if place == "evaluate" else pytest.mark.faults) for place in REMEDIES],
)
def test_out_of_memory_is_one_message_that_costs_no_restart(tmp_path: Path, place: str) -> None:
    fault = ["task.fault=memory", "task.rank=1", "task.step=12", f"task.place={place}", "task.once=false"]
    job = Job(faulty_words(*fault), tmp_path, 2, restarts=2)
    assert job.wait() == 2, job.text[-3000:]
    last = job.text.splitlines()[-1]
    doing = "evaluating a batch" if place == "evaluate" else place
    assert re.match(rf"ddptrain: rank 1 at step 12, {doing}: .*you tried to allocate \d+ bytes", last), last
    assert last.endswith(REMEDIES[place])
    assert "Traceback" not in job.text
    assert job.text.count("ddptrain launch: ") == 1, "no restart, and nothing after the message"
