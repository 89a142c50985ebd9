"""Readings of GPU and host, without torch, whose CUDA calls could wait for the device."""

import contextlib
import math
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
"""NVML's reasons for a lower clock, without harmless ones: idle, or a clock that was set."""


class GaugeReading(NamedTuple):
    values: Mapping[str, float]
    """By name, with the unit in the name; fractions are in percent."""
    throttled_by: tuple[str, ...] = ()
    """Why the clock is reduced, in words."""


class Unreadable(Exception):
    """A gauge can't be read, or not now; the message is the reason."""


class Gauge(Protocol):
    """Read about once a second, by a thread."""

    facts: Mapping[str, str | float]
    """Constant facts: a name, a size."""

    def read(self) -> GaugeReading: ...


@final
class Gpu(Gauge):
    """A GPU by NVIDIA's management library.

    uuid: torch's (NVML numbers GPUs in another order). nvml: the module pynvml. Raises Unreadable if there is
    no such GPU, or no library.
    """

    def __init__(self, uuid: str, nvml: Any) -> None:
        self._nvml = nvml
        self._refusals = (
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_NoPermission,
            nvml.NVMLError_InvalidArgument,  # NVML's answer for a MIG slice's handle
        )
        try:
            nvml.nvmlInit()
            self._handle = self._handle_of(uuid)
            self.facts = dict(self._facts())
        except nvml.NVMLError as error:
            raise Unreadable(str(error)) from error

    def read(self) -> GaugeReading:
        """The fields that this GPU supports for this user (a MIG slice supports few). Raises Unreadable if it
        does not answer."""
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
            return GaugeReading(values)
        reasons = int(values.pop("reasons"))
        slowed = [words for name, words in _SLOWED.items() if reasons & self._bit(name)]
        return GaugeReading({**values, "throttled": float(bool(slowed))}, tuple(slowed))

    def _facts(self) -> Iterator[tuple[str, str | float]]:
        with contextlib.suppress(*self._refusals):
            yield "name", str(self._nvml.nvmlDeviceGetName(self._handle))
        with contextlib.suppress(*self._refusals):  # not supported if the GPU shares the host's memory
            yield "memory_total_gib", self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total / _GIB

    def _handle_of(self, uuid: str) -> object:
        """The handle. NVML's names are GPU-<uuid>, and MIG-<uuid> for a slice."""
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except (self._nvml.NVMLError_NotFound, self._nvml.NVMLError_InvalidArgument):
            return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")

    def _bit(self, reason: str) -> int:
        return int(getattr(self._nvml, f"nvmlClocksThrottleReason{reason}"))


_UNLIKE_LINUX = (OSError, KeyError, ValueError, IndexError)
"""There is no /proc, or it is not Linux's."""


@final
class Host(Gauge):
    """CPU and memory of this node and this process, from /proc. Raises Unreadable if there is none.

    If a container or scheduler limits memory, the limit counts. root: of the file system.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        try:
            self._before = self._jiffies()
            self.facts = {"memory_total_gib": self._memory()[1] / _GIB}
        except _UNLIKE_LINUX as error:
            raise Unreadable(repr(error)) from error

    def read(self) -> GaugeReading:
        try:
            now, (used, _) = self._jiffies(), self._memory()
            pages = int((self._root / "proc/self/statm").read_text().split()[1])
        except _UNLIKE_LINUX as error:
            raise Unreadable(repr(error)) from error
        busy, total = (after - before for before, after in zip(self._before, now, strict=True))
        self._before = now
        values = {} if total <= 0 else {"cpu": 100 * busy / total}
        own = pages * os.sysconf("SC_PAGE_SIZE")
        return GaugeReading({**values, "memory_gib": used / _GIB, "process_gib": own / _GIB})

    def free_memory(self) -> float:
        """Bytes, by the limit that leaves least. Raises Unreadable."""
        try:
            return min(total - used for used, total in self._limits())
        except _UNLIKE_LINUX as error:
            raise Unreadable(repr(error)) from error

    def _jiffies(self) -> tuple[int, int]:
        """Busy time and total time since the host started."""
        words = (self._root / "proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, idle, waiting, *rest = map(int, words)
        busy = user + nice + system + sum(rest)
        return busy, busy + idle + waiting

    def _memory(self) -> tuple[int, int]:
        """(used, total) bytes, of the smallest limit."""
        return min(self._limits(), key=lambda used_and_total: used_and_total[1])

    def _limits(self) -> list[tuple[int, int]]:
        """(used, total) bytes, of the machine and of each limit."""
        lines = (self._root / "proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        total = kib["MemTotal"] * 1024
        return [(total - kib["MemAvailable"] * 1024, total), *self._limited()]

    def _limited(self) -> Iterator[tuple[int, int]]:
        """(used, total) of this process's control group and its parents with a limit. Inactive file cache
        does not count as used."""
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
                except (OSError, ValueError):  # the root has no limit, or it is "max"
                    continue


def free_memory() -> float:
    """Bytes that this process may still take, of the node's memory or of the smallest limit; infinite where
    that is not known."""
    try:
        return Host().free_memory()
    except Unreadable:
        return math.inf


def own_gauges(world: World, spread: bool) -> tuple[dict[str, Gauge], list[str]]:
    """This rank's gauges: gpu<rank>, and on a node's first rank host<node>; and messages on those it can't
    read.

    spread: one process uses all GPUs (strategy=dp), which are then numbered as in torch.
    """
    gpus = {world.rank: world.device}
    if spread and world.device.type == "cuda":
        gpus = {i: torch.device("cuda", i) for i in range(torch.cuda.device_count())}
    gauges: dict[str, Gauge] = {}
    problems = []
    for number, device in gpus.items():
        if device.type != "cuda":
            continue
        import pynvml

        try:
            gauges[f"gpu{number}"] = Gpu(str(torch.cuda.get_device_properties(device).uuid), pynvml)
        except Unreadable as error:
            problems.append(f"the utilisation of {device} can't be read ({error})")
    if world.is_first_on_node:
        try:
            # torchrun's node number if set: nodes may have different numbers of ranks
            node = os.environ.get("GROUP_RANK", world.rank // world.local_size)
            gauges[f"host{node}"] = Host()
        except Unreadable as error:
            problems.append(f"the utilisation of the host can't be read ({error})")
    return gauges, problems
