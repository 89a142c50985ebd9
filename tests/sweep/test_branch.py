"""A folder that goes on from another job's checkpoint: whole or not there, wherever a kill falls."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from ddptrain.errors import UserError
from ddptrain.sweep.branch import best_step, branch, clear, manifests

FILES = {
    "checkpoints/step-5/manifest.json": '{"step": 5}',
    "checkpoints/step-5/state.pt": "five",
    "checkpoints/step-7/manifest.json": '{"step": 7}',
    "checkpoints/step-7/state.pt": "seven",
    "checkpoints/step-7/shards/__0_0.distcp": "part",
    "checkpoints/best/manifest.json": '{"step": 6}',
    "checkpoints/best/state.pt": "six",
    "checkpoints/.step-9.123/state.pt": "half of nine",
    "tensorboard/events.1": "events",
    "metrics.jsonl": '{"step": 7}\n',
    **dict.fromkeys(
        ("output.txt", "log.txt", "summary.json", "config.yaml", "asked.jsonl", ".lock"), "its own"
    ),
}
TAKEN = [
    name for name in FILES if "step-7" in name or name.startswith(("checkpoints/best", "tensor", "metrics"))
]


def made(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def held(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_what_a_run_goes_on_from_is_taken_and_nothing_else(tmp_path: Path) -> None:
    trunk = made(tmp_path / "000", FILES)
    assert list(manifests(trunk)) == [5, 7]
    assert best_step(trunk) == 6
    job = made(
        tmp_path / "001", {"output.txt": "an attempt that failed", "checkpoints/.step-1.9/state.pt": "1"}
    )
    branch(trunk, 7, job)
    assert held(job) == {**{name: FILES[name] for name in TAKEN}, "output.txt": "an attempt that failed"}
    assert held(trunk) == FILES
    (job / "metrics.jsonl").open("a").write("more\n")
    shutil.rmtree(job / "checkpoints")
    assert held(trunk) == FILES, "the trunk's files are its own"


def branch_and_die(trunk: Path, job: Path, moment: int) -> NoReturn:
    """End this process before it does that to the disk, counted from 0; with 0 where there is no more."""

    def count(event: str, _: object) -> None:
        nonlocal moment
        if event.startswith(("os.", "shutil.", "open")):
            moment -= 1
            if moment == -1:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(count)
        branch(trunk, 7, job)
        os._exit(0)
    finally:
        os._exit(1)


def test_a_kill_leaves_a_branch_or_none(tmp_path: Path) -> None:
    """At each thing that is done to the disk, in a process that ends there."""
    outcomes = []
    for moment in range(1000):
        home = tmp_path / str(moment)
        trunk, job = made(home / "000", FILES), home / "001"
        job.mkdir()
        child = os.fork()
        if child == 0:
            branch_and_die(trunk, job, moment)
        _, status = os.waitpid(child, 0)
        outcomes.append((job / "checkpoints").exists())
        if outcomes[-1]:
            assert list(manifests(job)) == [7]
            assert held(job).items() >= {name: FILES[name] for name in TAKEN}.items()
        else:
            assert manifests(job) == {}
            branch(trunk, 7, job)
            assert held(job) == {name: FILES[name] for name in TAKEN}
        clear(job)
        assert not (job / ".shared").exists()
        if status == 0:
            break
    assert outcomes == sorted(outcomes)
    assert status == 0
    assert outcomes.count(False) > 10


def test_a_disk_without_links_and_one_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    trunk, job = made(tmp_path / "000", FILES), tmp_path / "001"
    monkeypatch.setattr(os, "link", refuse)
    branch(trunk, 7, job)
    assert held(job) == {name: FILES[name] for name in TAKEN}
    blocked = tmp_path / "002"
    blocked.write_text("a file where a folder should be")
    with pytest.raises(UserError, match=r"sweep\.dir=.*002: can't be written"):
        branch(trunk, 7, blocked)


def test_what_can_not_be_read_is_no_checkpoint(tmp_path: Path) -> None:
    folder = made(
        tmp_path, {"checkpoints/step-3/manifest.json": '{"step": 3', "checkpoints/step-x/manifest.json": "{}"}
    )
    assert manifests(folder) == {}
    assert best_step(folder) == 0
    (folder / "checkpoints/step-3/manifest.json").write_text(json.dumps({"step": 3}))
    assert list(manifests(folder)) == [3]
