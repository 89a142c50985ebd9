"""Ranks that ``launch`` forks: they are as those that torchrun starts, and end as they do."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import FAULTY, Job, launch
from torch.distributed.run import get_args_parser

from ddptrain.verbs.launch import OF_TORCHRUN

TWO = ["--nproc-per-node=2"]
ENDLESS = [*FAULTY, "train.steps=100000", "data.pace=0.01"]


def trained(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The metrics of a run's steps without their times, and its environment."""
    lines = [json.loads(line) for line in (folder / "r/metrics.jsonl").read_text().splitlines()]
    kept = [{key: line[key] for key in ("step", "split", "loss") if key in line} for line in lines]
    return kept, json.loads((folder / "r/environment.json").read_text())


def test_a_forked_rank_is_as_one_that_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchrun itself, where PYTHON_EXEC names the interpreter: the same bits, threads and log files."""
    found = []
    for how in ("forked", "started"):
        folder = tmp_path / how
        folder.mkdir()
        if how == "started":
            monkeypatch.setenv("PYTHON_EXEC", sys.executable)
        logs = ["--redirects=0:1,1:3", "--tee=0:2", f"--log-dir={folder}/logs"]
        code, said = launch(folder, [*TWO, *logs], [*FAULTY, "train.steps=12"]).wait()
        assert code == 0, said
        assert "[default0]:done: " in said  # torchrun's prefix of a line that it copies
        (attempt,) = (folder / "logs").glob("*/attempt_0")
        sizes = {str(path.relative_to(attempt)): path.stat().st_size > 0 for path in attempt.glob("*/std*")}
        found.append((*trained(folder), sizes))
    assert found[0] == found[1]
    assert found[0][2] == {
        "0/stdout.log": False,
        "0/stderr.log": True,
        "1/stdout.log": False,
        "1/stderr.log": False,
    }


def test_what_forks_the_ranks_has_one_thread_and_no_driver(tmp_path: Path) -> None:
    """Or the ranks would inherit locks that nobody opens, and a CUDA that can't be used."""
    job = launch(tmp_path, TWO, ENDLESS)
    job.wait_for("step 5/")
    prefork = job.prefork()
    assert len(os.listdir(f"/proc/{prefork}/task")) == 1
    assert "libcuda.so" not in Path(f"/proc/{prefork}/maps").read_text()
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in job.ranks()}
    assert names == {"ddptrain-rank0", "ddptrain-rank1"}
    stop_all(job, signal.SIGTERM)


def stop_all(job: Job, number: signal.Signals) -> None:
    """A signal to every process of the job, as some schedulers send it; the ranks save."""
    for pid in job.living():
        os.kill(pid, number)
    code, said = job.wait()
    assert code == 75, said
    assert not job.left_after(2.0)


@pytest.mark.faults
def test_ranks_outlive_what_has_forked_them_and_a_restart_says_that_it_is_gone(tmp_path: Path) -> None:
    job = launch(tmp_path, [*TWO, "--max-restarts=2"], ENDLESS)
    job.wait_for("step 5/")
    os.kill(job.prefork(), signal.SIGKILL)
    seen = len(re.findall("^step ", job.log.read_text(), re.MULTILINE))
    deadline = time.monotonic() + 60
    while len(re.findall("^step ", job.log.read_text(), re.MULTILINE)) < seen + 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(job.ranks()[0], signal.SIGKILL)
    code, said = job.wait()
    assert code == 1
    assert "the process that forks the ranks is gone" in said
    assert not job.left_after(2.0)


@pytest.mark.long
def test_exit_codes_come_through_where_sigchld_is_ignored(tmp_path: Path) -> None:
    """As some daemons leave it to what they start."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        job = launch(tmp_path, TWO, [*FAULTY, "train.steps=6"])
    finally:
        signal.signal(signal.SIGCHLD, before)
    code, said = job.wait()
    assert code == 0, said
    assert "done: " in said


@pytest.mark.faults
def test_a_rank_that_hears_no_signal_is_killed_and_named(tmp_path: Path) -> None:
    job = launch(tmp_path, TWO, ENDLESS)
    job.wait_for("step 5/")
    os.kill(job.ranks()[0], signal.SIGSTOP)
    job.launcher.send_signal(signal.SIGTERM)
    code, said = job.wait()
    assert code in (76, 137), said
    assert re.search(r"rank 0 on \S+ was killed by SIGKILL", said), said
    assert "Traceback" not in said
    assert not job.left_after(2.0)


@pytest.mark.faults
def test_ranks_left_by_a_crash_are_killed_after_the_shutdown_timeout(tmp_path: Path) -> None:
    """Not after torch's 30 s: a longer one is for those that are still writing."""
    job = launch(tmp_path, [*TWO, "--shutdown-timeout=3"], ENDLESS)
    job.wait_for("step 5/")
    first, second = job.ranks()
    os.kill(first, signal.SIGSTOP)
    began = time.monotonic()
    os.kill(second, signal.SIGKILL)
    code, said = job.wait()
    assert 2.5 < time.monotonic() - began < 12
    assert code == 137, said
    assert not job.left_after(2.0)


@pytest.mark.faults
def test_signals_that_leave_no_time_to_save_are_said_to(tmp_path: Path) -> None:
    """A second one ends torch's first wait for the ranks, and a third one its last."""
    job = launch(tmp_path, TWO, [*FAULTY, "data.fault=sleep", "data.seconds=60", "data.step=9"])
    job.wait_for("step 5/40")
    time.sleep(0.5)
    for pause in (0.5, 2.0, 0.0):
        job.launcher.send_signal(signal.SIGINT)
        time.sleep(pause)
    code, said = job.wait()
    assert code == 130, said
    assert "stopped by SIGINT at once, while ranks were saving" in said
    assert not job.left_after(2.0)


def test_the_options_that_are_known_without_torch_are_torchruns() -> None:
    theirs = {
        name: action.nargs != 0 for action in get_args_parser()._actions for name in action.option_strings
    }
    for name, takes_a_value in OF_TORCHRUN.items():
        assert theirs[name] == takes_a_value
        assert name[:2] + name[2:].replace("-", "_") in theirs
