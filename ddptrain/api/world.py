"""Who am I among the ranks, and on which device."""

from dataclasses import dataclass, replace

import torch


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
