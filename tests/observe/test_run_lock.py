"""A run's folder has one writer."""

import errno
import fcntl
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from shell import ddptrain

from ddptrain.errors import UserError
from ddptrain.observe import lock
from ddptrain.observe.lock import lock_folder, lost, unlock_folder
from ddptrain.observe.rundir import discard_unused, open_run
from ddptrain.tools.trackers.about import about
from ddptrain.tools.trackers.send import locked

FORK = multiprocessing.get_context("fork")
Start = Callable[..., tuple[int, Connection]]


def writer(folder: Path, answers: Connection, then: Callable[[], object]) -> None:
    """Takes the lock, or tells why not, and lives on until it is killed."""
    try:
        lock_folder(folder)
        then()
        answers.send("")
    except UserError as error:
        answers.send(str(error))
    signal.pause()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts writers: processes of their own, each with a line to its answer."""
    started = []

    def one(folder: Path, then: Callable[[], object] = lambda: None) -> tuple[int, Connection]:
        answer, answers = FORK.Pipe(duplex=False)
        process = FORK.Process(target=writer, args=(folder, answers, then))
        process.start()
        started.append(process)
        assert process.pid is not None
        return process.pid, answer

    yield one
    for process in started:
        process.kill()
        process.join()


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def test_a_second_writer_is_refused_and_told_of_the_first(tmp_path: Path, start: Start) -> None:
    first, answer = start(tmp_path)
    assert answer.recv() == ""
    began = time.monotonic()
    _, answer = start(tmp_path)
    said = answer.recv()
    assert said.startswith(f"run.dir={tmp_path}: process {first} on {socket.gethostname()} is training in it")
    assert "name another folder: run.dir=" in said
    assert 4.5 < time.monotonic() - began < 10, "it has waited for one that may be dying"
    kill(first)
    began = time.monotonic()
    third, answer = start(tmp_path)
    assert answer.recv() == ""
    assert time.monotonic() - began < 2, "the system lets go of a lock when its process ends"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (tmp_path / ".lock").read_text() == f"{socket.gethostname()} {third} {boot}"


@pytest.mark.parametrize("owner", ["elsewhere 7", "elsewhere 7 3a7f", f"{socket.gethostname()} 7 3a7f"])
def test_a_lock_of_another_host_is_waited_for_longer(tmp_path: Path, start: Start, owner: str) -> None:
    """Also where it had this one's name, as a pod of Kubernetes that was moved has."""
    first, answer = start(tmp_path)
    assert answer.recv() == ""
    (tmp_path / ".lock").write_text(owner)  # in place: the lock is on the file
    _, answer = start(tmp_path)
    assert not answer.poll(7), "a file server holds a dead host's lock for a while"
    kill(first)
    assert answer.recv() == ""


def test_and_the_message_names_its_file(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, answer = start(tmp_path)
    assert answer.recv() == ""
    (tmp_path / ".lock").write_text("elsewhere 7")
    monkeypatch.setattr(lock, "_LEASE_S", 0.5)
    with pytest.raises(
        UserError, match=r"process 7 on elsewhere .* If elsewhere is gone, delete .*/\.lock\.$"
    ):
        lock_folder(tmp_path)


def test_a_host_may_get_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_folder(tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed")
    assert lost(tmp_path) is None
    (tmp_path / ".lock").write_text("elsewhere 7")
    taken = lost(tmp_path)
    unlock_folder(tmp_path)
    assert taken is not None
    assert taken.why == "was taken by process 7 on elsewhere"


def test_a_second_writer_waits_for_one_that_is_dying(tmp_path: Path, start: Start) -> None:
    first, answer = start(tmp_path)
    assert answer.recv() == ""
    _, answer = start(tmp_path)
    assert not answer.poll(1.5)
    kill(first)
    assert answer.recv() == ""


@pytest.mark.parametrize("kind", ["forked", "executed"])
def test_a_child_that_outlives_the_writer_does_not_hold_the_lock(
    tmp_path: Path, start: Start, kind: str
) -> None:
    def child() -> None:
        if kind == "executed":
            process = subprocess.Popen(["sleep", "60"]).pid
        elif (process := os.fork()) == 0:
            signal.alarm(60)
            signal.pause()
        (tmp_path / "child").write_text(str(process))

    first, answer = start(tmp_path, child)
    assert answer.recv() == ""
    kill(first)
    try:
        _, answer = start(tmp_path)
        assert answer.recv() == ""
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_one_process_may_go_on_in_a_folder_of_its_own(tmp_path: Path, start: Start) -> None:
    _, answer = start(tmp_path, lambda: lock_folder(tmp_path))
    assert answer.poll(2)
    assert answer.recv() == ""


def test_a_lock_follows_its_folder_and_leaves_the_name_free(tmp_path: Path, start: Start) -> None:
    """As under run.resume=never."""
    (tmp_path / "run").mkdir()

    def rename() -> None:
        (tmp_path / "run").rename(tmp_path / "old")

    _, answer = start(tmp_path / "run", rename)
    assert answer.recv() == ""
    (tmp_path / "run").mkdir()
    _, answer = start(tmp_path / "run")
    assert answer.recv() == ""


def test_a_lock_is_no_content(tmp_path: Path, start: Start) -> None:
    for name in ("unused", "used"):
        open_run(tmp_path / name)
        _, answer = start(tmp_path / name)
        assert answer.recv() == ""
    (tmp_path / "used" / "config.yaml").write_text("")
    for name in ("unused", "used"):
        discard_unused(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
    assert (tmp_path / "used" / ".lock").exists()


def test_a_file_system_without_locks_is_only_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    logger = logging.getLogger("ddptrain.observe.lock")
    monkeypatch.setattr(logger, "warning", lambda text, *of: said.append(text % of))

    def none(file: int, kind: int) -> Any:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    lock_folder(tmp_path)
    [warning] = said
    assert str(tmp_path) in warning
    assert "No locks available" in warning


TRAIN = "recipe=cnn_digits device=cpu model.width=8 observers=[console,jsonl,plots] log.every=1 run.dir=mine"


@pytest.mark.long
def test_a_second_training_in_a_folder_is_refused(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-m", "ddptrain", *TRAIN.split(), "train.steps=1000000", "checkpoint.every=5"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert first.stderr is not None
        next(line for line in first.stderr if line.startswith("step 9/"))
        first.send_signal(signal.SIGSTOP)
        before = sorted((tmp_path / "mine").rglob("*"))
        holder = f"process {first.pid} on {socket.gethostname()}"
        for resume in ("auto", "never"):
            second = ddptrain(tmp_path, f"{TRAIN} train.steps=2 run.resume={resume}")
            assert second.code == 2, second.err
            assert f"ddptrain: run.dir=mine: {holder} is training in it" in second.err
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]
        assert sorted((tmp_path / "mine").rglob("*")) == before
    finally:
        first.kill()
        first.communicate()
    third = ddptrain(tmp_path, f"{TRAIN} train.steps=2 run.resume=never")
    assert third.code == 0, third.err
    assert len(list(tmp_path.glob("mine*/checkpoints"))) == 2


def test_files_are_shared_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(file: int, kind: int) -> Any:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / "config.yaml").write_text("recipe: toy")
    monkeypatch.setattr(fcntl, "flock", none)
    assert about(tmp_path, "mlflow").project == "toy"
    locked(tmp_path, "mlflow", fcntl.LOCK_EX).close()
