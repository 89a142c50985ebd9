"""How many cores a job may use, and how many threads a rank computes with. Imports torch only to set them."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.text import counted

if TYPE_CHECKING:
    from ddptrain.api.world import World

CORES = "DDPTRAIN_CORES"
"""Environment variable: a sweep tells each of its jobs how many of the machine's cores are its own."""


def cores() -> int:
    """Cores this process may run on, if no other rank does."""
    return _part(own_ranks=1, local_ranks=1)


def cores_of_rank(world: "World") -> int:
    """A rank's share of the cores that it may run on, at least 1. Its node's other ranks run on the same
    ones, unless each is bound to some (``torchrun --numa-binding``, srun, taskset)."""
    return _part(world.core_sharers or world.local_size, world.local_size)


def _part(own_ranks: int, local_ranks: int) -> int:
    """Of the cores of its affinity, which ``own_ranks`` share, no more than its part of what is for all of
    the node's ranks: a sweep's cores for a job, or its container's time."""
    if CORES in os.environ:
        return max(1, int(os.environ[CORES]) // local_ranks)
    own = (bound_to().bit_count() or os.cpu_count() or 1) // own_ranks
    allowed = quota()
    return max(1, own if allowed is None else min(own, int(allowed) // local_ranks))


def bound_to() -> int:
    """The cores that this process may run on, a bit for each. 0 where the system does not say."""
    return sum(1 << core for core in os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def with_shared_cores(world: "World", bound: Sequence[int]) -> "World":
    """The world, once it is known which cores each rank may run on (`bound_to`, by rank)."""
    own = bound[world.rank]
    return replace(world, core_sharers=sum(bool(own & bound[rank]) for rank in world.neighbours) or None)


def share_cores(world: "World", strict: bool, workers: int = 0) -> None:
    """Give each rank of a node its part of the cores, unless OMP_NUM_THREADS says otherwise.

    strict: the same bits on any number of ranks: one thread on any, for the number of threads decides
    the order of a sum. workers: loader processes of each rank.

    torchrun sets OMP_NUM_THREADS=1 by itself, and launch as well, so under them a 1 is nobody's choice.
    """
    import torch
    import torch.distributed as dist

    chosen = os.environ.get("OMP_NUM_THREADS") or None  # empty is unset
    if chosen is None or (chosen == "1" and dist.is_torchelastic_launched()):
        torch.set_num_threads(1 if strict else threads_of(cores_of_rank(world), workers))


def threads_of(share: int, workers: int) -> int:
    """Of a rank with so many cores: what its workers leave, but one."""
    return max(1, share - workers)


def workers_of(share: int, on_cpu: bool) -> int:
    """Loader processes of a rank with so many cores: one each, and one is left for the rank itself. Where
    that computes on cores, too, half of them, eight at most: it is slower than eight of them are."""
    return max(0, min(8, share // 2) if on_cpu else share - 1)


def cores_in_words(world: "World", workers: int) -> str:
    """How a node's cores are shared out, for the log."""
    import torch

    used = counted(torch.get_num_threads(), "thread")
    used += f" and {counted(workers, 'worker')}" if workers else ""
    each = f"{world.local_size} ranks of {used}" if world.local_size > 1 else used
    if world.core_sharers in (None, world.local_size):
        return f"{each}, on {counted(cores(), 'core')}"
    others = f" that {world.core_sharers} ranks share" if world.core_sharers > 1 else ""
    return f"{each}; rank {world.rank} is bound to {counted(cores(), 'core')}{others}"


def quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the control groups of this process leave it: the least on the way up, by
    version 2 (cpu.max) and version 1 (cpu.cfs_quota_us)."""
    quotas = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (top, top / "unified") if not controllers else (top / "cpu", top / controllers):
            # inside a container the path is the host's, and its own group is mounted at the top
            folders = [mount / path.strip("/"), *(mount / path.strip("/")).parents]
            for folder in [folder for folder in folders if folder == mount or mount in folder.parents]:
                quotas += _quota_of_group(folder)
    return min(quotas, default=None)


def _quota_of_group(folder: Path) -> list[float]:
    """One number, or none."""
    version_1 = text_of(folder / "cpu.cfs_quota_us") + " " + text_of(folder / "cpu.cfs_period_us")
    words = (text_of(folder / "cpu.max") or version_1).split()
    if len(words) != 2 or not all(map(str.isdigit, words)) or not int(words[1]):  # max, -1: no limit
        return []
    return [int(words[0]) / int(words[1])]


def text_of(path: Path) -> str:
    """A file of the kernel's; '' where it is not there, or not to be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
