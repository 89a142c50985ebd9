"""What a GPU and its host say of themselves, read without torch: its CUDA calls could wait for the device."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import torch

from ddptrain.api.world import World

_GIB = 2**30
_SLOWED = {
    "SwPowerCap": "power limit",
    "SwThermalSlowdown": "too hot",
    "HwThermalSlowdown": "far too hot",
    "HwPowerBrakeSlowdown": "the power supply's brake",
    "HwSlowdown": "hardware slowdown",
}
"""NVML's reasons for a lower clock, without those that are no trouble: idle, or a clock that was set."""


class Reading(NamedTuple):
    values: Mapping[str, float]
    """By name, with the unit in it; a share is in percent."""
    throttled_by: tuple[str, ...] = ()
    """Why the clock is held down, in words."""


class Unreadable(Exception):
    """There is nothing to read, or not now: the reason."""


class Gauge(Protocol):
    """What is read about once a second, by a thread."""

    facts: Mapping[str, str | float]
    """What never changes: a name, a size."""

    def read(self) -> Reading: ...


@final
class Gpu(Gauge):
    """A GPU by NVIDIA's management library.

    uuid: as torch gives it, for the library counts GPUs in another order. nvml: the module pynvml. Raises
    Unreadable where there is no such GPU, or no library.
    """

    def __init__(self, uuid: str, nvml: Any) -> None:
        self._nvml = nvml
        self._refusals = (
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_NoPermission,
            nvml.NVMLError_InvalidArgument,  # what NVML says to a slice's handle
        )
        try:
            nvml.nvmlInit()
            self._handle = self._named(uuid)
            self.facts = dict(self._facts())
        except nvml.NVMLError as error:
            raise Unreadable(str(error)) from error

    def read(self) -> Reading:
        """Without the fields that this GPU does not offer, or not to this user: a slice of one (MIG) has few.
        Raises Unreadable where it does not answer."""
        nvml, gpu = self._nvml, self._handle
        fields: dict[str, Callable[[], Any]] = {
            "utilisation": lambda: float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
            "memory_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / _GIB,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            "clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            "reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
        }
        values: dict[str, Any] = {}
        for name, field in fields.items():
            try:
                values[name] = field()
            except self._refusals:
                continue
            except nvml.NVMLError as error:
                raise Unreadable(str(error)) from error
        if "reasons" not in values:
            return Reading(values)
        reasons = int(values.pop("reasons"))
        slowed = [words for name, words in _SLOWED.items() if reasons & self._bit(name)]
        return Reading({**values, "throttled": float(bool(slowed))}, tuple(slowed))

    def _facts(self) -> Iterator[tuple[str, str | float]]:
        with contextlib.suppress(*self._refusals):
            yield "name", str(self._nvml.nvmlDeviceGetName(self._handle))
        with contextlib.suppress(*self._refusals):  # it shares the host's
            yield "memory_total_gib", self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total / _GIB

    def _named(self, uuid: str) -> object:
        """The library writes GPU-<uuid>, and MIG-<uuid> for a part of a GPU."""
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except (self._nvml.NVMLError_NotFound, self._nvml.NVMLError_InvalidArgument):
            return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")

    def _bit(self, reason: str) -> int:
        return int(getattr(self._nvml, f"nvmlClocksThrottleReason{reason}"))


_UNLIKE_LINUX = (OSError, KeyError, ValueError, IndexError)
"""A /proc that is not there, or says other things than Linux's."""


@final
class Host(Gauge):
    """Processor and memory of this node, and of this process, from /proc. Raises Unreadable where there is
    none.

    Where a container or a scheduler allows less memory than the host has, that is what counts. root: of the
    file system.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        try:
            self._before = self._jiffies()
            self.facts = {"memory_total_gib": self._memory()[1] / _GIB}
        except _UNLIKE_LINUX as error:
            raise Unreadable(repr(error)) from error

    def read(self) -> Reading:
        try:
            now, (used, _) = self._jiffies(), self._memory()
            pages = int((self._root / "proc/self/statm").read_text().split()[1])
        except _UNLIKE_LINUX as error:
            raise Unreadable(repr(error)) from error
        busy, total = (after - before for before, after in zip(self._before, now, strict=True))
        self._before = now
        values = {} if total <= 0 else {"cpu": 100 * busy / total}
        own = pages * os.sysconf("SC_PAGE_SIZE")
        return Reading({**values, "memory_gib": used / _GIB, "process_gib": own / _GIB})

    def _jiffies(self) -> tuple[int, int]:
        """Busy, and all, since the host started."""
        words = (self._root / "proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, idle, waiting, *rest = map(int, words)
        busy = user + nice + system + sum(rest)
        return busy, busy + idle + waiting

    def _memory(self) -> tuple[int, int]:
        """Bytes that are used, and that there are: of the narrowest limit."""
        lines = (self._root / "proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        total = kib["MemTotal"] * 1024
        found = [(total - kib["MemAvailable"] * 1024, total), *self._limited()]
        return min(found, key=lambda used_and_total: used_and_total[1])

    def _limited(self) -> Iterator[tuple[int, int]]:
        """As `_memory`, of this process's control group and those around it that have a limit. What can be
        thrown away at once (files read long ago) is not used."""
        groups = self._root / "sys/fs/cgroup"
        kinds = {
            "": (groups, "memory.max", "memory.current", "inactive_file"),
            "memory": (
                groups / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            ),
        }
        own = self._root / "proc/self/cgroup"
        for line in own.read_text().splitlines() if own.is_file() else []:
            _, kind, path = line.split(":", 2)
            if kind not in kinds:
                continue
            base, limit, usage, idle = kinds[kind]
            inside = base / path.lstrip("/")
            for folder in (inside, *inside.parents):
                if not folder.is_relative_to(base):
                    break
                try:
                    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    used = int((folder / usage).read_text()) - int(stat.get(idle, 0))
                    yield used, int((folder / limit).read_text())
                except (OSError, ValueError):  # the topmost has no limit, or it is the word max
                    continue


def own_gauges(world: World, spread: bool) -> tuple[dict[str, Gauge], list[str]]:
    """What this rank reads: gpu<rank>, and on a node's first rank host<node>; and what it can't, in words.

    spread: one process uses all GPUs (strategy=dp), which are then counted as torch does.
    """
    gpus = {world.rank: world.device}
    if spread and world.device.type == "cuda":
        gpus = {i: torch.device("cuda", i) for i in range(torch.cuda.device_count())}
    found: dict[str, Gauge] = {}
    problems = []
    for number, device in gpus.items():
        if device.type != "cuda":
            continue
        import pynvml

        try:
            found[f"gpu{number}"] = Gpu(str(torch.cuda.get_device_properties(device).uuid), pynvml)
        except Unreadable as error:
            problems.append(f"{device} tells nothing of its use ({error})")
    if world.is_first_on_node:
        try:
            # torchrun's number of the node, where it speaks: nodes may have different numbers of ranks
            node = os.environ.get("GROUP_RANK", world.rank // world.local_size)
            found[f"host{node}"] = Host()
        except Unreadable as error:
            problems.append(f"the host tells nothing of its use ({error})")
    return found, problems
