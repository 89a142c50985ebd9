"""What doctor asks in child processes; `children.ask` starts these functions by their names."""

import ctypes
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from ddptrain.distributed.cpu import text_of
from ddptrain.doctor.children import begin, tell
from ddptrain.doctor.facts import Cuda, Driver, DriverGpu, GpuProcess, TorchVision
from ddptrain.doctor.torch_facts import as_built, ask_gpus

_MODES = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive"}
_HEAT = 0x20 | 0x40  # Clock event reasons: thermal slowdown by software, by hardware
_POWER = 0x80  # The power brake, by hardware; the software's power cap (0x4) is daily life under load


def ask_torch(requested: str) -> None:
    """The PyTorch that is installed, how it sees the GPUs, and the proofs on the device.

    requested: auto, cpu, cuda, cuda:<index>.
    """
    from ddptrain.doctor import proof

    tell("torch", as_built())
    count = 0
    if requested != "cpu":
        begin("cuda")
        torch_cuda = ask_gpus()
        tell("torch_cuda", torch_cuda)
        count = torch_cuda.count
    begin("proof")
    for device in proof.devices(requested, count):
        for proved in proof.prove(device):
            tell("proofs", (proved,))
    begin("all-reduce")
    if requested in ("auto", "cuda") and count > 1:
        for link in proof.between_gpus(count):
            tell("links", (link,))
    begin("end")


def ask_torchvision() -> None:
    """Does torchvision belong to this PyTorch? A pair that does not fit raises, or crashes."""
    try:
        version = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        version = ""
    tell("torchvision", TorchVision(version, "it crashes when it is imported"))  # until it has not
    import torch

    try:
        from torchvision.ops import nms

        kept = nms(torch.tensor([[0.0, 0.0, 9.0, 9.0], [0.0, 0.0, 9.0, 8.0]]), torch.tensor([0.5, 0.9]), 0.5)
        error = "" if kept.tolist() == [1] else f"nms keeps boxes {kept.tolist()} where 1 is right"
    except (ImportError, RuntimeError, AttributeError) as failed:
        error = str(failed).splitlines()[0]
    tell("torchvision", TorchVision(version, error))


def ask_cuda() -> None:
    """Does CUDA start? By libcuda alone, for its number tells more than PyTorch's words."""
    name = "nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(name)
    except OSError as error:
        tell("cuda", Cuda(error=str(error)))
        return
    version, count, text = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    code = cuda.cuInit(0)
    if code:
        cuda.cuGetErrorString(code, ctypes.byref(text))
    else:
        code = cuda.cuDeviceGetCount(ctypes.byref(count))
    words = text.value.decode() if text.value else ""
    tell("cuda", Cuda(_loaded_file(name), code, words, version.value, count.value))


def _loaded_file(name: str) -> str:
    """Where the loader found libcuda."""
    maps = text_of(Path("/proc/self/maps")).splitlines()
    return next((line.split(maxsplit=5)[5] for line in maps if "/libcuda.so" in line), name)


def ask_nvml() -> None:
    """What the driver tells about its GPUs, through NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        tell("driver", Driver(error=f"{error}", code=int(error.value)))
        return
    version = _text(_or(pynvml, "", pynvml.nvmlSystemGetDriverVersion))
    tell("driver", Driver(version, gpus=tuple(_gpu(pynvml, index) for index in range(count))))


def _gpu(nvml: Any, index: int) -> DriverGpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:  # the others may be sound
        return DriverGpu(index, error=f"{error}")
    memory = _or(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
    reasons = _or(nvml, 0, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    mig = _or(nvml, (0, 0), nvml.nvmlDeviceGetMigMode, handle)[0] == 1
    return DriverGpu(
        index=index,
        uuid=_text(_or(nvml, "", nvml.nvmlDeviceGetUUID, handle)),
        name=_text(_or(nvml, "", nvml.nvmlDeviceGetName, handle)),
        capability=tuple(_or(nvml, (0, 0), nvml.nvmlDeviceGetCudaComputeCapability, handle)),
        memory=int(memory.total) if memory else 0,
        used=int(memory.used) if memory else 0,
        mode=_MODES.get(_or(nvml, 0, nvml.nvmlDeviceGetComputeMode, handle), "default"),
        mig=mig,
        slices=_slices(nvml, handle) if mig else (),
        processes=_processes(nvml, handle),
        slowed=tuple(name for name, bits in (("heat", _HEAT), ("power", _POWER)) if reasons & bits),
        pcie_width=_or(nvml, None, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_most=_or(nvml, None, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
    )


def _slices(nvml: Any, handle: Any) -> tuple[str, ...]:
    uuids = []
    for place in range(_or(nvml, 0, nvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
        part = _or(nvml, None, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)  # not all are taken
        if part is not None:
            uuids.append(_text(_or(nvml, "", nvml.nvmlDeviceGetUUID, part)))
    return tuple(uuid for uuid in uuids if uuid)


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    """Those that compute on it, but for doctor's own children."""
    running = _or(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return tuple(
        GpuProcess(
            process.pid,
            text_of(Path(f"/proc/{process.pid}/comm")).strip(),
            int(process.usedGpuMemory or 0),
        )
        for process in running
        if _parent(process.pid) != os.getppid()
    )


def _parent(pid: int) -> int | None:
    stat = text_of(Path(f"/proc/{pid}/stat"))
    return int(stat.rpartition(")")[2].split()[1]) if stat else None


def _or(nvml: Any, otherwise: Any, question: Any, *about: Any) -> Any:
    """Not every GPU answers every question."""
    try:
        return question(*about)
    except nvml.NVMLError:
        return otherwise


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
