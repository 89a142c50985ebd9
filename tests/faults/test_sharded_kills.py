"""Checkpoints of which each rank writes its part, while the training changes the tensors: killed at any
moment, they are whole or absent."""

import mmap
import os
import random
import resource
import signal
import threading
from itertools import count
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from toy import DIED

from ddptrain.api.world import World
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.saved_checkpoint import unpack
from ddptrain.errors import UserError
from ddptrain.testing import RankFailed, run_ranks

NUMBERS = 400_000
"""Of a rank."""
BEGUN, WRITTEN = range(2)
"""What the ranks share of their progress: the last step whose save has begun, and that whose save is known to
be over."""


def save_on_and_on(
    world: World, folder: Path, first: int, progress: memoryview, killed_after: float | None
) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    checkpointer = Checkpointer(folder, keep=2, background=True)
    own = torch.empty(NUMBERS)
    weights = DTensor.from_local(own, mesh, [Shard(0)])
    for step in count(first):
        if step == first + 1 and killed_after is not None:  # the first save imports, and makes a group
            threading.Timer(killed_after, os.kill, [os.getpid(), signal.SIGKILL]).start()
        own.fill_(step)
        progress[BEGUN] = step
        state = {"model": {"w": weights}, "optimizer": {}, "step": step}
        rest, shards = checkpointer.write_shards(state, world)
        progress[WRITTEN] = max(progress[WRITTEN], step - 1)
        if world.is_first:
            checkpointer.save(rest, {"step": step}, shards)
        own.fill_(-1)  # training goes on


def killed_after(seconds: float, killed: list[int], folder: Path, first: int) -> list[int]:
    """The progress that ranks had made."""
    progress = memoryview(mmap.mmap(-1, 16)).cast("q")

    def rank(world: World) -> None:
        save_on_and_on(world, folder, first, progress, seconds if world.rank in killed else None)

    with pytest.raises(RankFailed, match=DIED):
        run_ranks(rank, 2)
    return list(progress)


@pytest.mark.faults
@pytest.mark.parametrize("kills", [200])
@pytest.mark.timeout(1200)
def test_ranks_that_are_killed_leave_whole_checkpoints(tmp_path: Path, kills: int) -> None:
    draw, newest = random.Random(kills), 0
    moved = 0
    for _ in range(kills):
        killed = draw.choice([[0], [1], [0, 1]])
        begun, written = killed_after(draw.uniform(0, 0.6), killed, tmp_path, newest + 1)
        checkpointer = Checkpointer(tmp_path, keep=2)
        checkpointer.recover()
        saved = checkpointer.newest()
        if saved is None:
            assert written <= 0
            continue
        step = saved.manifest["step"]
        assert max(newest, written) <= step <= max(newest, begun)
        weights = unpack(saved)["model"]["w"]
        assert weights.shape == (2 * NUMBERS,)
        assert bool((weights == step).all())
        moved += step > newest
        newest = step
    assert moved > kills / 3
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".shards")]


def test_what_the_disk_refuses_is_told_by_the_next_save(tmp_path: Path) -> None:
    """To all ranks, with the checkpoint before left as it is."""

    def rank(world: World) -> str:
        mesh = init_device_mesh("cpu", (world.size,))
        checkpointer = Checkpointer(tmp_path, keep=2, background=True)
        state = {"model": {"w": DTensor.from_local(torch.ones(9), mesh, [Shard(0)])}, "optimizer": {}}
        for step in (1, 2):
            rest, shards = checkpointer.write_shards({**state, "step": step}, world)
            if world.is_first:
                checkpointer.save(rest, {"step": step}, shards)
            if step == 1:
                checkpointer.finish()
                torch.distributed.barrier()
                if world.rank == 1:
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        try:
            checkpointer.finish()
        except UserError as error:
            return str(error)
        return ""

    for said in run_ranks(rank, 2):
        assert "can't be saved" in said
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
