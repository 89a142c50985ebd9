"""How many threads a rank computes with."""

import os

import torch
import torch.distributed as dist

from ddptrain.distributed.cores import cores
from ddptrain.distributed.world import World


def share_cores(world: World, strict: bool, workers: int = 0) -> None:
    """Give each rank of a node its part of the cores, unless OMP_NUM_THREADS says otherwise.

    strict: the same bits on any number of ranks: one thread on any, for the number of threads decides
    the order of a sum. workers: loader processes of each rank.

    torchrun sets OMP_NUM_THREADS=1 by itself, and launch as well, so under them a 1 is nobody's choice.
    """
    chosen = os.environ.get("OMP_NUM_THREADS") or None  # empty is unset
    if chosen is None or (chosen == "1" and dist.is_torchelastic_launched()):
        torch.set_num_threads(1 if strict else threads_of(cores(), world.local_size, workers))


def threads_of(cores: int, ranks: int, workers: int) -> int:
    """The threads of each of a node's ranks: what its workers leave, but one."""
    return max(1, (cores - ranks * workers) // ranks)


def workers_of(cores: int, ranks: int, on_cpu: bool) -> int:
    """Loader processes for each of a node's ranks, eight at most: a core each, and at least one is left for
    the rank itself; where that computes on cores, too, half of them."""
    share = cores // ranks
    return max(0, min(8, share // 2 if on_cpu else share - 1))


def said_of_cores(world: World, workers: int) -> str:
    """How a node's cores are shared out, for the log."""
    threads, ranks = torch.get_num_threads(), world.local_size
    used = f"{threads} thread{'s' * (threads > 1)}"
    used += f" and {workers} worker{'s' * (workers > 1)}" if workers else ""
    each = f"{ranks} ranks of {used}" if ranks > 1 else used
    return f"{each}, on {cores()} core{'s' * (cores() > 1)}"
