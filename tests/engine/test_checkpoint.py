"""A checkpoint is whole or absent, and damage is noticed (design promise 5)."""

import json
import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Fit, plain, with_noise

from ddptrain.api.world import World
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.plan import Plan
from ddptrain.engine.saved_checkpoint import MANIFEST, STATE, LoadedCheckpoint, read, unpack
from ddptrain.errors import UserError


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3,), float(step))}, "optimizer": {}, "step": step}


def saved(folder: Path, *steps: int, keep: int = 2) -> Checkpointer:
    checkpointer = Checkpointer(folder, keep)
    for step in steps:
        checkpointer.save(state(step), {"step": step})
    return checkpointer


def test_the_newest_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path, 2, 9, 10, 100)
    assert [path.name for path in checkpointer.steps()] == ["step-10", "step-100"]
    newest = checkpointer.newest()
    assert newest is not None
    assert unpack(newest)["step"] == 100
    assert newest.manifest["step"] == 100
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-100"]  # nothing left aside


@pytest.mark.skipif(sys.platform != "linux", reason="a nice value is the process's")
def test_the_thread_that_writes_lets_others_go_first(tmp_path: Path) -> None:
    before = writers()
    checkpointer = Checkpointer(tmp_path, 2, background=True)
    checkpointer.save(state(1), {"step": 1})
    checkpointer.finish()
    own, [writer] = os.getpriority(os.PRIO_PROCESS, 0), writers() - before
    assert os.getpriority(os.PRIO_PROCESS, writer) == min(own + 10, 19)


def writers() -> set[int]:
    named = (one for one in threading.enumerate() if one.name.startswith("checkpoint"))
    return {one.native_id for one in named if one.native_id is not None}


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "no state", "no manifest", "bad manifest"])
def test_a_damaged_one_is_passed_over_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = saved(tmp_path, 1, 2)
    spoil(tmp_path / "step-2", damage)
    warnings: list[str] = []
    monkeypatch.setattr(
        "ddptrain.engine.saved_checkpoint.log.warning", lambda text, *args: warnings.append(text % args)
    )
    newest = checkpointer.newest()
    assert newest is not None
    assert newest.path.name == "step-1"
    assert len(warnings) == 1
    assert "step-2" in warnings[0]


def spoil(path: Path, damage: str) -> None:
    payload = bytearray((path / STATE).read_bytes())
    if damage == "flip":
        payload[len(payload) // 2] ^= 1
        (path / STATE).write_bytes(payload)
    elif damage == "cut":
        (path / STATE).write_bytes(payload[:-1])
    elif damage == "empty":
        (path / STATE).write_bytes(b"")
    elif damage == "no state":
        (path / STATE).unlink()
    elif damage == "no manifest":
        (path / MANIFEST).unlink()
    else:
        (path / MANIFEST).write_text('{"files": 3')


def test_where_all_are_damaged_it_stops_instead_of_starting_anew(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path, 1, 2)
    for path in checkpointer.steps():
        spoil(path, "flip")
    with pytest.raises(UserError, match="none of its 2 checkpoints"):
        checkpointer.newest()


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    with pytest.raises(UserError, match="not a state of ddptrain"):
        unpack(LoadedCheckpoint(tmp_path, pickle.dumps(Hostile()), {"files": {}}))
    torch.save(Hostile(), tmp_path / "hostile.pt")
    with pytest.raises(UserError, match="not a state of ddptrain"):
        unpack(LoadedCheckpoint(tmp_path, (tmp_path / "hostile.pt").read_bytes(), {"files": {}}))
    assert not (tmp_path / "ran").exists()


def test_saving_over_a_folder_replaces_it(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path, 5)
    checkpointer.save_best(state(1), {"step": 1})
    for step in (2, 3):
        checkpointer.save_best(state(step), {"step": step})
        assert unpack(read(tmp_path / "best"))["step"] == step
        assert unpack(read(tmp_path / "best-before"))["step"] == 1
        assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "best-before", "step-5"]
    checkpointer.save(state(6), {"step": 6})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "step-5", "step-6"]


def test_a_disk_that_refuses_is_named_with_the_bytes_needed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"can't be saved .* bytes needed"):
        saved(tmp_path / "file" / "checkpoints", 1)


def test_best_holds_the_best_evaluation(tmp_path: Path) -> None:
    plan = Plan(steps=60, train_size=100, batch_size=20, eval_every=5, save_every=20, seed=4)
    trained, _, _ = Fit(plan, make_model=with_noise).run(World(), tmp_path)
    manifest = json.loads((tmp_path / "best" / MANIFEST).read_text())
    assert manifest["step"] == trained.best_step
    assert manifest["metrics"]["accuracy"] == trained.best
    assert unpack(read(tmp_path / "best"))["best"] == trained.best


def test_another_models_checkpoint_is_told_apart(tmp_path: Path) -> None:
    plan = Plan(steps=2, train_size=100, batch_size=20)
    Fit(plan).run(World(), tmp_path)
    wider = torch.nn.Sequential(torch.nn.Linear(12, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))
    for other in (with_noise, lambda: wider):
        with pytest.raises(UserError, match="is of another model"):
            Fit(plan, make_model=other).run(World(), tmp_path)
    with pytest.raises(UserError, match=r"ema\.decay"):
        Fit(plan, make_model=plain, ema=0.9).run(World(), tmp_path)


def test_damaged_later_checkpoints_are_set_aside_and_kept(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path, 1, 2, 3, keep=5)
    checkpointer.set_aside_after(2)
    checkpointer.recover()
    assert [path.name for path in checkpointer.steps()] == ["step-1", "step-2"]
    assert len(list(tmp_path.glob(".step-3.*.damaged"))) == 1


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path, 1)
    checkpointer.save_best(state(1), {"step": 1})
    (tmp_path / "best").rename(tmp_path / ".best.old")
    (tmp_path / ".best.77").mkdir()
    checkpointer.recover()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "step-1"]
