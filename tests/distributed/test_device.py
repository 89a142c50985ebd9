"""Which ranks share a GPU, by what each says of its own."""

import pytest
import torch

from ddptrain.api.world import World
from ddptrain.distributed.comm import backend_for
from ddptrain.distributed.device import with_shared_gpus
from ddptrain.errors import UserError

GPU = torch.device("cuda", 0)


def seen(*gpus: str) -> list[tuple[str, int]]:
    """Each rank's backend, and how many are on its GPU."""
    worlds = [with_shared_gpus(World(rank, len(gpus), 0, 1, GPU), gpus) for rank in range(len(gpus))]
    return [(backend_for(world), world.sharers) for world in worlds]


def test_ranks_that_see_one_gpu_each_have_one_each() -> None:
    """All call it cuda:0: a scheduler may show each task its own alone."""
    assert seen("H100 a", "H100 b") == [("nccl", 1), ("nccl", 1)]
    assert seen("H100 a") == [("nccl", 1)]


def test_where_two_share_a_gpu_all_take_the_same_backend() -> None:
    assert seen("H100 a", "H100 b", "H100 b") == [("gloo", 1), ("gloo", 2), ("gloo", 2)]


def test_slices_of_gpus_are_no_whole_ones() -> None:
    assert seen("H100 MIG 1g.10gb a", "H100 MIG 1g.10gb b") == [("gloo", 1), ("gloo", 1)]
    assert seen("H100 MIG 1g.10gb a") == [("nccl", 1)]


def test_ranks_without_a_gpu_train_together_but_not_with_others() -> None:
    world = World(1, 2, 1, 2)
    assert with_shared_gpus(world, ["", ""]) == world
    with pytest.raises(UserError, match="rank 0 has a GPU and rank 1 has none"):
        with_shared_gpus(world, ["H100 a", ""])
