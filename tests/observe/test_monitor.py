"""What the devices do while they run: read by fakes of NVML, sent by real ranks, kept without growing."""

import itertools
import json
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from shell import ddptrain
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddptrain.api.world import World
from ddptrain.observe.gauges import Gauge, GaugeReading, Gpu, Host, Unreadable, own_gauges
from ddptrain.observe.monitor import Monitor, extremes, in_short
from ddptrain.testing import run_ranks

GIB = 2**30


class Fake(Gauge):
    """Says what it is given, one after the other, then the last again; an exception is raised."""

    def __init__(
        self, *said: Mapping[str, float] | GaugeReading | Unreadable, name: str = "NVIDIA Fake"
    ) -> None:
        self.facts = {"name": name}
        self._said = itertools.chain(said, itertools.repeat(said[-1]))
        self.asked = 0

    def read(self) -> GaugeReading:
        self.asked += 1
        said = next(self._said)
        if isinstance(said, Unreadable):
            raise said
        return said if isinstance(said, GaugeReading) else GaugeReading(said)


def nvml(**fields: Any) -> Any:
    """The library, with one GPU; a field may be an exception."""

    def answer(name: str, value: Any) -> Callable[..., Any]:
        def answered(*_: Any) -> Any:
            if isinstance(fields.get(name), Exception):
                raise fields[name]
            return fields.get(name, value)

        return answered

    constants = {
        name: getattr(pynvml, name) for name in dir(pynvml) if name.startswith(("NVML", "nvmlClocks"))
    }
    answers = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetName": "NVIDIA H100",
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=61 * GIB, total=80 * GIB),
        "nvmlDeviceGetPowerUsage": 650_500,
        "nvmlDeviceGetTemperature": 64,
        "nvmlDeviceGetClockInfo": 1755,
        "nvmlDeviceGetCurrentClocksThrottleReasons": pynvml.nvmlClocksThrottleReasonGpuIdle,
    }
    functions = {name: answer(name, value) for name, value in answers.items()}
    return SimpleNamespace(**{**constants, **functions})


def watched(
    world: World, gauges: Mapping[str, Gauge], until: Callable[[Monitor], bool], interval: float = 0.02
) -> Monitor:
    """A monitor that has run until something is so."""
    monitor = Monitor(world, gauges, interval)
    with monitor.running():
        deadline = time.monotonic() + 20
        while not until(monitor):
            assert time.monotonic() < deadline, monitor.summary()
            time.sleep(0.01)
    return monitor


# -- the gauges ---------------------------------------------------------------------------------------


def test_a_gpu_says_all_in_the_units_of_the_names() -> None:
    gpu = Gpu("0-1-2", nvml())
    assert gpu.facts == {"name": "NVIDIA H100", "memory_total_gib": 80.0}
    assert gpu.read() == GaugeReading(
        {
            "utilisation": 97.0,
            "memory_gib": 61.0,
            "power_w": 650.5,
            "temperature_c": 64.0,
            "clock_mhz": 1755.0,
            "throttled": 0.0,  # idle is no trouble
        }
    )


def test_what_holds_the_clock_down_is_told_in_words() -> None:
    reasons = pynvml.nvmlClocksThrottleReasonSwPowerCap | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    reading = Gpu("0", nvml(nvmlDeviceGetCurrentClocksThrottleReasons=reasons)).read()
    assert reading.values["throttled"] == 1
    assert reading.throttled_by == ("power limit", "far too hot")


@pytest.mark.parametrize("code", ["NOT_SUPPORTED", "NO_PERMISSION", "INVALID_ARGUMENT"])
def test_a_field_that_a_gpu_does_not_offer_is_left_out(code: str) -> None:
    """A slice of a GPU (MIG) refuses most, some as not supported and some as no question at all."""
    refused = pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))
    names = ("Name", "UtilizationRates", "PowerUsage", "CurrentClocksThrottleReasons")
    gpu = Gpu("0", nvml(**{f"nvmlDeviceGet{name}": refused for name in names}))
    assert gpu.facts == {"memory_total_gib": 80.0}
    assert set(gpu.read().values) == {*("memory_gib", "temperature_c", "clock_mhz")}


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT])
def test_the_gpu_is_asked_for_by_its_uuid_and_a_part_of_one_too(code: int) -> None:
    asked = []

    def by_uuid(uuid: str) -> str:
        asked.append(uuid)
        if uuid.startswith("GPU-"):
            raise pynvml.NVMLError(code)
        return "part"

    library = nvml()
    library.nvmlDeviceGetHandleByUUID = by_uuid
    Gpu("b1-2", library)
    assert asked == ["GPU-b1-2", "MIG-b1-2"]


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_without_the_library_or_the_gpu_there_is_no_gauge(function: str) -> None:
    with pytest.raises(Unreadable, match="Not Found"):
        Gpu("0", nvml(**{function: pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_this_machines_gpus_are_those_of_torch() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    found, problems = own_gauges(
        World(rank=1, size=2, local_rank=1, local_size=2, device=device), spread=False
    )
    assert (list(found), problems) == (["gpu1"], [])
    properties, facts = torch.cuda.get_device_properties(device), found["gpu1"].facts
    assert facts["name"] == properties.name
    assert facts["memory_total_gib"] == pytest.approx(properties.total_memory / GIB, rel=0.1)
    before = found["gpu1"].read().values["memory_gib"]
    held = torch.ones(2**28, device=device)
    assert found["gpu1"].read().values["memory_gib"] - before == pytest.approx(1.0, abs=0.6), held.shape


def test_this_host_tells_of_its_processor_and_memory() -> None:
    found, problems = own_gauges(World(rank=5, size=6, local_rank=0, local_size=1), spread=True)
    assert not problems
    assert list(found) == ["host5"]
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:  # a busy core
        pass
    values, most = found["host5"].read().values, found["host5"].facts["memory_total_gib"]
    assert 0 < values["cpu"] <= 100
    assert 0 < values["process_gib"] < most
    assert 0 < values["memory_gib"] < most


GROUP = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (6.0, 16.0)),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                f"{GROUP}/job/memory.max": f"{4 * GIB}",
                f"{GROUP}/job/memory.current": f"{3 * GIB}",
                f"{GROUP}/job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
                f"{GROUP}/job/step/memory.max": "max",
                f"{GROUP}/job/step/memory.current": f"{GIB}",
                f"{GROUP}/job/step/memory.stat": "inactive_file 0\n",
            },
            (2.0, 4.0),
        ),
        (
            {
                "proc/self/cgroup": "9:cpu:/x\n4:memory:/x\n0::/\n",
                f"{GROUP}/memory/x/memory.limit_in_bytes": f"{8 * GIB}",
                f"{GROUP}/memory/x/memory.usage_in_bytes": f"{GIB}",
                f"{GROUP}/memory/x/memory.stat": "total_inactive_file 0\n",
                f"{GROUP}/memory/memory.limit_in_bytes": "9223372036854771712",
                f"{GROUP}/memory/memory.usage_in_bytes": f"{GIB}",
                f"{GROUP}/memory/memory.stat": "",
            },
            (1.0, 8.0),
        ),
    ],
    ids=["no limit", "version 2", "version 1"],
)
def test_the_narrowest_limit_of_memory_counts(
    tmp_path: Path, files: Mapping[str, str], expected: tuple[float, float]
) -> None:
    stat = "cpu  10 0 10 60 20 0 0 0 0 0\ncpu0 1 2 3\n"
    meminfo = f"MemTotal: {16 * 2**20} kB\nMemFree: 5 kB\nMemAvailable: {10 * 2**20} kB\nHugePages_Total: 0\n"
    for name, content in {"proc/stat": stat, "proc/meminfo": meminfo, "proc/self/statm": "9 5 1"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    host = Host(tmp_path)
    (tmp_path / "proc/stat").write_text("cpu  40 0 10 110 40 0 0 0 0 0\n")
    values = host.read().values
    assert values["cpu"] == pytest.approx(30)
    assert (values["memory_gib"], host.facts["memory_total_gib"]) == expected


def test_a_host_without_proc_has_no_gauge(tmp_path: Path) -> None:
    with pytest.raises(Unreadable):
        Host(tmp_path)


# -- the monitor --------------------------------------------------------------------------------------


def test_means_peaks_and_reasons_of_one_gpu() -> None:
    slow = GaugeReading({"utilisation": 50.0, "power_w": 700.0, "throttled": 1.0}, ("power limit",))
    fast = GaugeReading({"utilisation": 100.0, "power_w": 500.0, "throttled": 0.0})
    gauge = Fake(slow, fast, fast, fast)
    monitor = watched(World(), {"gpu0": gauge}, lambda m: gauge.asked >= 4)
    assert monitor.latest() == {"gpu0/utilisation": 100, "gpu0/power_w": 500, "gpu0/throttled": 0}
    found = monitor.summary()
    gpu, count = found["gpu0"], found["gpu0"]["readings"]
    assert gpu["name"] == "NVIDIA Fake"
    assert gpu["mean"]["utilisation"] == pytest.approx((50 + 100 * (count - 1)) / count, abs=1e-3)
    assert gpu["peak"] == {"utilisation": 100, "power_w": 700, "throttled": 1}
    assert gpu["mean"]["throttled"] == pytest.approx(1 / count, abs=1e-3)
    assert gpu["throttled_by"] == {"power limit": pytest.approx(1 / count, abs=1e-3)}
    assert "least_used" not in found
    assert extremes(found) == ""


def test_of_gpus_used_alike_none_is_used_least() -> None:
    gauges = {f"gpu{rank}": Fake({"utilisation": 97.0}) for rank in range(2)}
    found = watched(World(), gauges, lambda m: gauges["gpu1"].asked > 2).summary()
    assert found["gpu1"]["mean"] == {"utilisation": 97}
    assert (list(found), extremes(found)) == (["gpu0", "gpu1"], "")


def test_a_gpu_that_is_lost_says_so_and_the_others_go_on() -> None:
    lost, other = Fake({"utilisation": 80.0}, Unreadable("GPU is lost")), Fake({"utilisation": 90.0})
    monitor = watched(World(), {"gpu0": lost, "gpu1": other}, lambda m: other.asked >= 5)
    assert monitor.latest() == {"gpu1/utilisation": 90}
    found = monitor.summary()
    assert found["gpu0"]["lost"] == "GPU is lost"
    assert (found["gpu0"]["readings"], found["gpu0"]["mean"]["utilisation"]) == (1, 80)
    assert extremes(found) == "GPU of rank 0 was used least (80 % on average), of rank 1 most (90 %)"


def test_a_gpu_that_answers_again_counts_again() -> None:
    gauge = Fake(Unreadable("Unknown Error"), {"utilisation": 70.0})
    monitor = watched(World(), {"gpu0": gauge}, lambda m: "gpu0/utilisation" in m.latest())
    assert "lost" not in monitor.summary()["gpu0"]


def test_a_gpu_that_never_answered_is_neither_least_nor_most_used() -> None:
    gauge = Fake(Unreadable("GPU is lost"))
    found = watched(World(), {"gpu0": gauge}, lambda m: gauge.asked > 1).summary()
    assert found["gpu0"]["lost"] == "GPU is lost"
    assert "least_used" not in found


@pytest.mark.parametrize("size", [1, 4, 8])
def test_the_progress_bar_is_told_in_short(size: int) -> None:
    latest = {f"gpu{i}/utilisation": 98.0 - i for i in range(size)}
    latest |= {f"gpu{i}/memory_gib": 61.2 for i in range(size)} | {"host0/cpu": 12.0, "host0/memory_gib": 9.0}
    expected = {1: "GPU 98 % 61 GiB", 4: "GPUs 95-98 %", 8: "GPUs 91-98 %"}[size]
    assert in_short(latest) == expected


def test_without_gpus_the_processor_is_told() -> None:
    assert in_short({"host0/cpu": 88.4, "host0/memory_gib": 3.0}) == "CPU 88 %"
    assert in_short({"host0/cpu": 88.4, "host1/cpu": 70.0}) == "CPUs 70-88 %"
    assert in_short({"gpu0/utilisation": 5.0}) == "GPU 5 %"
    assert in_short({}) == ""


@pytest.mark.parametrize("size", [2, 4])
def test_the_readings_of_all_ranks_reach_the_first(size: int) -> None:
    def ranks(world: World) -> tuple[dict[str, float], dict[str, Any]]:
        gauges: dict[str, Gauge] = {f"gpu{world.rank}": Fake({"utilisation": 90.0 + world.rank})}
        if world.is_first_on_node:
            gauges["host0"] = Fake({"cpu": 20.0}, name="a host")
        expected = size + 1 if world.is_first else 1
        monitor = watched(world, gauges, lambda m: len(m.latest()) == expected)
        return monitor.latest(), monitor.summary()

    (latest, summary), *others = run_ranks(ranks, size)
    assert latest == {"host0/cpu": 20} | {f"gpu{rank}/utilisation": 90 + rank for rank in range(size)}
    assert list(summary) == [*(f"gpu{rank}" for rank in range(size)), "host0", "least_used", "most_used"]
    assert summary["most_used"] == {"rank": size - 1, "utilisation": 90 + size - 1}
    assert summary["host0"]["mean"] == {"cpu": 20}
    assert all(list(own) == [f"gpu{rank}/utilisation"] for rank, (own, _) in enumerate(others, 1))


def test_a_rank_that_has_left_is_simply_old() -> None:
    def ranks(world: World) -> float:
        gauge = Fake({"utilisation": 90.0 + world.rank})
        if not world.is_first:
            watched(world, {"gpu1": gauge}, lambda m: gauge.asked > 5)
            return 0.0
        monitor = Monitor(world, {"gpu0": gauge}, 0.02)
        with monitor.running():
            deadline = time.monotonic() + 20
            while "gpu1/utilisation" not in monitor.latest() and time.monotonic() < deadline:
                time.sleep(0.01)
            before = gauge.asked
            while gauge.asked < before + 20:
                time.sleep(0.01)
        return monitor.latest()["gpu1/utilisation"]

    assert run_ranks(ranks, 2)[0] == 91


def test_a_rank_that_does_not_sample_holds_nobody_up() -> None:
    def ranks(world: World) -> list[str]:
        if not world.is_first:
            return []
        gauge = Fake({"utilisation": 90.0})
        return sorted(watched(world, {"gpu0": gauge}, lambda m: gauge.asked > 5).latest())

    assert run_ranks(ranks, 3)[0] == ["gpu0/utilisation"]


def test_the_thread_ends_whatever_ends_the_run() -> None:
    monitor = Monitor(World(), {"gpu0": Fake({"utilisation": 1.0})}, 0.01)
    with pytest.raises(KeyError), monitor.running():
        raise KeyError
    assert "monitor" not in {thread.name for thread in threading.enumerate()}


def test_what_is_kept_does_not_grow_with_the_readings() -> None:
    gauge = Fake(GaugeReading({"utilisation": 1.5, "throttled": 1.0}, ("power limit",)))
    monitor = Monitor(World(), {"gpu0": gauge}, 0.0005)
    tracemalloc.start()
    sizes = []
    with monitor.running():
        for count in (100, 1500):
            while gauge.asked < count:
                time.sleep(0.001)
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[1] - sizes[0] < 1400 * 8  # not even a number of each


# -- its cost -----------------------------------------------------------------------------------------


def ratio(interval: float, pairs: int, seconds: float) -> float:
    """Median over interleaved pairs: work done in a time without the monitor, as a share of that with it.

    In this process's own time, its threads' together: what other processes do does not count.
    """

    def work() -> int:
        deadline, done = time.process_time() + seconds, 0
        while time.process_time() < deadline:  # seldom asked, for the clock itself costs more with threads
            sum(range(200_000))  # a main thread that never gives Python's lock away by itself
            done += 1
        return done

    found = []
    for pair in range(pairs):
        gauges, _ = own_gauges(World(), spread=False)
        monitor = Monitor(World(), {**gauges, "gpu0": Gpu("0", nvml())}, interval)
        if pair % 2:
            without = work()
            with monitor.running():
                found.append(without / work())
        else:
            with monitor.running():
                share = work()
            found.append(work() / share)
    return statistics.median(found)


@pytest.mark.serial
def test_a_reading_a_second_costs_no_step_time() -> None:
    """Read fifty times as often, it still costs little."""
    assert ratio(interval=0.02, pairs=8, seconds=0.2) < 1.1


@pytest.mark.faults
@pytest.mark.timeout(900)  # two minutes of this process's own time, however long that takes here
def test_a_reading_a_second_costs_a_five_hundredth_at_most() -> None:
    """Twenty a second, so that it shows above what else this machine does."""
    assert ratio(interval=0.05, pairs=120, seconds=0.5) < 1 + 20 / 500


# -- in a run -----------------------------------------------------------------------------------------


def test_a_run_shows_its_host(tmp_path: Path) -> None:
    """In TensorBoard at the log steps, and in the summary."""
    words = "recipe=cnn_digits train.steps=400 log.every=5 device=cpu data.workers=0 run.dir=r"
    done = ddptrain(tmp_path, words, OMP_NUM_THREADS="1")
    assert done.code == 0, done.err
    host = json.loads((tmp_path / "r/summary.json").read_text())["devices"]["host0"]
    assert 0 < host["mean"]["memory_gib"] <= host["peak"]["memory_gib"] < host["memory_total_gib"]
    events = EventAccumulator(str(tmp_path / "r/tensorboard")).Reload()
    assert all(0 <= event.value <= 100 for event in events.Scalars("device/host0/cpu"))
