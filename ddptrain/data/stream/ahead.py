"""Fetches blocks before they are needed: threads of the rank's main process, which know the order."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, final

from ddptrain.data.stream.cache import BlockCache
from ddptrain.errors import UserError

_THREADS = 4
"""Requests of a rank at a time: one waits for its first byte while others deliver."""
_AGAIN_S, _POLL_S, _LAST_S = 0.5, 0.05, 3.0


class Need(NamedTuple):
    """position: from which on, in a count of the caller's, the blocks are read."""

    position: int
    blocks: Sequence[int]


@final
class Ahead:
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
        self._checked: set[int] = set()
        self._failed: set[int] = set()
        self._changed = threading.Condition()
        self._over = False
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(_THREADS)]

    def __enter__(self) -> "Ahead":
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
            self._wanted = self._next()
            self._changed.notify_all()

    def _next(self) -> list[int]:
        """The blocks that are read now and those after them, as far as the room goes."""
        wanted: dict[int, int] = {}
        unseen = self._unseen()
        for need in chain(list(self._known), unseen):
            for block in need.blocks:
                wanted[block] = max(self._cache.blocks[block].size, 1)
            if sum(wanted.values()) > self._share or len(wanted) == len(self._cache.blocks):
                break
        while sum(wanted.values()) > self._share and len(wanted) > 1:
            wanted.popitem()
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
                if block not in self._checked:
                    self._cache.drop_if_damaged(block)
                    self._checked.add(block)
                if not self._cache.fetch(block):  # another process is at it
                    time.sleep(_POLL_S)
            except UserError:  # who reads the block gets it, and says so
                self._failed.add(block)
            finally:
                with self._changed:
                    self._busy.discard(block)

    def _take(self) -> int | None:
        """A block to look at or to fetch; after a while without any, None. Those that are there are kept."""
        with self._changed:
            missing = None
            for block in reversed(self._wanted):  # what is needed last is the first to go
                done = self._cache.touch(block) and block in self._checked
                if not done and block not in self._busy and block not in self._failed:
                    missing = block
            if missing is None:
                self._changed.wait(_AGAIN_S)
            else:
                self._busy.add(missing)
            return missing
