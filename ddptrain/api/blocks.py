"""The order of samples that are stored in blocks: blocks are shuffled, and then the samples of a few of them
together. So a training reads a few blocks at a time, each once an epoch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from ddptrain.api.order import EpochOrder
from ddptrain.api.rng import derive_seed


@final
@dataclass(frozen=True, eq=False)
class Blocks(EpochOrder):
    """Samples 0, 1, ... lie in blocks, in this order.

    sizes: int64 (blocks,), samples of each, 1 or more. window: blocks whose samples are shuffled together.
    A `Data` that orders its samples so has both in its identity, so that a resume with others is refused.
    """

    sizes: Tensor
    window: int

    @cached_property
    def ends(self) -> Tensor:
        """int64 (blocks,): the index after each block's last sample."""
        return self.sizes.cumsum(0)

    def indices(self, size: int, seed: int, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
        starts = self.ends - self.sizes
        shuffled = []
        for blocks in self._shuffled(generator).split(self.window):
            sizes = self.sizes[blocks]
            before = sizes.cumsum(0) - sizes
            places = torch.arange(int(sizes.sum()))
            samples = places + (starts[blocks] - before).repeat_interleave(sizes)
            shuffled.append(samples[torch.randperm(len(samples), generator=generator)])
        return torch.cat(shuffled)

    def windows(self, seed: int, epoch: int) -> Iterator[tuple[int, list[int]]]:
        """Of each window of an epoch: where it begins in `indices`, and its blocks."""
        generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
        begin = 0
        for blocks in self._shuffled(generator).split(self.window):
            yield begin, blocks.tolist()
            begin += int(self.sizes[blocks].sum())

    def of(self, samples: Sequence[int]) -> list[tuple[int, int]]:
        """(block, place in it) of each sample."""
        ids = torch.as_tensor(samples)
        blocks = torch.searchsorted(self.ends, ids, right=True)
        places = ids - self.ends[blocks] + self.sizes[blocks]
        return list(zip(blocks.tolist(), places.tolist(), strict=True))

    def _shuffled(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(len(self.sizes), generator=generator)
