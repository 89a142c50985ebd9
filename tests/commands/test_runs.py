"""Whole runs, started as a user starts them: what they leave behind, and what a second start does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from compare import assert_same
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.observe.changes import note_changes
from ddptrain.observe.rundir import begun_by_this_job, note_job

SMALL = ["recipe=cnn_cifar10", "data=shapes", "data.source.train=300", "data.source.valid=90", "device=cpu",
         "train.batch_size=64", "train.epochs=3", "log.every=5"]  # fmt: skip


def start(folder: Path, *arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m"]
    if ranks:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, "ddptrain", *arguments], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip


def only_run(folder: Path) -> Path:
    [run] = (folder / "runs/cnn_cifar10").iterdir()
    return run


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_run_leaves_one_folder_with_everything_in_it(tmp_path: Path, ranks: int) -> None:
    done = start(tmp_path, *SMALL, ranks=ranks)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert {p.name for p in run.iterdir()} == {
        "config.yaml", "command.txt", "environment.json", "log.txt", "metrics.jsonl", "tensorboard",
        "checkpoints", "plots", "summary.json", "times.json", ".lock",
    }  # fmt: skip
    assert {p.name for p in (run / "plots").iterdir()} == {"curves.png", "confusion.png"}
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step-10", "step-15", "best"}

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["split"] == "train"]
    assert [line["step"] for line in trained] == [5, 10, 15]
    assert trained[-1]["loss"] < trained[0]["loss"]
    assert [line["step"] for line in lines if line["split"] == "valid"] == [5, 10, 15]

    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == "done"
    assert summary["metrics"]["accuracy"] == lines[-1]["accuracy"]
    assert summary["samples_per_s"] > 0
    environment = json.loads((run / "environment.json").read_text())
    assert environment["world_size"] == max(ranks, 1)
    assert "nproc-per-node=2" in (run / "command.txt").read_text() or not ranks

    log = done.stderr
    for said in ("device     cpu (asked for)", "precision  fp32", "batch      64 global", "accuracy"):
        assert log.count(said) >= 1, said
    assert log.count("device     ") == 1  # rank 0 alone speaks

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()
    assert {"train/loss", "train/lr", "valid/accuracy", "perf/samples_per_s"} <= set(tags["scalars"])
    assert {"train/samples", "valid/confusion"} <= set(tags["images"])
    assert "hparam/accuracy" in tags["scalars"]
    assert [event.step for event in events.Scalars("train/loss")] == [5, 10, 15]

    again = start(tmp_path, "evaluate", f"run={run}", "checkpoint=last", ranks=1 if ranks else 2)
    assert again.returncode == 0, again.stderr
    metrics = json.loads(again.stdout)
    assert metrics["step"] == 15
    assert metrics["accuracy"] == summary["metrics"]["accuracy"]
    assert metrics["loss"] == pytest.approx(summary["metrics"]["loss"], rel=1e-12)


def test_the_same_command_goes_on_where_a_run_was_stopped(tmp_path: Path) -> None:
    """Stopped by SIGKILL in the middle; ends with the bits of a run that was not."""
    command = [*SMALL, "checkpoint.every=1", "log.every=1"]
    assert start(tmp_path, *command, "run.dir=whole").returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "ddptrain", *command, "run.dir=stopped"], cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 7/"):
            process.kill()
    process.wait()
    again = start(tmp_path, *command, "run.dir=stopped")
    assert again.returncode == 0
    assert "resumed    stopped/checkpoints/step-" in again.stderr
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert (whole / "metrics.jsonl").read_bytes() == (stopped / "metrics.jsonl").read_bytes()
    states = [unpack(read(run / "checkpoints/step-15")) for run in (whole, stopped)]
    assert_same(*states)
    events = EventAccumulator(str(tmp_path / "stopped/tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 16))

    finished = start(tmp_path, *command, "run.dir=stopped")
    assert finished.returncode == 0
    assert "this run is finished" in finished.stderr


@pytest.mark.long
def test_never_resuming_keeps_the_old_run_beside_the_new(tmp_path: Path) -> None:
    command = [*SMALL, "train.steps=2", "run.dir=mine"]
    (tmp_path / "disk").mkdir()
    (tmp_path / "mine").symlink_to("disk")
    assert start(tmp_path, *command).returncode == 0
    assert start(tmp_path, *command, "run.resume=never").returncode == 0
    assert len(list(tmp_path.glob("disk*/checkpoints/step-2"))) == 2
    assert (tmp_path / "mine").is_symlink()


def test_a_job_that_is_requeued_is_the_same_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun --standalone and launch make an id of their own at each start."""
    for variable in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(variable, raising=False)
    assert not begun_by_this_job(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    note_job(tmp_path)
    assert not begun_by_this_job(tmp_path), "typed again"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    assert begun_by_this_job(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert not begun_by_this_job(tmp_path)
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert not begun_by_this_job(tmp_path), "torchrun without an id, in another job"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert begun_by_this_job(tmp_path)


def test_a_run_that_goes_on_keeps_what_it_has_started_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def tree(weights: str | None, lr: float) -> dict[str, Any]:
        return {"init": {"weights": weights, "skip": []}, "optim": {"lr": lr}}

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree("a.pt", 1.0)))
    assert note_changes(tmp_path, tree("a.pt", 2.0), 3) == tree("a.pt", 2.0)
    assert "init" not in caplog.text
    assert note_changes(tmp_path, tree("b.pt", 2.0), 3) == tree("a.pt", 2.0)
    assert "init.*: has no effect, for the run goes on from step 3" in caplog.text
    assert note_changes(tmp_path, tree("b.pt", 2.0), 0) == tree("b.pt", 2.0), "before the first step"
    lines = (tmp_path / "changes.jsonl").read_text().splitlines()
    for damaged in ("", "[]", "optim: 1", "{"):  # a disk was full, or the machine lost its power
        (tmp_path / "config.yaml").write_text(damaged)
        assert note_changes(tmp_path, tree("b.pt", 2.0), 3) == tree("b.pt", 2.0)
    assert (tmp_path / "changes.jsonl").read_text().splitlines() == lines
    assert [json.loads(line)["changed"] for line in lines] == [{"optim.lr": [1.0, 2.0]}] * 2


@pytest.mark.long
def test_a_job_that_starts_again_goes_on_with_what_it_began_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM requeues the same words; and an attempt may have ended before it had put the old run aside."""
    command = [*SMALL, "train.steps=2", "run.dir=mine", "run.resume=never"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert start(tmp_path, *command).returncode == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "this run is finished" in start(tmp_path, *command).stderr
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert "this run is finished" not in start(tmp_path, *command).stderr
    assert len(list(tmp_path.glob("mine*/checkpoints/step-2"))) == 2


def test_a_diverged_run_exits_4(tmp_path: Path) -> None:
    done = start(tmp_path, *SMALL, "optim=sgd", "optim.lr=1e12")
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    assert "the training has diverged" in done.stderr
    assert "of classifier.bias" in done.stderr or "the output of " in done.stderr or "the loss" in done.stderr
    [evidence] = only_run(tmp_path).glob("nonfinite-step-*.json")
    [rank] = json.loads(evidence.read_text())["ranks"]
    assert rank["first"]
    assert all(0 <= sample < 10_000 for sample in rank["samples"])
    assert json.loads((only_run(tmp_path) / "summary.json").read_text())["outcome"] == "diverged"


def test_ranks_that_diverge_end_together_with_their_files_written(tmp_path: Path) -> None:
    done = start(tmp_path, *SMALL, "optim=sgd", "optim.lr=1e12", "run.dir=run", ranks=2)
    assert done.returncode == 1  # torchrun's own
    assert done.stderr.count("the training has diverged") == 1
    assert "exitcode  : 4" in done.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["outcome"] == "diverged"


@pytest.mark.long
def test_starting_from_another_runs_checkpoint_leaves_that_run_alone(tmp_path: Path) -> None:
    command = [*SMALL, "checkpoint.every=2", "checkpoint.keep=9", "train.steps=8"]
    assert start(tmp_path, *command, "run.dir=base").returncode == 0
    kept = sorted(p.name for p in (tmp_path / "base/checkpoints").iterdir())
    branch = start(tmp_path, *command, "run.dir=branch", "run.resume=base/checkpoints/step-4")
    assert branch.returncode == 0
    assert "resumed    base/checkpoints/step-4" in branch.stderr
    assert sorted(p.name for p in (tmp_path / "base/checkpoints").iterdir()) == kept
    again = start(
        tmp_path, *command, "run.dir=branch", "run.resume=base/checkpoints/step-4", "train.steps=10"
    )
    assert "resumed    branch/checkpoints/step-8" in again.stderr  # its own come first: a restart goes on


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ddptrain", *SMALL, "log.every=1", "run.dir=run", "train.epochs=99"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
        # a shell's background job ignores SIGINT, and so would its children, these tests included
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("step 7/"):
            process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 75
    assert "start this again with run.dir=run" in said[-1]
    assert not [line for line in said if "Traceback" in line]
    assert json.loads((tmp_path / "run/summary.json").read_text())["outcome"] == "stopped"


def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    done = start(tmp_path, "recipe=cnn_cifar10", "data=imagefolder", "data.root=nowhere", "device=cpu")
    assert done.returncode == 2
    assert list((tmp_path / "runs/cnn_cifar10").iterdir()) == []
