"""strategy=hsdp: the process groups that a mesh of ranks has."""

from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ddptrain.api.world import World
from ddptrain.strategies.fsdp import Fsdp
from ddptrain.testing import run_ranks

HOUR = timedelta(hours=1)


def test_each_group_waits_an_hour() -> None:
    """As the world's does: torch gives a group ten minutes under NCCL. Two nodes of two ranks."""

    def rank(world: World) -> tuple[list[list[int]], list[timedelta], float]:
        world = replace(world, local_rank=world.rank % 2, local_size=2)
        model = Fsdp(world, shard_over="node").wrap(nn.Linear(4, 4, bias=False))
        model(torch.ones(1, 4)).sum().backward()
        weight = next(iter(model.parameters()))
        assert isinstance(weight, DTensor)
        assert isinstance(weight.grad, DTensor)
        groups = weight.device_mesh.get_all_groups()
        cpu = torch.device("cpu")
        made = [group for group in groups if group != dist.group.WORLD]
        timeouts = [group._get_backend(cpu).options._timeout for group in made]
        return (
            [dist.get_process_group_ranks(g) for g in groups],
            timeouts,
            float(weight.grad.full_tensor().sum()),
        )

    found = run_ranks(rank, 4)
    of_nodes = [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]
    assert [ranks for ranks, _, _ in found] == of_nodes
    assert [timeouts for _, timeouts, _ in found] == [[HOUR] * 2] * 4
    assert [total for _, _, total in found] == [16] * 4, "the mean of the ranks' gradients"
