"""Who am I among the ranks, and on which device."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ddptrain.errors import UserError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class World:
    """One rank's place among all. Passed in wherever it matters; build one by hand in a test."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = torch.device("cpu")
    shares_device: bool = False
    """Somewhere in the job ranks share a GPU: NCCL refuses that, and all take gloo."""
    sharers: int = 1
    """Ranks on this rank's GPU."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_first_on_node(self) -> bool:
        return self.local_rank == 0

    @property
    def neighbours(self) -> range:
        """The ranks of this node, this one among them."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)

    def shards(self, count: int) -> range:
        """This rank's of so many parts of something: runs of nearly equal length, in the ranks' order."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def on(self, device: torch.device) -> "World":
        return replace(self, device=device)


def world_from_environment(environment: Mapping[str, str] = os.environ) -> World:
    """The world torchrun describes, or a single rank without it. The device is not chosen yet.

    Raises UserError where the variables are incomplete or contradict each other.
    """
    given = [name for name in _NAMES if name in environment]
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return World()
    missing = [name for name in _NAMES if name not in given]
    if missing:
        raise UserError(
            f"{', '.join(given)} is set but {', '.join(missing)} is not: start ranks with torchrun,"
            " or unset these environment variables for a single process.",
            everywhere=False,
        )
    try:
        rank, size, local_rank, local_size = (int(environment[name]) for name in _NAMES)
    except ValueError as error:
        raise UserError(f"{', '.join(_NAMES)} must be whole numbers: {error}.", everywhere=False) from error
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise UserError(
            f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local_rank} LOCAL_WORLD_SIZE={local_size}"
            " contradict each other: start ranks with torchrun.",
            everywhere=False,
        )
    return World(rank, size, local_rank, local_size)
