"""Asked to stop at any moment: all ranks at one step, a checkpoint, exit 75; gone on with, the same bits."""

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Job, assert_same_outcome, faulty_words, stopped_steps

TRIALS = [pytest.param(i, marks=[] if i == 0 else pytest.mark.faults) for i in range(20)]
SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP]
STALL = ["data.fault=sleep", "data.rank=1", "data.seconds=3"]
PLACES = [
    ["data.pace=0.04"],  # anywhere
    ["data.pace=0.04"],
    [*STALL, "data.step=0"],  # the first step
    [*STALL, "data.step=15"],  # a data stall
    ["task.fault=sleep", "task.place=evaluate", "task.rank=1", "task.seconds=3"],  # the first evaluation
]


@pytest.mark.parametrize("trial", TRIALS)
def test_one_agreed_step_a_checkpoint_and_75(
    tmp_path: Path, undisturbed: Callable[..., Path], trial: int
) -> None:
    ranks, number, place = 2 + trial % 2, SIGNALS[trial % 4], PLACES[trial % 5]
    dice = random.Random(f"stop {trial}")
    for attempt in range(5):
        cwd = tmp_path / str(attempt)
        cwd.mkdir()
        words = faulty_words(*place)
        job = Job(words, cwd, ranks)
        job.wait_for("plan       steps")
        if "sleep" in " ".join(place):
            while not (cwd / "happened.txt").exists() and job.process.poll() is None:
                time.sleep(0.02)
        time.sleep(dice.uniform(0, 1.2))
        signalled = time.monotonic()
        targets = {
            "agent": [job.process.pid],
            "worker": [dice.choice(sorted(job.rank_pids().values()) or [0])],
            "all": [job.process.pid, *job.rank_pids().values()],
        }[dice.choice(["agent", "worker", "all"])]
        for pid in targets:
            if pid:
                job.kill(pid, number)
        code = job.wait()
        if code != 0:
            break
    else:
        pytest.fail("every run had ended before its signal")
    assert code == 75, job.text[-3000:]
    assert time.monotonic() - signalled < 25 + 5, "within the grace time"
    assert "Traceback" not in job.text
    assert len(stopped_steps(job.text)) == 1, job.text
    newest = max(int(path.name[5:]) for path in (cwd / "run/checkpoints").glob("step-*"))
    assert stopped_steps(job.text) == [newest]
    again = Job(words, cwd, ranks)
    assert again.wait() == 0, again.text[-3000:]
    assert_same_outcome(cwd / "run", undisturbed(ranks, *faulty_words("data.pace=0.0")))


@pytest.mark.faults
@pytest.mark.parametrize("launcher", ["launch", "python"])
def test_a_closed_terminal_saves_and_stops_and_under_nohup_does_nothing(
    launcher: str, tmp_path: Path
) -> None:
    for under, code in (((), 75), (("nohup",), 0)):
        home = tmp_path / str(code)
        home.mkdir()
        job = Job(faulty_words("data.pace=0.05"), home, 2, launcher=launcher, under=under)
        job.wait_for_step(5)
        for pid in [job.process.pid, *job.rank_pids().values()]:
            job.kill(pid, signal.SIGHUP)
        assert job.wait() == code, job.text[-3000:]
        assert ("asked for by SIGHUP" in job.text) == (code == 75)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("launcher", "only_it", "pace", "seconds"),
    [
        ("launch", False, 0.1, 7),
        ("python", False, 0.1, 7),
        ("launch", True, 0.3, 7),
        pytest.param("launch", True, 0.1, 12, id="until after the last step"),
    ],
)
def test_a_job_that_was_suspended_goes_on(
    launcher: str, only_it: bool, pace: float, seconds: float, tmp_path: Path
) -> None:
    """For longer than `hang_timeout`: by Ctrl-Z, which reaches the launcher alone, or by a scheduler."""
    job = Job(faulty_words(f"data.pace={pace}", "hang_timeout=2"), tmp_path, 3, launcher=launcher)
    job.wait_for_step(5)
    pids = [job.process.pid] if only_it else job.pids()
    for pid in pids:
        job.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        job.kill(pid, signal.SIGCONT)
    assert job.wait() == 0, job.text[-3000:]
    assert "hang" not in job.text


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    job = Job(
        faulty_words("data.fault=sleep", "data.seconds=60", "data.step=9"), tmp_path, 1, launcher="python"
    )
    job.wait_for("step 5/40")
    time.sleep(0.5)
    job.kill(job.process.pid, signal.SIGTERM)
    time.sleep(1.5)
    assert job.process.poll() is None
    job.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(5) == 128 + signal.SIGTERM
    assert "SIGTERM again: stopped at once" in job.text


def test_where_no_step_ends_within_the_grace_time(tmp_path: Path) -> None:
    words = faulty_words("data.fault=sleep", "data.seconds=60", "data.step=9", "checkpoint.grace=2")
    job = Job(words, tmp_path, 1, launcher="python")
    job.wait_for("step 5/40")
    time.sleep(0.5)
    began = time.monotonic()
    job.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(20) == 143
    assert 1.5 < time.monotonic() - began < 6
    assert "no step ended within checkpoint.grace=2 s after SIGTERM" in job.text


SLOW_END = """
import time

from ddptrain.api import Observer


class SlowEnd(Observer):
    def end(self, event):
        time.sleep(30)
"""


@pytest.mark.faults
def test_what_is_saved_within_the_grace_time_is_said_where_figures_are_not_done(tmp_path: Path) -> None:
    (tmp_path / "slow_end.py").write_text(SLOW_END)
    slow = ["observers=[console]", "+observers.slow._target_=slow_end.SlowEnd"]
    job = Job(faulty_words("data.pace=0.05", "checkpoint.grace=3", *slow), tmp_path, 1, launcher="python")
    job.wait_for("step 5/40")
    job.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(20) == 75
    assert "all is saved; figures or trackers were not done within checkpoint.grace=3 s" in job.text
    assert list((tmp_path / "run/checkpoints").glob("step-*"))


@pytest.mark.faults
def test_a_signal_at_the_end_of_a_run_that_is_done(tmp_path: Path) -> None:
    """Nothing is lost, and it says so; the same command does what was left."""
    (tmp_path / "slow_end.py").write_text(SLOW_END)
    slow = ["observers=[console]", "+observers.slow._target_=slow_end.SlowEnd"]
    job = Job(faulty_words("checkpoint.grace=3", *slow), tmp_path, 1, launcher="python")
    job.wait_for("done:")
    job.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(20) == 75
    assert "asked for by SIGTERM: all is saved, figures are left" in job.text
    assert "all is saved; figures or trackers were not done within checkpoint.grace=3 s" in job.text
    assert json.loads((tmp_path / "run/summary.json").read_text())["outcome"] == "done"
    again = Job(faulty_words("observers=[console]"), tmp_path, 1, launcher="python")
    assert again.wait() == 0
    assert "this run is finished" in again.text


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.faults)])
def test_the_time_limit_is_a_stop_too(tmp_path: Path, ranks: int) -> None:
    words = faulty_words("data.pace=0.05", "train.time_limit=0.7")
    steps = []
    for _ in range(30):
        job = Job(words, tmp_path, ranks, launcher="python" if ranks == 1 else "launch")
        code = job.wait()
        steps += stopped_steps(job.text)
        if code == 0:
            break
        assert code == 75, job.text[-2000:]
        assert "asked for by train.time_limit" in job.text
    assert code == 0
    assert steps == sorted(set(steps))
    assert len(steps) >= 1


@pytest.mark.faults
def test_loader_workers_ignore_the_signal(tmp_path: Path) -> None:
    """A scheduler signals every process of a job; the workers must serve the last step."""
    words = [
        "recipe=cnn_cifar10",
        "data=shapes",
        "data.resident=false",
        "data.workers=2",
        "model.width=4",
        "train.steps=3000",
        "train.batch_size=32",
        "log.every=5",
        "run.dir=run",
        "observers=[console,jsonl,plots]",
    ]
    job = Job(words, tmp_path, 1, launcher="python")
    job.wait_for("step 5/3000")
    pids = job.pids()
    assert len(pids) >= 4, "the training, two workers, and what draws"
    for pid in pids:
        job.kill(pid, signal.SIGTERM)
    assert job.wait() == 75, job.text[-3000:]
    assert "Traceback" not in job.text
    assert stopped_steps(job.text)


@pytest.mark.faults
@pytest.mark.parametrize("launcher", ["python", "launch"])
def test_a_second_signal_when_all_is_saved_ends_as_stopped(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "slow_end.py").write_text(SLOW_END)
    slow = ["observers=[console]", "+observers.slow._target_=slow_end.SlowEnd"]
    job = Job(faulty_words("data.pace=0.05", *slow), tmp_path, 1, launcher=launcher)
    job.wait_for("step 5/40")
    job.kill(job.process.pid, signal.SIGTERM)
    time.sleep(3)
    assert job.process.poll() is None
    job.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(20) == 75
    assert "all is saved; figures or trackers were not done before SIGTERM came again" in job.text
    assert list((tmp_path / "run/checkpoints").glob("step-*"))
