"""Monitoring of all ranks' GPUs, hosts and pace, by a thread of each rank.

Readings reach rank 0 through the process group's key-value store: no collective, and nothing that a step
could wait for. If a rank stops sending, its last reading stays.
"""

import contextlib
import json
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ddptrain.api.timing import Timing
from ddptrain.api.world import World
from ddptrain.observe.gauges import Gauge, GaugeReading, Unreadable
from ddptrain.observe.slow_rank import Slow, SlowRanks

log = logging.getLogger("ddptrain")

_SOON_S = 0.2
"""When the first reading is taken, so that a short run has one."""
_LAST_ANSWER_S = 2.0


@final
class Monitor:
    """One rank's side. In a world of one nothing is sent.

    gauges: what this rank reads, by label: gpu<rank>, host<node>. interval: seconds between readings. timing:
    what this rank has spent its time on so far. names_slow: a slow rank is named in the log.
    """

    def __init__(
        self,
        world: World,
        gauges: Mapping[str, Gauge],
        interval: float = 1.0,
        timing: Callable[[], Timing] = Timing,
        names_slow: bool = False,
    ) -> None:
        self._world = world
        self._gauges = gauges
        self._interval = interval
        self._records = {label: _Record(gauge.facts) for label, gauge in gauges.items()}
        self._known: dict[str, dict[str, Any]] = {}
        """The last record of each label; replaced, never modified, because another thread reads it."""
        self._timing = timing
        self._where = {world.rank: _place(world)}
        self._timings: dict[int, Timing] = {}
        """Of each rank."""
        self._slow_ranks = SlowRanks() if names_slow else None
        self._over = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The thread runs inside; its readings stay available."""
        # a separate connection: the main thread's may be blocked
        store = dist.distributed_c10d._get_default_store().clone() if self._world.size > 1 else None
        thread = threading.Thread(target=self._sample, args=[store], name="monitor", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(timeout=_LAST_ANSWER_S)  # a store whose host is stopped never answers

    def latest(self) -> dict[str, float]:
        """On rank 0: the last reading of every rank, as ``gpu0/utilisation``, ``host0/cpu``, ..."""
        return {
            f"{label}/{name}": value
            for label, record in self._known.items()
            for name, value in record["now"].items()
        }

    def summary(self) -> dict[str, Any]:
        """On rank 0: means and peaks of the whole run by label, and the least and most used GPU, if they
        differ."""
        known = self._known
        by_label: dict[str, Any] = {
            label: {name: value for name, value in known[label].items() if name != "now"}
            for label in sorted(known, key=_in_order)
        }
        used = {
            int(label.removeprefix("gpu")): record["mean"]["utilisation"]
            for label, record in by_label.items()
            if label.startswith("gpu") and "utilisation" in record["mean"]
        }
        if len(set(used.values())) > 1:
            for name, which in (("least_used", min), ("most_used", max)):
                rank = which(used, key=lambda rank: used[rank])
                by_label[name] = {"rank": rank, "utilisation": used[rank]}
        return by_label

    def timings(self) -> dict[int, Timing]:
        """On rank 0: what each rank has spent its time on so far, as last told."""
        return {**self._timings, self._world.rank: self._timing()}

    def _sample(self, store: Store | None) -> None:
        pause = _SOON_S
        while not self._over.wait(min(pause, self._interval)):
            pause = self._interval
            for label, gauge in self._gauges.items():
                try:
                    self._records[label].add(gauge.read())
                except Unreadable as error:
                    self._records[label].lost(str(error))
            own = {label: record.as_json() for label, record in self._records.items()}
            self._known = {**self._known, **own}
            # the store's host may be gone at the end of a job; collectives will raise
            with contextlib.suppress(RuntimeError):
                if store is not None:
                    self._exchange(store, own)

    def _exchange(self, store: Store, own: Mapping[str, Any]) -> None:
        rank = self._world.rank
        timing = self._timing()
        if not self._world.is_first:
            pace = {"seconds": dict(timing.seconds), "samples": timing.samples}
            record = {"rank": rank, "where": self._where[rank], "devices": own, "pace": pace}
            store.set(f"monitor-{rank}", json.dumps(record))
            return
        begun = [f"monitor-{rank}" for rank in range(1, self._world.size)]
        if not store.check(begun):  # one request where all have begun
            begun = [key for key in begun if store.check([key])]
        for words in store.multi_get(begun) if begun else []:
            record = json.loads(words)
            self._known = {**self._known, **record["devices"]}
            self._where[record["rank"]] = record["where"]
            self._timings[record["rank"]] = Timing(**record["pace"])
        self._timings[rank] = timing
        if self._slow_ranks is not None and len(self._timings) == self._world.size:
            for slow in self._slow_ranks.look(time.monotonic(), self._timings):
                log.warning("slow       %s", self._described(slow))

    def _described(self, slow: Slow) -> str:
        """With what its GPU's gauge says."""
        line = f"rank {slow.rank} ({self._where[slow.rank]}) is {slow}"
        gpu = self._known.get(f"gpu{slow.rank}", {})
        if gpu.get("now", {}).get("throttled"):
            reasons: dict[str, float] = gpu["throttled_by"]
            line += f"; its GPU's clock is held down ({max(reasons, key=lambda reason: reasons[reason])})"
        return line


def _place(world: World) -> str:
    """For a person who looks for the rank."""
    gpu = f", GPU {world.device.index}" if world.device.type == "cuda" else ""
    return f"{socket.gethostname()}{gpu}"


class _Record:
    """Means and peaks of a gauge's readings."""

    def __init__(self, facts: Mapping[str, str | float]) -> None:
        self._facts = facts
        self._now: Mapping[str, float] = {}
        self._count = 0
        self._counts: Counter[str] = Counter()
        self._sums: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._slowed: Counter[str] = Counter()
        self._lost = ""

    def add(self, reading: GaugeReading) -> None:
        self._now, self._lost = reading.values, ""
        self._count += 1
        for name, value in reading.values.items():
            self._counts[name] += 1
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._peaks[name] = max(self._peaks.get(name, value), value)
        self._slowed.update(reading.throttled_by)

    def lost(self, reason: str) -> None:
        """The gauge can't be read now."""
        self._now, self._lost = {}, reason

    def as_json(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        record = {
            **self._facts,
            "now": dict(self._now),
            "readings": self._count,
            "mean": {name: round(total / self._counts[name], 3) for name, total in self._sums.items()},
            "peak": {name: round(peak, 3) for name, peak in self._peaks.items()},
        }
        if self._slowed:
            record["throttled_by"] = {
                name: round(count / self._count, 3) for name, count in self._slowed.items()
            }
        if self._lost:
            record["lost"] = self._lost
        return record


def in_short(latest: Mapping[str, float]) -> str:
    """For a progress bar: ``GPU 97 % 61 GiB``, ``GPUs 91-98 %``, or without GPUs ``CPU 88 %``."""
    gpus = [value for name, value in latest.items() if name.endswith("/utilisation")]
    cpus = [value for name, value in latest.items() if name.endswith("/cpu")]
    memory = [value for name, value in latest.items() if name.endswith("/memory_gib") and name[0] == "g"]
    if len(gpus) == 1 and memory:
        return f"GPU {gpus[0]:.0f} % {memory[0]:.0f} GiB"
    return _range("GPU", gpus) if gpus else _range("CPU", cpus)


def _range(what: str, shares: list[float]) -> str:
    if len(shares) < 2:
        return "".join(f"{what} {share:.0f} %" for share in shares)
    return f"{what}s {min(shares):.0f}-{max(shares):.0f} %"


def extremes(summary: Mapping[str, Any]) -> str:
    """The least and most used GPU, if they differ; else ''."""
    if "least_used" not in summary:
        return ""
    least, most = summary["least_used"], summary["most_used"]
    return (
        f"GPU of rank {least['rank']} was used least ({least['utilisation']:.0f} % on average),"
        f" of rank {most['rank']} most ({most['utilisation']:.0f} %)"
    )


def _in_order(label: str) -> tuple[str, int]:
    kind = label.rstrip("0123456789")
    return kind, int(label[len(kind) :])
