"""How many threads a rank computes with."""

import os

import torch
import torch.distributed as dist

from ddptrain.distributed.cores import cores
from ddptrain.distributed.world import World


def share_cores(world: World, strict: bool) -> None:
    """Give each rank of a node its part of the cores, unless OMP_NUM_THREADS says otherwise.

    strict: the same bits on any number of ranks: one thread on any, for the number of threads decides
    the order of a sum.

    torchrun sets OMP_NUM_THREADS=1 by itself, so under it a 1 is nobody's choice.
    """
    chosen = os.environ.get("OMP_NUM_THREADS") or None  # empty is unset
    if chosen is None or (chosen == "1" and dist.is_torchelastic_launched()):
        torch.set_num_threads(1 if strict else max(1, cores() // world.local_size))
