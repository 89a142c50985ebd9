"""What ranks exchange outside of collectives: progress, stop requests, failures.

It goes through the process group's key-value store, in a separate thread: if the process that hosts the store
is stopped, requests never return, and the watchdog must not wait for them.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ddptrain.api.world import World
from ddptrain.distributed.watchdog.hang_report import Beat

_FAILURE, _STOP = "failure", "stop"


class Failure(NamedTuple):
    """The first rank to fail, its exit code and its message."""

    rank: int
    code: int
    said: str = ""
    shown: bool = False
    """Whether the first rank of each other host prints the message too."""


def started_at(pid: int) -> str:
    """When a process of this host started, in ticks since boot; '' if it has ended (also as a zombie), and on
    other systems than Linux."""
    fields = _status(pid)
    return "" if not fields or fields[0] in "ZX" else fields[19]


def is_suspended(pid: int) -> bool:
    """Whether a process of this host is stopped, as by Ctrl-Z; False on other systems than Linux."""
    return _status(pid)[:1] == ["T"]


def _status(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from its state on; none where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class Heartbeat:
    """One rank's side. In a world of one nothing is exchanged.

    own: makes this rank's heartbeat of a number. is_late: whether to read the others' heartbeats too. Rank 0,
    which hosts the store, always reads them; the others also at the start, to learn hosts and process ids.
    """

    def __init__(
        self, world: World, interval: float, own: Callable[[int], Beat], is_late: Callable[[], bool]
    ) -> None:
        self.stop: str | None = None
        """What requested a stop on any rank."""
        self.failure: Failure | None = None
        self.heard: dict[int, tuple[Beat, float]] = {}
        """The other ranks' last heartbeats, and when each arrived."""
        self._world = world
        self._interval = interval
        self._own = own
        self._is_late = is_late
        self._answered_at = time.monotonic()
        self._patience = max(3.0, 4 * interval)
        self._beats = 0
        self._here: set[int] = set()
        """Ranks whose processes were seen on this host."""
        self._wish: str | None = None
        self._own_failure: Failure | None = None
        self._sent = threading.Event()
        self._wake = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Join through the process group's store."""
        if self._world.size == 1:
            return
        # a separate connection: the main thread's may be blocked
        store = dist.distributed_c10d._get_default_store().clone()
        self._thread = threading.Thread(target=self._exchange, args=[store], name="heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """To be called before the process ends: a thread that returns from the store while the interpreter
        shuts down aborts the process."""
        self._ended = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def ask_to_stop(self, who: str) -> None:
        self._wish = who
        self._wake.set()

    def tell_failure(self, code: int, said: str, shown: bool) -> None:
        """This rank fails with an exit code, and prints its message. Waits until it is sent, 2 s at most."""
        if self._world.size > 1 and not self._ended:
            self._own_failure = Failure(self._world.rank, code, said, shown)
            self._wake.set()
            self._sent.wait(2.0)

    def failure_elsewhere(self, wait: float) -> Failure | None:
        """The failure of another rank; waits so many seconds for it."""
        deadline = time.monotonic() + wait
        while self._world.size > 1 and self.failure is None and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.05)
        failure = self.failure
        return failure if failure is not None and failure.rank != self._world.rank else None

    def hear(self, beat: Beat) -> None:
        """Store a new heartbeat of another rank."""
        self.heard[beat.rank] = (beat, time.monotonic())
        if beat.rank in self._world.neighbours and beat.born and started_at(beat.pid) == beat.born:
            self._here.add(beat.rank)

    def forgive(self, seconds: float) -> None:
        """This process was stopped for so long, and could not hear anything."""
        now = time.monotonic()
        self._answered_at = min(now, self._answered_at + seconds)
        self.heard |= {rank: (beat, min(now, at + seconds)) for rank, (beat, at) in dict(self.heard).items()}

    def gone(self) -> Beat | None:
        """The last heartbeat of a rank whose process was seen on this host, and has ended.

        A process is identified by its id and its start time: containers have the same ids, and the kernel
        reuses them.
        """
        beats = (self.heard[rank][0] for rank in sorted(self._here))
        return next((beat for beat in beats if started_at(beat.pid) != beat.born), None)

    def silent(self, rank: int) -> bool:
        """Whether a rank's process does not run any more, as far as this rank knows."""
        if self.unanswered:
            return rank == 0  # it hosts the store, unless an agent does
        return rank in self.heard and time.monotonic() - self.heard[rank][1] > self._patience

    @property
    def unanswered(self) -> bool:
        """The store does not answer, so all information is old."""
        return self._world.size > 1 and time.monotonic() - self._answered_at > self._patience

    def cut_off(self, seconds: float) -> bool:
        """Whether this rank had no answer from the store, or rank 0 no heartbeat from some rank, for so
        long."""
        since = [self._answered_at]
        if self._world.is_first:
            since += [at for _, at in dict(self.heard).values()]
        return self._world.size > 1 and time.monotonic() - min(since) > max(seconds, self._patience)

    def _knows_all(self) -> bool:
        return len(self.heard) == self._world.size - 1 and all(beat.host for beat, _ in self.heard.values())

    def _exchange(self, store: Store) -> None:
        rank = self._world.rank
        while not self._ended:
            # the store's host may be gone at the end of a job; collectives will raise
            with contextlib.suppress(RuntimeError):
                self._beats += 1
                if self._own_failure is not None:
                    store.compare_set(_FAILURE, "", json.dumps(self._own_failure))
                    self._sent.set()
                if self._wish is not None:
                    store.set(_STOP, self._wish)
                store.set(f"beat-{rank}", json.dumps(self._own(self._beats)._asdict()))
                if store.check([_STOP]):
                    self.stop = store.get(_STOP).decode()
                if store.check([_FAILURE]):
                    self.failure = self._heard_of(Failure(*json.loads(store.get(_FAILURE))))
                if rank == 0 or not self._knows_all() or self._is_late():
                    self._listen(store)
                self._answered_at = time.monotonic()
            self._wake.wait(self._interval)
            self._wake.clear()

    def _heard_of(self, failure: Failure) -> Failure:
        repeats = self._world.is_first_on_node and failure.rank not in self._world.neighbours
        return failure._replace(shown=failure.shown and repeats)

    def _listen(self, store: Store) -> None:
        others = [rank for rank in range(self._world.size) if rank != self._world.rank]
        begun = others
        if not store.check([f"beat-{rank}" for rank in others]):  # one request where all have begun
            begun = [rank for rank in others if store.check([f"beat-{rank}"])]
        encoded = store.multi_get([f"beat-{rank}" for rank in begun]) if begun else []
        beats = {rank: Beat(**json.loads(words)) for rank, words in zip(begun, encoded, strict=True)}
        for rank in others:
            beat = beats.get(rank, Beat.unheard(rank))
            if rank not in self.heard or self.heard[rank][0].number != beat.number:
                self.hear(beat)
