"""The tokens of a part of a streamed text: read at any place, out of the blocks that they lie in."""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar, final

import torch
from torch import Tensor

from ddptrain.api.blocks import Blocks
from ddptrain.api.rng import draw_below
from ddptrain.api.timing import FetchTimes
from ddptrain.data.stream.block_prefetch import PREFETCH_SHARE, Need, prefetched
from ddptrain.data.stream.cache import DECODING_S, BlockCache
from ddptrain.data.stream.samples import read_block, reading_of
from ddptrain.data.stream.store import Damaged
from ddptrain.errors import UserError

Batch = TypeVar("Batch")
_SHIFT = 0  # Purpose of a draw: where an epoch's first window of a block begins


@final
class TokenBlocks:
    """A ring of tokens, block after block.

    cache: its blocks, plain arrays of tokens. dtype: theirs. shuffle_blocks: as `Streamed` has it. Reads are
    of slices: a block is never held in memory.
    """

    def __init__(self, cache: BlockCache, dtype: torch.dtype, shuffle_blocks: int) -> None:
        self._cache = cache
        self._dtype = dtype
        self._shuffle_blocks = shuffle_blocks
        self._sizes = cache.blocks.samples
        self._ends = self._sizes.cumsum(0)

    def __len__(self) -> int:
        """Tokens."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def windows(self, window: int) -> Blocks:
        """The samples of a shuffled training: in each block as many as it has windows of so many tokens."""
        return Blocks(self._sizes // window, self._shuffle_blocks)

    def read(self, starts: Tensor, length: int) -> Tensor:
        """(n, length) in their own dtype: runs of consecutive tokens, around the ring. starts: int64 (n,)."""
        places = starts % len(self)
        blocks = torch.searchsorted(self._ends, places, right=True)
        begins = places - (self._ends - self._sizes)[blocks]
        return self._read(blocks.tolist(), begins.tolist(), length, 1)

    def read_windows(self, ids: Tensor, epochs: Tensor, window: int, seed: int) -> Tensor:
        """(n, window + 1): samples of `windows`. Each epoch begins a block's first window at another place of
        it, up to a window's length from its beginning, and goes around the block. ids, epochs: int64 (n,)."""
        positions = self.windows(window).of(ids.tolist())
        blocks = torch.tensor([block for block, _ in positions])
        places = torch.tensor([place for _, place in positions])
        begins = places * window + draw_below(window, seed, epochs, blocks, _SHIFT)
        return self._read(blocks.tolist(), (begins % self._sizes[blocks]).tolist(), window + 1, 0)

    def reading(self) -> FetchTimes:
        """So far."""
        return reading_of(self._cache)

    def fetching(
        self, batches: Iterable[Batch], positions: Iterable[int], needs: Iterable[Need], share: float
    ) -> Iterator[Batch]:
        """As `prefetched`."""
        return prefetched(self._cache, batches, positions, needs, share)

    def needs_of(self, position: int, starts: Tensor, length: int) -> Need:
        """The blocks of runs of consecutive tokens."""
        count, total = len(self._sizes), len(self)
        places = starts % total
        edges = torch.stack([places, places + length - 1])
        first, last = torch.searchsorted(self._ends, edges % total, right=True) + edges // total * count
        needed: dict[int, None] = {}
        for a, b in zip(first.tolist(), last.tolist(), strict=True):
            needed.update((block % count, None) for block in range(a, b + 1))
        return Need(position, list(needed))

    def needs_of_streams(self, origins: Tensor, window: int, steps: range) -> Iterator[Need]:
        """Of rows that begin at these places and read on by a window a step: whenever one comes to another
        block. Positions count steps."""
        step = steps.start
        while step < steps.stop:
            starts = origins + step * window
            yield self.needs_of(step, starts, window + 1)
            last = (starts + window) % len(self)
            left = self._ends[torch.searchsorted(self._ends, last, right=True)] - last
            step += max(1, -(-int(left.min()) // window))

    def check_room(self, rows: int, ranks: int) -> None:
        """Raises UserError unless the cache holds the blocks that so many rows are in at once, and for each
        rank the next. rows, ranks: of a node."""
        if self._cache.in_place:
            return
        needed = sum(sorted((block.size for block in self._cache.blocks), reverse=True)[: rows + ranks])
        if needed > PREFETCH_SHARE * self._cache.limit:
            raise UserError(
                f"data.source.cache_gb={self._cache.limit / 1e9:g}: data.order=streams reads the text at"
                f" {rows} places at once on each node, and the blocks that these lie in have"
                f" {needed / 1e9:.3g} GB. Make the cache larger, train.batch_size or the set's blocks"
                " smaller, or take data.order=shuffled."
            )

    def _read(self, blocks: list[int], begins: list[int], length: int, step: int) -> Tensor:
        """Runs, each from a place in a block on. step: from a block's end to the beginning of the next (1) or
        of the same (0)."""
        size = self._dtype.itemsize
        content = bytearray(len(blocks) * length * size)
        wanted: defaultdict[int, list[tuple[memoryview, int]]] = defaultdict(list)
        view = memoryview(content)
        for row, (block, begin) in enumerate(zip(blocks, begins, strict=True)):
            at, stop = row * length, (row + 1) * length
            while at < stop:
                count = min(stop - at, int(self._sizes[block]) - begin)
                wanted[block].append((view[at * size : (at + count) * size], begin * size))
                at, begin, block = at + count, 0, (block + step) % len(self._sizes)
        for block, slices in wanted.items():
            self._fill(block, slices)
        return torch.frombuffer(content, dtype=self._dtype).view(len(blocks), length)

    def _fill(self, block: int, slices: list[tuple[memoryview, int]]) -> None:
        def read(path: Path) -> None:
            began = time.monotonic()
            descriptor = os.open(path, os.O_RDONLY)
            try:
                for target, begin in slices:
                    if os.preadv(descriptor, [target], begin) != len(target):
                        raise Damaged("it ends too early")
            finally:
                os.close(descriptor)
            self._cache.counts[DECODING_S] += time.monotonic() - began

        read_block(self._cache, block, read)
