"""A rank's place among all ranks, and its device."""

from dataclasses import dataclass, replace

import torch


def shards_of(rank: int, world_size: int, count: int) -> range:
    """A rank's indices of ``count`` parts: consecutive, nearly equally many per rank. The first ranks get one
    more, so that more runs are whole subtrees of the sum over parts (of 8 on 5 ranks, all)."""
    each, more = divmod(count, world_size)
    begin = rank * each + min(rank, more)
    return range(begin, begin + each + (rank < more))


@dataclass(frozen=True, slots=True)
class World:
    """One rank's place among all. Passed as an argument; tests make their own."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = torch.device("cpu")
    shares_device: bool = False
    """Somewhere in the job ranks share a GPU: NCCL refuses that, so all use gloo."""
    sharers: int = 1
    """Ranks on this rank's GPU."""
    core_sharers: int | None = None
    """Ranks of this node that may run on one of this rank's cores, with this one. None: all of them."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_first_on_node(self) -> bool:
        return self.local_rank == 0

    @property
    def neighbours(self) -> range:
        """The ranks of this node, including this one."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)

    def shards(self, count: int) -> range:
        """`shards_of` this rank."""
        return shards_of(self.rank, self.size, count)

    def on(self, device: torch.device) -> "World":
        return replace(self, device=device)
