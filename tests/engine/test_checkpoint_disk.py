"""Saving meets the disk: the order of flushes and renames, disks that refuse, writing in the background."""

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.serialization  # what nobody may not import later
from toy import Fit

from ddptrain.api.observer import Observer, Saved
from ddptrain.api.world import World
from ddptrain.engine import checkpoint
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.plan import Plan
from ddptrain.engine.saved_checkpoint import MANIFEST, STATE, read, unpack
from ddptrain.errors import UserError
from ddptrain.testing import run_ranks

NOBODY = 65534


def state(step: int, numbers: int = 1000) -> dict[str, Any]:
    return {"model": {"w": torch.full((numbers,), float(step))}, "optimizer": {}, "step": step}


def refusal(checkpointer: Checkpointer, step: int, numbers: int = 1000) -> str:
    try:
        checkpointer.save(state(step, numbers), {"step": step})
        checkpointer.finish()
    except UserError as error:
        return str(error)
    raise AssertionError("it was saved")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_everything_is_on_the_disk_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """What a power cut leaves follows from this order: nothing that is renamed is not flushed yet."""
    events: list[tuple[str, ...]] = []
    flush, rename = os.fsync, os.rename

    def inner(path: str | os.PathLike[str]) -> str:
        return os.path.relpath(path, tmp_path).replace(f".{os.getpid()}", ".aside")

    def seen_flush(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)
        events.append(("flush", inner(path), str(path.stat().st_size) if path.is_file() else ""))

    def seen_rename(source: Any, target: Any) -> None:
        rename(source, target)
        events.append(("rename", inner(source), inner(target)))

    monkeypatch.setattr(os, "fsync", seen_flush)
    monkeypatch.setattr(os, "rename", seen_rename)
    folder = tmp_path / "checkpoints"
    checkpointer = Checkpointer(folder, keep=1, background=background)

    def written(path: Path, *renames: tuple[str, ...]) -> list[tuple[str, ...]]:
        aside = f"checkpoints/.{path.name}.aside"
        sizes = {name: str((path / name).stat().st_size) for name in (STATE, MANIFEST)}
        flushes = [("flush", f"{aside}/{name}", size) for name, size in sizes.items()]
        last = ("rename", aside, f"checkpoints/{path.name}")
        return [*flushes, ("flush", aside, ""), *renames, last, ("flush", "checkpoints", "")]

    first = checkpointer.save(state(1), {"step": 1})
    checkpointer.finish()
    assert events == [("flush", ".", ""), *written(first)]
    events.clear()
    second = checkpointer.save(state(2), {"step": 2})
    checkpointer.finish()
    assert events == [*written(second), ("rename", "checkpoints/step-1", "checkpoints/.step-1.aside")]
    checkpointer.save_best(state(2), {"step": 2})
    checkpointer.finish()
    events.clear()
    best = checkpointer.save_best(state(3), {"step": 3})
    checkpointer.finish()
    assert events == written(best, ("rename", "checkpoints/best", "checkpoints/best-before"))
    assert names(folder) == ["best", "best-before", "step-2"]


# -- a disk that refuses ---------------------------------------------------------------------------

FULL = """
import json, os, random, subprocess, sys
from pathlib import Path
import torch
import torch.utils.serialization  # what nobody may not import later
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.saved_checkpoint import read
from ddptrain.errors import UserError

disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", disk], check=True)
folder, draw, said = disk / "checkpoints", random.Random(0), []

def save(step, background):
    checkpointer = Checkpointer(folder, keep=3, background=background)
    state = {"model": {"w": torch.full((500_000,), float(step))}, "optimizer": {}, "step": step}
    try:
        checkpointer.save(state, {"step": step, "outputs": ["a" * 5000]})
        checkpointer.finish()
    except UserError as error:
        return str(error)

assert save(1, False) is None
for number in range(20):
    left = draw.randrange(2_000_000) if number else 2_003_000  # the last: enough for the state alone
    free = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - left)))
    said.append(save(2, number % 2 == 1))
    assert sorted(path.name for path in folder.iterdir()) == ["step-1"], said
    read(folder / "step-1")
    (disk / "filler").unlink()
assert save(2, False) is None
assert len(Checkpointer(folder, keep=3).steps()) == 2
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
read_only = save(3, False)
assert len(Checkpointer(folder, keep=3).steps()) == 2
print(json.dumps([said, read_only]))
"""


def test_a_full_or_read_only_disk_is_named_and_leaves_the_older_ones(tmp_path: Path) -> None:
    """A real one of 8 MiB, that is full at 20 different bytes."""
    alone = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*alone, "sh", "-c", mount]).returncode:
        pytest.skip("NOT SEEN: a full and a read-only disk; this user may not mount a file system")
    ended = subprocess.run(
        [*alone, sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    full, read_only = json.loads(ended.stdout)
    assert len(full) == 20
    refused = f"{tmp_path}/checkpoints/step-2: can't be saved (No space left on device): "
    for message in full:
        assert message.startswith(refused)
        assert "bytes needed" in message
        assert "free" in message
    assert "step-3: can't be saved (Read-only file system)" in read_only


@pytest.mark.parametrize("background", [False, True])
def test_a_file_that_may_not_grow_so_large_is_named(tmp_path: Path, background: bool) -> None:
    """A quota of a process, at 20 different bytes."""
    payload = Checkpointer(tmp_path / "free", 1).save(state(1, 100_000), {"step": 1}) / STATE

    def limited(world: World) -> list[str]:
        checkpointer = Checkpointer(tmp_path / "checkpoints", keep=2, background=background)
        checkpointer.save(state(1), {"step": 1})
        checkpointer.finish()
        said = []
        for number in range(20):
            limit = number * payload.stat().st_size // 20
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            said.append(refusal(checkpointer, 2, 100_000))
            assert names(tmp_path / "checkpoints") == ["step-1"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        checkpointer.save(state(2), {"step": 2})
        checkpointer.finish()
        return said

    [said] = run_ranks(limited, 1)
    for message in said:
        assert "step-2: can't be saved (File too large): 40" in message
    newest = Checkpointer(tmp_path / "checkpoints", keep=2).newest()
    assert newest is not None
    assert newest.manifest["step"] == 2


@pytest.mark.parametrize("where", ["checkpoints", "."])
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path, where: str) -> None:
    if where == "checkpoints":
        Checkpointer(tmp_path / where, keep=2).save(state(1), {"step": 1})
    tmp_path.chmod(0o755)  # that nobody gets as far as the folder
    (tmp_path / where).chmod(0o555)

    def as_nobody(world: World) -> str:
        os.chdir(tmp_path)
        if os.geteuid() == 0:  # who may write anywhere
            os.seteuid(NOBODY)
        return refusal(Checkpointer(Path("checkpoints"), keep=2), 2)

    [message] = run_ranks(as_nobody, 1)
    assert message.startswith("checkpoints/step-2: can't be saved (Permission denied): ")
    older = Checkpointer(tmp_path / "checkpoints", keep=2).steps()
    assert [read(path).manifest["step"] for path in older] == ([1] if where == "checkpoints" else [])


@pytest.mark.parametrize("steps", [[], [0]])
def test_what_can_not_be_renamed_leaves_the_best_before(steps: list[int], tmp_path: Path) -> None:
    """Between its two renames the second one fails: the first is taken back. steps: that are saved."""
    checkpointer = Checkpointer(tmp_path, keep=1)
    for step in steps:
        checkpointer.save(state(step), {"step": step})
    checkpointer.save_best(state(1), {"step": 1})
    rename = os.rename

    def fails(source: Any, target: Any) -> None:
        if Path(target).name == "best" and Path(source).name not in (".best.old", "best-before"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", fails)
        with pytest.raises(UserError, match="No space left"):
            checkpointer.save_best(state(2), {"step": 2})
    assert names(tmp_path) == ["best", *(f"step-{step}" for step in steps)]
    assert read(tmp_path / "best").manifest["step"] == 1


def test_a_folder_that_a_file_server_keeps_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS a folder can't be deleted while another process reads a file of it: a mirror, for one."""
    delete = shutil.rmtree

    def kept(folder: Path, **options: Any) -> None:
        if ".best.old" not in folder.name:
            delete(folder, **options)

    checkpointer = Checkpointer(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", kept)
        for step in range(1, 5):
            checkpointer.save_best(state(step), {"step": step})
    assert read(tmp_path / "best").manifest["step"] == 4
    checkpointer.recover()
    assert names(tmp_path) == ["best"]


# -- in the background -----------------------------------------------------------------------------


class Held:
    """Flushes that wait until they are let go, as on a slow disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_go, flush = threading.Event(), threading.Event(), os.fsync

        def slow(descriptor: int) -> None:
            self.begun.set()
            assert self.let_go.wait(30)
            flush(descriptor)

        monkeypatch.setattr(os, "fsync", slow)


def test_the_background_writes_the_same_bytes(tmp_path: Path) -> None:
    for name, background in (("fore", False), ("back", True)):
        checkpointer = Checkpointer(tmp_path / name, keep=2, background=background)
        for step in (1, 2, 3):
            checkpointer.save(state(step), {"step": step, "metrics": {"loss": 0.1}})
            checkpointer.save_best(state(step), {"step": step})
        checkpointer.finish()
        checkpointer.finish()  # nothing in flight: nothing to do
    assert names(tmp_path / "fore") == names(tmp_path / "back") == ["best", "step-2", "step-3"]
    for folder in names(tmp_path / "fore"):
        for file in (STATE, MANIFEST):
            assert (tmp_path / "fore" / folder / file).read_bytes() == (
                tmp_path / "back" / folder / file
            ).read_bytes()


def test_training_may_change_the_tensors_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    checkpointer = Checkpointer(tmp_path, keep=2, background=True)
    changing, facts = state(1), {"step": 1}
    path = checkpointer.save(changing, facts)
    changing["model"]["w"].zero_()
    changing["step"] = facts["step"] = 9
    assert not path.exists(), "it is still being written"
    held.let_go.set()
    checkpointer.finish()
    saved = read(path)
    assert torch.equal(unpack(saved)["model"]["w"], state(1)["model"]["w"])


def test_where_memory_does_not_allow_the_copy_a_save_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2, background=True)
    path = checkpointer.save(state(2), {"step": 1})
    checkpointer.finish()
    size = len(read(path).payload)
    held = Held(monkeypatch)
    monkeypatch.setattr(checkpoint, "free_memory", lambda: size)
    assert not checkpointer.save(state(2), {"step": 2}).exists()
    held.let_go.set()
    checkpointer.finish()
    monkeypatch.setattr(checkpoint, "free_memory", lambda: size - 1)
    assert checkpointer.save(state(2), {"step": 3}).is_dir()


def test_a_run_that_fails_waits_for_its_checkpoint_and_observers_are_told_of_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, told = Held(monkeypatch), list[tuple[int, bool]]()

    class Told(Observer):
        def saved(self, event: Saved) -> None:
            told.append((event.step, event.path.is_dir()))

    def steps(whole: range) -> Iterator[int]:
        for step in whole:
            if step == 5:
                assert held.begun.is_set()
                threading.Timer(0.3, held.let_go.set).start()
                raise MemoryError("of something else")
            if step == 3:
                held.let_go.set()
            if step == 4:
                held.let_go.clear()
            yield step

    fit = Fit(Plan(steps=8, train_size=40, batch_size=8, save_every=2, eval_every=100), background=True)
    fit.observers, fit.step_iterator = [Told()], steps
    with pytest.raises(MemoryError, match="of something else"):
        fit.run(World(), tmp_path / "checkpoints")
    assert names(tmp_path / "checkpoints") == ["step-2", "step-4"]
    assert told == [(2, True)]


def test_observers_are_told_at_the_first_log_line_after_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, told = Held(monkeypatch), list[int]()

    class Told(Observer):
        def saved(self, event: Saved) -> None:
            assert event.path.is_dir()
            told.append(event.step)

    def steps(whole: range) -> Iterator[int]:
        for step in whole:
            if step == 25:
                assert not told, "it is still being written"
                held.let_go.set()
            if step > 25 and not told:
                time.sleep(0.1)
            if step == 39:
                assert told == [20], "not with the next save"
            yield step

    plan = Plan(steps=60, train_size=40, batch_size=8, save_every=20, eval_every=100, log_every=1)
    fit = Fit(plan, background=True)
    fit.observers, fit.step_iterator = [Told()], steps
    fit.run(World(), tmp_path / "checkpoints")


def test_one_write_is_in_flight_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    checkpointer = Checkpointer(tmp_path, keep=2, background=True)
    checkpointer.save(state(1), {"step": 1})
    assert held.begun.wait(30)
    second = threading.Thread(target=checkpointer.save, args=(state(2), {"step": 2}))
    second.start()
    second.join(0.3)
    assert second.is_alive(), "it waits for the first"
    assert names(tmp_path) == [f".step-1.{os.getpid()}"]
    held.let_go.set()
    second.join(30)
    checkpointer.finish()
    assert names(tmp_path) == ["step-1", "step-2"]


@pytest.mark.parametrize("surfaces_at", ["save", "save_best", "finish"])
def test_an_error_in_the_background_surfaces_once(tmp_path: Path, surfaces_at: str) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "checkpoints"
    checkpointer = Checkpointer(folder, keep=2, background=True)
    assert checkpointer.save(state(1), {"step": 1}) == folder / "step-1"
    nexts = {
        "save": lambda: checkpointer.save(state(2), {"step": 2}),
        "save_best": lambda: checkpointer.save_best(state(2), {"step": 2}),
        "finish": checkpointer.finish,
    }
    with pytest.raises(UserError, match=r"step-1: can't be saved \(Not a directory\): .* bytes needed"):
        nexts[surfaces_at]()
    checkpointer.finish()
    (tmp_path / "file").unlink()
    (tmp_path / "file").mkdir()
    checkpointer.save(state(3), {"step": 3})
    checkpointer.finish()
    assert names(folder) == ["step-3"]


def test_a_program_that_ends_has_written_what_was_in_flight(tmp_path: Path) -> None:
    program = (
        "import sys, torch; from pathlib import Path; from ddptrain.engine.checkpoint import Checkpointer;"
        "Checkpointer(Path(sys.argv[1]), 1, background=True)"
        ".save({'model': {'w': torch.zeros(5_000_000)}, 'optimizer': {}, 'step': 1}, {'step': 1})"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert read(tmp_path / "step-1").manifest["step"] == 1
    assert names(tmp_path) == ["step-1"]
