"""How doctor gathers its facts: from files, limits and child processes, some of which hang or crash."""

import dataclasses
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ddptrain.doctor import children, machine, proof
from ddptrain.doctor.facts import Cuda, DriverGpu, GpuProcess, ProbeFailure, ProcessLimits, Settings
from ddptrain.doctor.probes import Probe, collect

# -- every question by itself ------------------------------------------------------------------------


def test_what_raises_or_hangs_becomes_a_fact_and_the_rest_is_there() -> None:
    def raises() -> dict[str, object]:
        raise PermissionError("locked")

    limits = ProcessLimits(8, 4)
    probes = [
        Probe("system", raises),
        Probe("nvml", lambda: time.sleep(20) or {}, 0.2),
        Probe("limits", lambda: {"limits": limits}),
    ]
    began = time.monotonic()
    facts = collect(Settings("cuda"), probes)
    assert time.monotonic() - began < 5
    assert facts.limits == limits
    assert facts.settings.device == "cuda"
    assert set(facts.failures) == {
        ProbeFailure("system", "PermissionError: locked"),
        ProbeFailure("nvml", "no answer in 0.2 s", hung=True),
    }


def test_questions_are_asked_at_the_same_time() -> None:
    probes = [Probe(str(i), lambda: time.sleep(0.3) or {}) for i in range(10)]
    began = time.monotonic()
    collect(Settings(), probes)
    assert time.monotonic() - began < 2


# -- children ----------------------------------------------------------------------------------------

NVML = """
class NVMLError(Exception):
    value = 18
    def __str__(self): return "Driver/library version mismatch"
class Memory: total, used = 80 << 30, 10 << 30
class Running:
    def __init__(self, pid): self.pid, self.usedGpuMemory = pid, 1 << 30
def nvmlInit(): {init}
def nvmlSystemGetDriverVersion(): return b"580.1"
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetMemoryInfo(gpu): return Memory
def nvmlDeviceGetUUID(gpu): return f"GPU-{{gpu}}"
def nvmlDeviceGetName(gpu): return "H100"
def nvmlDeviceGetCudaComputeCapability(gpu): return 9, 0
def nvmlDeviceGetCurrentClocksThrottleReasons(gpu): return 0x24
def nvmlDeviceGetMigMode(gpu): return 1, 1
def nvmlDeviceGetMaxMigDeviceCount(gpu): return 7
def nvmlDeviceGetMigDeviceHandleByIndex(gpu, place):
    if place > 1: raise NVMLError
    return f"slice{{place}}"
def nvmlDeviceGetComputeMode(gpu): return 3
def nvmlDeviceGetComputeRunningProcesses(gpu): return [Running({pid}), Running(4194304)]
def nvmlDeviceGetCurrPcieLinkWidth(gpu): return 8
def nvmlDeviceGetMaxPcieLinkWidth(gpu): raise NVMLError
"""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a pynvml in front of the real one, with this line in nvmlInit."""

    def put(init: str) -> None:
        (tmp_path / "pynvml.py").write_text(NVML.format(init=init, pid=os.getppid()))
        monkeypatch.syspath_prepend(tmp_path)

    return put


def test_the_driver_is_asked_for_its_gpus(nvml: Callable[[str], None]) -> None:
    nvml("pass")
    driver = children.ask("ask_nvml", "nvml", 20)["driver"]
    gpu = driver.gpus[0]
    assert (driver.version, driver.error, gpu.uuid, gpu.capability) == ("580.1", "", "GPU-0", (9, 0))
    assert (gpu.mode, gpu.mig, gpu.slices) == ("exclusive", True, ("GPU-slice0", "GPU-slice1"))
    assert (gpu.slowed, gpu.pcie_width, gpu.pcie_most) == (("heat",), 8, None)
    name = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    assert gpu.processes == (GpuProcess(os.getppid(), name, 1 << 30), GpuProcess(4194304, "", 1 << 30))


QUESTIONS = (
    *("SystemGetDriverVersion", "DeviceGetMemoryInfo", "DeviceGetUUID", "DeviceGetName"),
    *("DeviceGetCudaComputeCapability", "DeviceGetCurrentClocksThrottleReasons", "DeviceGetMigMode"),
    *("DeviceGetComputeMode", "DeviceGetComputeRunningProcesses", "DeviceGetCurrPcieLinkWidth"),
)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_that_a_gpu_refuses_silences_no_other(
    nvml: Callable[[str], None], tmp_path: Path, question: str
) -> None:
    nvml("pass")
    sound = children.ask("ask_nvml", "nvml", 20)["driver"]
    with (tmp_path / "pynvml.py").open("a") as library:
        library.write(f"\ndef nvml{question}(*about): raise NVMLError\n")
    driver = children.ask("ask_nvml", "nvml", 20)["driver"]
    told, of_all = dataclasses.asdict(driver.gpus[0]), dataclasses.asdict(sound.gpus[0])
    assert driver.error == ""
    assert (driver.version, told) != (sound.version, of_all)
    assert sum(told[name] != of_all[name] for name in told) <= 2


def test_a_gpu_that_the_driver_does_not_reach_silences_no_other(
    nvml: Callable[[str], None], tmp_path: Path
) -> None:
    nvml("pass")
    with (tmp_path / "pynvml.py").open("a") as library:
        library.write("""
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index):
    if index == 0: raise NVMLError
    return index
""")
    first, second = children.ask("ask_nvml", "nvml", 20)["driver"].gpus
    assert first == DriverGpu(0, error="Driver/library version mismatch")
    assert (second.index, second.uuid, second.error) == (1, "GPU-1", "")


def test_nvmls_errors_keep_their_number(nvml: Callable[[str], None]) -> None:
    nvml("raise NVMLError")
    driver = children.ask("ask_nvml", "nvml", 20)["driver"]
    assert (driver.code, driver.error) == (18, "Driver/library version mismatch")


@pytest.mark.parametrize(
    ("init", "said", "hung"),
    [
        ("import time; time.sleep(60)", "nvml: no answer in 1.5 s", True),
        ("import os; os.abort()", "nvml: crashed by SIGABRT", False),
        ("raise ValueError('odd')", "nvml: ValueError: odd", False),
        ("import os; os._exit(3)", "nvml: ended with exit code 3", False),
    ],
)
def test_a_child_that_hangs_or_dies_is_a_fact(
    nvml: Callable[[str], None], init: str, said: str, hung: bool
) -> None:
    nvml(init)
    patience = 1.5 if hung else 60
    assert children.ask("ask_nvml", "nvml", patience) == {"failures": (ProbeFailure("nvml", said, hung),)}


LIBCUDA = """
#include <string.h>
int cuInit(unsigned flags) {{ return {code}; }}
int cuDriverGetVersion(int *version) {{ *version = 13020; return 0; }}
int cuDeviceGetCount(int *count) {{ *count = 2; return 0; }}
int cuGetErrorString(int code, const char **text) {{ *text = "mismatch"; return 0; }}
"""


@pytest.mark.parametrize("code", [0, 803])
def test_libcuda_says_how_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    library = tmp_path / "libcuda.so.1"
    (tmp_path / "cuda.c").write_text(LIBCUDA.format(code=code))
    built = subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "cuda.c"], check=False)
    assert built.returncode == 0
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    found = children.ask("ask_cuda", "cuda", 20)["cuda"]
    assert found == Cuda(str(library), code, "mismatch" if code else "", 13020, 0 if code else 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there is one")
def test_without_libcuda_that_is_said() -> None:
    found = children.ask("ask_cuda", "cuda", 20)["cuda"]
    assert found.library == ""
    assert "libcuda.so.1" in found.error


NO_NMS = "operator torchvision::nms does not exist"
VISION = {
    f"raise RuntimeError({NO_NMS!r})": NO_NMS,
    "import os; os.abort()": "it crashes when it is imported",
}


@pytest.mark.parametrize("line", VISION)
def test_a_torchvision_that_does_not_fit_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text(line)
    (tmp_path / "torch.py").write_text("def tensor(values): pass")  # spares the seconds of the real one
    monkeypatch.syspath_prepend(tmp_path)
    assert children.ask("ask_torchvision", "torchvision", 60)["torchvision"].error == VISION[line]


# -- files and limits --------------------------------------------------------------------------------


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_kernel_shows_gpus_driver_and_nodes(tmp_path: Path) -> None:
    bus = "sys/bus/pci/devices"
    root = tree(tmp_path, {
        f"{bus}/0000:17:00.0/vendor": "0x10de\n", f"{bus}/0000:17:00.0/class": "0x030200\n",
        f"{bus}/0000:17:00.1/vendor": "0x10de\n", f"{bus}/0000:17:00.1/class": "0x040300\n",
        f"{bus}/0000:01:00.0/vendor": "0x8086\n", f"{bus}/0000:01:00.0/class": "0x030000\n",
        "dev/nvidia0": "", "dev/nvidiactl": "", "dev/nvidia-caps/cap1": "",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu\nGCC",
        "sys/class/infiniband/mlx5_0/x": "", ".dockerenv": "", "proc/version": "Linux version 6.1",
    })  # fmt: skip
    found = machine.system(root)
    assert (found.pci_devices, found.nvidia_devices) == (3, ("0000:17:00.0",))
    assert found.device_nodes == ("/dev/nvidia0", "/dev/nvidiactl")
    assert (found.module, found.infiniband, found.container) == ("535.129.03", ("mlx5_0",), "/.dockerenv")
    assert (found.wsl, found.locked_nodes) == (False, ())


def test_an_open_kernel_modules_version_is_read_too(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
    assert machine.system(tree(tmp_path, {"proc/driver/nvidia/version": text})).module == "580.95.05"


def test_wsl_is_known_with_the_drivers_in_it(tmp_path: Path) -> None:
    root = tree(tmp_path, {
        "proc/version": "Linux version 5.15.167.4-microsoft-standard-WSL2", "dev/dxg": "",
        "usr/lib/wsl/lib/libcuda.so.1": "", "usr/lib/x86_64-linux-gnu/libcuda.so.535.129.03": "",
    })  # fmt: skip
    found = machine.system(root)
    assert (found.wsl, found.dxg, found.windows_libcuda) == (True, True, True)
    assert found.linux_libcuda == ("/usr/lib/x86_64-linux-gnu/libcuda.so.535.129.03",)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/job/step",
                "sys/fs/cgroup/job/cpu.max": "200000 100000",
                "sys/fs/cgroup/job/step/cpu.max": "max 100000",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n3:memory:/docker/1",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            4.0,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_the_quota_of_a_control_group_is_read(tmp_path: Path, files: dict[str, str], cores: float) -> None:
    assert machine.quota(tree(tmp_path, files)) == cores


def test_this_processs_limits() -> None:
    found = machine.limits()
    assert found.affinity == len(os.sched_getaffinity(0))
    assert found.cores <= found.affinity <= found.machine_cores
    assert dataclasses.replace(found, affinity=8, quota=2.5).cores == 2
    assert dataclasses.replace(found, affinity=8, quota=0.5).cores == 1


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_port_in_use_is_named_with_its_owner(taken: int) -> None:
    found = machine.port(taken)
    assert found.error == "Address already in use"
    assert found.owner.endswith(f"(pid {os.getpid()})")


def test_only_variables_that_matter_are_reported() -> None:
    secrets = {"AWS_SECRET": "x", "NVIDIA_API_KEY": "x", "TORCH_HUB_TOKEN": "x"}
    given = {**secrets, "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "", "HOME": "/", "RANK": "0"}
    assert set(machine.environment(given)) == {"NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "RANK"}


# -- proofs ------------------------------------------------------------------------------------------


def test_the_cpu_computes_right_in_every_type() -> None:
    done = list(proof.prove("cpu"))
    assert {(one.name, one.dtype) for one in done if one.ok or one.lacks} == {
        (name, dtype)
        for name in ("matrix product", "convolution", "training step")
        for dtype in ("fp32", "bf16", "fp16")
    }
    assert all(one.ok for one in done if one.dtype == "fp32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_lost_term_of_512_is_noticed(dtype: torch.dtype) -> None:
    def lossy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b if a.dtype == torch.float64 else a[:, 1:] @ b[1:]

    torch.manual_seed(0)
    left, right = torch.randn(64, 512), torch.randn(512, 64)
    ok, said = proof._compare(lossy, left, right, (512, 0), torch.device("cpu"), dtype)
    assert not ok, said


@pytest.mark.parametrize("wrong", [float("nan"), 0.0])
def test_a_device_that_gives_nothing_is_noticed(wrong: float) -> None:
    def broken(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b if a.dtype == torch.float64 else (a @ b).fill_(wrong)

    left, right = torch.randn(64, 512), torch.randn(512, 64)
    assert not proof._compare(broken, left, right, (512, 16), torch.device("cpu"), torch.bfloat16)[0]


def test_a_result_that_left_the_device_is_noticed() -> None:
    left, right = torch.randn(8, 8), torch.randn(8, 8)
    ok, said = proof._compare(lambda a, b: left, left, right, (8, 0), torch.device("meta"), torch.float32)
    assert (ok, said) == (False, "came out on cpu in torch.float32")


def test_which_devices_are_proved() -> None:
    assert proof.devices("auto", 0) == proof.devices("cpu", 2) == ["cpu"]
    assert proof.devices("cuda", 0) == []
    assert proof.devices("auto", 2) == proof.devices("cuda", 2) == ["cuda:0", "cuda:1"]
    assert proof.devices("cuda:1", 2) == ["cuda:1"]


def test_bandwidth_is_what_each_member_sends() -> None:
    assert proof.bandwidth(10**9, 2, 0.5) == 2.0
    assert proof.bandwidth(10**9, 4, 1.0) == 1.5
