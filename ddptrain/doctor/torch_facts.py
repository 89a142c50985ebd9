"""The facts that only PyTorch knows. Each call imports it."""

import itertools
from pathlib import Path

from ddptrain.distributed.cpu import text_of
from ddptrain.doctor.facts import Torch, TorchCuda, TorchGpu

_FEATURES = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl"),
    "AVX-512 bf16": ("avx512_bf16",),
    "AMX bf16": ("amx_bf16", "amx_tile"),
    "AMX fp16": ("amx_fp16", "amx_tile"),
    "NEON": ("neon",),
    "SVE": ("sve",),
}
"""A name for what a CPU can do, and flags that are all set then, as /proc/cpuinfo spells them without _."""


def as_built() -> Torch:
    """Asks no driver."""
    import torch

    return Torch(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        arch_list=tuple(_arch_list()),
        nccl=_nccl(),
        cpu=torch.backends.cpu.get_cpu_capability(),
        cpu_features=_cpu_features(),
    )


def ask_gpus() -> TorchCuda:
    """Starts CUDA; on a driver that hangs, it does too."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return TorchCuda(error=str(error).splitlines()[0].rstrip("."))
    count = torch.cuda.device_count()
    gpus = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", ""))
        gpus.append(
            TorchGpu(
                index, properties.name, (properties.major, properties.minor), properties.total_memory, uuid
            )
        )
    pairs = itertools.combinations(range(count), 2)
    strangers = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    return TorchCuda(count, "", tuple(gpus), *_cudnn(), tuple(strangers))


def _cudnn() -> tuple[str, str]:
    """Its version, or what is wrong with it."""
    import torch

    try:
        number = torch.backends.cudnn.version()
    except RuntimeError as error:
        return "", str(error).splitlines()[0]
    return "" if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}", ""


def _arch_list() -> list[str]:
    """Without a GPU torch 2.11 hides it from ``torch.cuda.get_arch_list``."""
    import torch

    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    return flags.split() if flags else []


def _nccl() -> str:
    import torch
    import torch.distributed as dist

    if torch.version.cuda is None or not dist.is_available() or not dist.is_nccl_available():
        return ""
    return ".".join(str(part) for part in torch.cuda.nccl.version()[:3])


def _cpu_features() -> tuple[str, ...]:
    lines = text_of(Path("/proc/cpuinfo")).splitlines()
    flags = next(
        (line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features"))),
        [],
    )
    known = {flag.replace("_", "") for flag in flags} | ({"neon"} if "asimd" in flags else set())
    return tuple(
        name for name, needs in _FEATURES.items() if known >= {need.replace("_", "") for need in needs}
    )
