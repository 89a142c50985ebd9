"""Fetches blocks before they are needed: threads of the rank's main process, which know the order."""

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple, TypeVar, final

from ddptrain.data.stream.cache import BlockCache

PREFETCH_SHARE = 0.8
"""Share of the cache's room that is filled ahead of a training."""
_AHEAD_OF_VALIDATION = 0.15
"""Of an evaluation, by all ranks of a node together: a training's blocks stay meanwhile."""
_THREADS = 4
"""Requests of a rank at a time: one waits for its first byte while others deliver."""
_AGAIN_S, _POLL_S, _LAST_S = 1.0, 0.1, 3.0


Item = TypeVar("Item")


class Need(NamedTuple):
    """blocks: those read from ``position`` on; what positions count (samples, steps, batches) is the caller's
    choice."""

    position: int
    blocks: Sequence[int]


@final
class BlockPrefetch:
    """Keeps in the cache what is read now and, as far as there is room, what comes next.

    needs: in order, possibly without an end. share: bytes of the cache that may be filled ahead.
    """

    def __init__(self, cache: BlockCache, needs: Iterable[Need], share: int) -> None:
        self._cache = cache
        self._needs = iter(needs)
        self._share = share
        self._known: list[Need] = []
        self._position = -1
        self._wanted: list[int] = []
        self._busy: set[int] = set()
        self._missing: list[int] = []
        """Of the wanted ones, as it was looked last; what is needed first stands last."""
        self._look_at = 0.0
        self._elsewhere: dict[int, float] = {}
        """Blocks that another process fetches, and when to see whether it has."""
        self._failed: set[int] = set()
        self._changed = threading.Condition()
        self._over = False
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(_THREADS)]

    def __enter__(self) -> "BlockPrefetch":
        self.at(0)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        until = time.monotonic() + _LAST_S
        for thread in self._threads:  # a request that is on its way may take longer; the thread is a daemon
            thread.join(timeout=max(0.0, until - time.monotonic()))

    def at(self, position: int) -> None:
        """What is read now."""
        if position <= self._position:
            return
        self._position = position
        if self._wanted and (len(self._known) < 2 or position < self._known[1].position):
            return
        with self._changed:
            while len(self._known) > 1 and self._known[1].position <= position:
                self._known.pop(0)
            self._wanted, self._missing, self._look_at = self._next(), [], 0.0
            self._changed.notify_all()

    def _next(self) -> list[int]:
        """The blocks that are read now and those after them, as far as the room goes."""
        self._known += islice(self._needs, max(0, 2 - len(self._known)))  # `at` looks at the next one
        wanted: dict[int, None] = {}
        taken = 0
        for need in chain(list(self._known), self._unseen()):
            for block in need.blocks:
                if block in wanted:
                    continue
                taken += self._cache.blocks[block].size
                if wanted and taken > self._share:
                    return list(wanted)
                wanted[block] = None
            if len(wanted) == len(self._cache.blocks):
                break
        return list(wanted)

    def _unseen(self) -> Iterator[Need]:
        for need in self._needs:
            self._known.append(need)
            yield need

    def _work(self) -> None:
        while not self._over:
            block = self._take()
            if block is None:
                continue
            try:
                if not self._cache.is_sound(block):
                    self._cache.drop_if_damaged(block)
                if not self._cache.fetch(block):
                    self._elsewhere[block] = time.monotonic() + _POLL_S
            except Exception:  # who reads the block gets it, and says so
                self._failed.add(block)
            finally:
                with self._changed:
                    self._busy.discard(block)

    def _take(self) -> int | None:
        """A block to look at or to fetch; after a while without any, None. Those that are there are kept."""
        with self._changed:
            now = time.monotonic()
            if not self._missing and now > self._look_at:
                self._look_at = now + _AGAIN_S
                # what is needed last is touched first, and the first to go
                kept = [(block, self._cache.touch(block)) for block in reversed(self._wanted)]
                self._missing = [
                    block for block, there in kept
                    if not (there and self._cache.is_sound(block)) and block not in self._failed
                ]  # fmt: skip
            for at in range(len(self._missing) - 1, -1, -1):
                block = self._missing[at]
                if block not in self._busy and self._elsewhere.get(block, 0.0) < now:
                    del self._missing[at]
                    self._busy.add(block)
                    return block
            self._changed.wait(_POLL_S if self._missing else _AGAIN_S)
            return None


def prefetched(
    cache: BlockCache, items: Iterable[Item], positions: Iterable[int], needs: Iterable[Need], share: float
) -> Iterator[Item]:
    """The same items, whose blocks are read at these positions; blocks are fetched ahead of them, into this
    share of the cache."""
    if cache.in_place:
        yield from items
        return
    with BlockPrefetch(cache, needs, int(share * cache.limit)) as ahead:
        for item, position in zip(items, positions, strict=False):
            ahead.at(position)
            yield item


def validation_share() -> float:
    """This rank's: each reads another part of the set."""
    return _AHEAD_OF_VALIDATION / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
