"""What ranks tell each other beside the collectives: where each is, a wish to stop, a failure.

By the process group's key-value store, from a thread of its own: a store whose keeper is stopped
answers a question never, and the thread that judges must not wait for it.
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
from ddptrain.watchdog.hang_report import Beat

_FAILURE, _STOP = "failure", "stop"


class Failure(NamedTuple):
    """The first rank to fail, and its exit code."""

    rank: int
    code: int
    said: str = ""
    """What it has said, for the first rank of another host to repeat; '' on the others."""


def started_at(pid: int) -> str:
    """When a process of this host started, in the kernel's ticks since it booted; '' where it has ended,
    waited for or not, and without Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class Heartbeat:
    """One rank's end. In a world of one nothing is sent and nothing heard.

    own: this rank's beat of a number. is_late: whether to ask for the others' beats too. Rank 0, which has
    the store at hand, always asks; the others also at the start, for who is where.
    """

    def __init__(
        self, world: World, interval: float, own: Callable[[int], Beat], is_late: Callable[[], bool]
    ) -> None:
        self.stop: str | None = None
        """What any rank was asked to stop by."""
        self.failure: Failure | None = None
        self.heard: dict[int, tuple[Beat, float]] = {}
        """The other ranks' last beats, and when each was new here."""
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
        # a connection of its own: the main thread's may be busy with waiting
        store = dist.distributed_c10d._get_default_store().clone()
        self._thread = threading.Thread(target=self._exchange, args=[store], name="heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Before the process ends: a thread that comes back from the store to an interpreter that shuts
        down aborts the process. One whose store never answers does not come back."""
        self._ended = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def ask_to_stop(self, who: str) -> None:
        self._wish = who
        self._wake.set()

    def tell_failure(self, code: int, said: str = "") -> None:
        """This rank fails with an exit code and speaks for itself. Waits until it is sent, 2 s at most."""
        if self._world.size > 1 and not self._ended:
            self._own_failure = Failure(self._world.rank, code, said)
            self._wake.set()
            self._sent.wait(2.0)

    def failure_elsewhere(self, wait: float) -> Failure | None:
        """The failure of another rank; waits so many seconds for it."""
        deadline = time.monotonic() + wait
        while self._world.size > 1 and self.failure is None and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.05)
        found = self.failure
        return found if found is not None and found.rank != self._world.rank else None

    def hear(self, beat: Beat) -> None:
        """Note another rank's beat, which is new here."""
        self.heard[beat.rank] = (beat, time.monotonic())
        if beat.rank in self._world.neighbours and beat.born and started_at(beat.pid) == beat.born:
            self._here.add(beat.rank)

    def gone(self) -> Beat | None:
        """The last beat of a rank whose process was seen on this host, and has ended.

        A process id alone does not tell: a container has the same ones, and the kernel gives them out again.
        So a process is known by the start that its rank tells of, too.
        """
        beats = (self.heard[rank][0] for rank in sorted(self._here))
        return next((beat for beat in beats if started_at(beat.pid) != beat.born), None)

    def silent(self, rank: int) -> bool:
        """Whether a rank's own threads don't run any more, as far as this one can tell."""
        if self.unanswered:
            return rank == 0  # it keeps the store, where no agent does
        return rank in self.heard and time.monotonic() - self.heard[rank][1] > self._patience

    @property
    def unanswered(self) -> bool:
        """The store does not answer, so what was heard is old."""
        return self._world.size > 1 and time.monotonic() - self._answered_at > self._patience

    def cut_off(self, seconds: float) -> bool:
        """Whether for so long the store has not answered this rank, or another rank not rank 0, whatever
        its main thread does."""
        since = [self._answered_at]
        if self._world.is_first:
            since += [at for _, at in dict(self.heard).values()]
        return self._world.size > 1 and time.monotonic() - min(since) > max(seconds, self._patience)

    def _knows_all(self) -> bool:
        return len(self.heard) == self._world.size - 1 and all(beat.host for beat, _ in self.heard.values())

    def _exchange(self, store: Store) -> None:
        rank = self._world.rank
        while not self._ended:
            # the keeper may be gone at the end of a job; the collectives will say so
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
        return failure if repeats else failure._replace(said="")

    def _listen(self, store: Store) -> None:
        others = [rank for rank in range(self._world.size) if rank != self._world.rank]
        begun = others
        if not store.check([f"beat-{rank}" for rank in others]):  # one request where all have begun
            begun = [rank for rank in others if store.check([f"beat-{rank}"])]
        told = store.multi_get([f"beat-{rank}" for rank in begun]) if begun else []
        beats = {rank: Beat(**json.loads(words)) for rank, words in zip(begun, told, strict=True)}
        for rank in others:
            beat = beats.get(rank, Beat.unheard(rank))
            if rank not in self.heard or self.heard[rank][0].number != beat.number:
                self.hear(beat)
