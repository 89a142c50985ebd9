"""A save that is killed at any moment leaves whole checkpoints: the last one, or the one before."""

import mmap
import os
import random
import signal
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.saved_checkpoint import MANIFEST, STATE, read, unpack

NUMBERS = 1_000_000
"""Of a state: 4 MB, so that kills fall into writing and flushing too."""
BEGUN, SAVED, BEST = range(3)
"""What a saver shares of its progress: the last step whose save has begun, whose save has returned, and whose
save as the best has."""


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((NUMBERS,), float(step))}, "optimizer": {}, "step": step}


def save_on_and_on(folder: Path, first: int, background: bool, progress: memoryview) -> None:
    checkpointer = Checkpointer(folder, keep=2, background=background)
    for step in count(first):
        progress[BEGUN] = step
        checkpointer.save(state(step), {"step": step})
        progress[SAVED] = step
        if step % 2:
            checkpointer.save_best(state(step), {"step": step})
            progress[BEST] = step


def killed_after(seconds: float, folder: Path, first: int, background: bool) -> list[int]:
    """The progress that a saver had made when it was killed, so long after it had begun."""
    progress = memoryview(mmap.mmap(-1, 24)).cast("q")
    saver = os.fork()
    if saver == 0:
        try:
            save_on_and_on(folder, first, background, progress)
        finally:
            os._exit(1)
    while not progress[BEGUN]:
        time.sleep(0.0005)
    time.sleep(seconds)
    os.kill(saver, signal.SIGKILL)
    _, status = os.waitpid(saver, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "it ended by itself"
    return list(progress)


def caught_in(folder: Path, begun: int) -> str:
    """What the kill interrupted, by what it left aside."""
    for aside in folder.glob(".*"):
        if aside.name.endswith(".old"):
            return "replacing best"
        name = aside.name.split(".")[1]
        if name != "best" and int(name.removeprefix("step-")) < begun - 1:
            return "dropping the oldest"
        if (aside / MANIFEST).exists():
            return "flushing or renaming"
        whole = (aside / STATE).exists() and (aside / STATE).stat().st_size > 4 * NUMBERS
        return "flushing the state" if whole else "writing the state"
    return "between, or serialising"


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.faults)])
def test_a_killed_save_leaves_the_last_checkpoint_or_the_one_before(tmp_path: Path, kills: int) -> None:
    draw, moments = random.Random(kills), Counter[str]()
    newest, best = 0, 0
    for number in range(kills):
        in_the_background = number % 2  # such a save returns before it is written
        seconds, first = draw.uniform(0, 0.12), newest + 1
        begun, saved, best_saved = killed_after(seconds, tmp_path, first, bool(in_the_background))
        moments[caught_in(tmp_path, begun)] += 1

        checkpointer = Checkpointer(tmp_path, keep=2)
        for path in checkpointer.steps():
            read(path)  # whole, each of them, before anything is cleared up
        checkpointer.recover()
        assert not list(tmp_path.glob(".*")), "nothing is left aside"
        found = checkpointer.newest()
        step = found.manifest["step"] if found is not None else 0
        assert max(newest, saved - in_the_background) <= step <= begun
        newest = step
        if found is not None:
            loaded = unpack(found)
            assert loaded["step"] == step
            assert torch.equal(loaded["model"]["w"], state(step)["model"]["w"])
        if in_the_background:  # of this saver only its best before is known to be written
            best_saved = best_saved - 2 if best_saved - 2 >= first else 0
        if best or best_saved:
            found = read(tmp_path / "best")
            step = unpack(found)["step"]
            assert max(best, best_saved) <= step == found.manifest["step"]
            best = step
    print(f"{kills} kills at {dict(moments)}, {newest} steps")
    if kills >= 200:
        assert len(moments) >= 5, moments
