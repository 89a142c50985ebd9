"""The machine as its kernel shows it: files, limits, variables. Nothing here asks a driver."""

import contextlib
import os
import platform
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from ddptrain.distributed.cpu import bound_to, quota, text_of
from ddptrain.doctor.facts import Port, ProcessLimits, System
from ddptrain.keys import is_secret
from ddptrain.version import __version__

_VARIABLES = re.compile(
    r"CUDA_.*|NVIDIA_.*|NCCL_.*|GLOO_.*|TORCH_.*|PYTORCH_.*|OMP_.*|MKL_NUM_THREADS|KMP_AFFINITY|LD_LIBRARY_PATH|ATEN_.*"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|SLURM_GPUS.*|SLURM_JOB_GPUS"
)
"""Variables that concern training on GPUs; no other is reported, nor one that is named as a secret."""
_OF_TRAINING = re.compile(r"/dev/nvidia(ctl|-uvm|\d+)")
"""Device nodes that training opens; one for profiling may be root's."""
_DISPLAY = ("0x0300", "0x0302")  # PCI classes: a display and a 3D controller
_NVIDIA = "0x10de"
_LISTENS = "0A"  # A state in /proc/net/tcp


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    shown = (name for name in sorted(variables) if _VARIABLES.fullmatch(name) and not is_secret(name))
    return {name: variables[name] for name in shown}


def system(root: Path = Path("/")) -> System:
    """root: of the file system, for a test."""
    kernel = text_of(root / "proc/version")
    wsl = "microsoft" in kernel.lower()
    nodes = sorted(f"/dev/{node.name}" for node in (root / "dev").glob("nvidia*") if not node.is_dir())
    bus = [*(root / "sys/bus/pci/devices").glob("*")]
    module = re.search(r"Kernel Module(?: for \S+)?\s+(\S+)", text_of(root / "proc/driver/nvidia/version"))
    usual = ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib/aarch64-linux-gnu")
    # a driver's own library has its version in its name
    libraries = [
        file for folder in usual for file in sorted((root / folder).glob("libcuda.so.[1-9][0-9][0-9]*"))
    ]
    return System(
        name=socket.gethostname(),
        kind=platform.system(),
        kernel=platform.release(),
        processor=platform.machine(),
        python=platform.python_version(),
        ddptrain=__version__,
        container=_container(root),
        wsl=wsl,
        dxg=(root / "dev/dxg").exists(),
        windows_libcuda=(root / "usr/lib/wsl/lib/libcuda.so.1").exists(),
        linux_libcuda=tuple(f"/{file.relative_to(root)}" for file in libraries) if wsl else (),
        device_nodes=tuple(nodes),
        locked_nodes=tuple(
            node
            for node in nodes
            if _OF_TRAINING.fullmatch(node) and not os.access(root / node[1:], os.R_OK | os.W_OK)
        ),
        pci_devices=len(bus),
        nvidia_devices=tuple(sorted(device.name for device in bus if _is_gpu(device))),
        module=module[1] if module else "",
        infiniband=tuple(sorted(device.name for device in (root / "sys/class/infiniband").glob("*"))),
    )


def limits(root: Path = Path("/")) -> ProcessLimits:
    import resource

    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    infinite = resource.RLIM_INFINITY
    files, locked = (
        resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    )
    cores = os.cpu_count() or 1
    return ProcessLimits(
        machine_cores=cores,
        affinity=bound_to().bit_count() or cores,
        quota=quota(root),
        shm_total=shm.f_frsize * shm.f_blocks if shm else None,
        shm_free=shm.f_frsize * shm.f_bavail if shm else None,
        open_files=None if files == infinite else files,
        locked_memory=None if locked == infinite else locked,
    )


def port(number: int, root: Path = Path("/")) -> Port:
    """Whether a server could listen on it."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torchrun does: remains don't count
        try:
            trial.bind(("", number))
            trial.listen()
        except OSError as error:
            return Port(number, error.strerror or str(error), _owner(number, root))
    return Port(number)


def _owner(number: int, root: Path) -> str:
    """Name and pid of who listens; '' where that is another user's."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        for line in text_of(root / "proc/net" / table).splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == number:
                sockets.add(f"socket:[{words[9]}]")
    for folder in (root / "proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # not ours, or gone
            if any(os.readlink(handle) in sockets for handle in (folder / "fd").iterdir()):
                return f"{text_of(folder / 'comm').strip()} (pid {folder.name})"
    return ""


def _container(root: Path) -> str:
    for sign in (".dockerenv", "run/.containerenv", ".singularity.d"):
        if (root / sign).exists():
            return f"/{sign}"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "Kubernetes"
    groups = text_of(root / "proc/1/cgroup")
    return next((kind for kind in ("docker", "kubepods", "containerd", "lxc") if kind in groups), "")


def _is_gpu(device: Path) -> bool:
    vendor, kind = text_of(device / "vendor").strip(), text_of(device / "class").strip()
    return vendor == _NVIDIA and kind.startswith(_DISPLAY)
