"""Machines that nobody has here: a sound one, and what a person reads when one thing of it is broken."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddptrain.doctor.examine import RULES, examine
from ddptrain.doctor.facts import (
    Cuda,
    Driver,
    DriverGpu,
    Facts,
    GpuProcess,
    Link,
    Port,
    ProbeFailure,
    ProcessLimits,
    Proof,
    Settings,
    System,
    Torch,
    TorchCuda,
    TorchGpu,
    TorchVision,
)
from ddptrain.doctor.findings import OK, PROBLEM, WARNING, Finding, problems
from ddptrain.doctor.rules_gpu import visible_gpus
from ddptrain.doctor.show import header

GIB = 2**30
NODES = ("/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl")
GPUS = tuple(
    DriverGpu(i, f"GPU-{i}a", "NVIDIA H100", (9, 0), 80 * GIB, GIB // 2, pcie_width=16, pcie_most=16)
    for i in range(2)
)
SEEN = tuple(TorchGpu(i, "NVIDIA H100", (9, 0), 80 * GIB, f"{i}a") for i in range(2))
PROVED = ("matrix product", "convolution", "training step")
SOUND = Facts(
    settings=Settings("auto", workers=4),
    environment={"CUDA_VISIBLE_DEVICES": "0,1"},
    system=System(
        "node1", kernel="6.1", processor="x86_64", python="3.11.7", ddptrain="0.1.0", device_nodes=NODES,
        pci_devices=40, nvidia_devices=("0000:17:00.0", "0000:65:00.0"), module="580.95.05",
    ),
    limits=ProcessLimits(32, 32, None, 64 * GIB, 64 * GIB, 65536, 8 * 2**20),
    port=Port(29500),
    driver=Driver("580.95.05", gpus=GPUS),
    cuda=Cuda("/usr/lib/libcuda.so.580.95.05", 0, "", 13000, 2),
    torch=Torch(
        "2.15.0+cu132", "13.2", arch_list=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
        nccl="2.30.7",
        cpu="AVX512", cpu_features=("AVX2", "AVX-512", "AMX bf16"),
    ),
    torch_cuda=TorchCuda(2, "", SEEN, "9.26.0"),
    torchvision=TorchVision("0.29.2"),
    proofs=tuple(Proof(name, f"cuda:{i}", dtype, True, "fine") for i in range(2) for dtype in ("fp32", "bf16")
                 for name in PROVED),
    links=(Link(("cuda:0", "cuda:1"), 67.0, 250.0),),
)  # fmt: skip


def broken(**sections: Any) -> Facts:
    """The sound machine with some of its facts replaced: dict for single fields, else the whole section."""
    changed = {
        name: dataclasses.replace(getattr(SOUND, name), **value)
        if isinstance(value, dict) and name != "environment"
        else value
        for name, value in sections.items()
    }
    return dataclasses.replace(SOUND, **changed)


def gpus(**fields: Any) -> dict[str, Any]:
    """Both GPUs of the driver's list, changed."""
    return {"gpus": tuple(dataclasses.replace(gpu, **fields) for gpu in GPUS)}


def first_gpu(**fields: Any) -> dict[str, Any]:
    return {"gpus": (dataclasses.replace(GPUS[0], **fields), GPUS[1])}


def shows(visible: str | None, **sections: Any) -> Facts:
    """With other CUDA_VISIBLE_DEVICES: CUDA then counts none, as far as doctor knows."""
    facts = broken(
        cuda={"code": 100},
        torch_cuda=TorchCuda(0, "No CUDA GPUs are available"),
        proofs=(),
        links=(),
        **sections,
    )
    return dataclasses.replace(
        facts, environment={} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    )


NO_CUDA = TorchCuda(0, "Found no NVIDIA driver on your system")
NOTHING = {
    "driver": Driver(error="NVML Shared Library Not Found", code=12),
    "cuda": Cuda(error="libcuda.so.1: cannot open shared object file"),
    "torch_cuda": NO_CUDA, "proofs": (), "links": (), "environment": {},
}  # fmt: skip
"""What else is seen where there is no driver at all: a cascade of consequences."""


def start_code(code: int) -> Facts:
    found = TorchCuda(0, f"Unexpected error from cudaGetDeviceCount(). Error {code}")
    return broken(environment={}, cuda={"code": code, "count": 0}, torch_cuda=found, proofs=(), links=())


class Case(NamedTuple):
    facts: Facts
    id: str
    level: str
    cause: str
    remedy: str


CASES = {
    # -- is there a GPU, and does its driver answer?
    "no GPU": Case(
        broken(system={"device_nodes": (), "nvidia_devices": (), "module": ""}, **NOTHING),
        "no-gpu", PROBLEM, "no GPU in this machine, for its PCI bus shows nothing by NVIDIA", "device=cpu"),
    "no GPU, no bus to be seen": Case(
        broken(system={"device_nodes": (), "nvidia_devices": (), "module": "", "pci_devices": 0}, **NOTHING),
        "no-gpu", PROBLEM, "no GPU in this machine, or none that the kernel shows", "device=cpu"),
    "no driver": Case(
        broken(system={"device_nodes": (), "module": ""}, **NOTHING),
        "no-driver", PROBLEM, "there is a GPU (0000:17:00.0, 0000:65:00.0), but no NVIDIA driver is loaded",
        "sudo ubuntu-drivers install"),
    "module without nodes": Case(
        broken(system={"device_nodes": ()}, **NOTHING),
        "no-device-node", PROBLEM, "but nobody made the nodes", "sudo nvidia-modprobe -u -c=0"),
    "container without GPUs": Case(
        broken(system={"device_nodes": (), "container": "/.dockerenv"}, **NOTHING),
        "container-without-gpus", PROBLEM, "this is a container (/.dockerenv) that was started without GPUs",
        "docker run --gpus all"),
    "pod that sees no bus": Case(
        broken(system={"device_nodes": (), "nvidia_devices": (), "pci_devices": 0, "module": "",
                       "container": "Kubernetes"}, **NOTHING),
        "container-without-gpus", PROBLEM, "started without GPUs", "nvidia.com/gpu: 1}"),
    "container with the driver only": Case(
        broken(system={"device_nodes": ("/dev/nvidiactl", "/dev/nvidia-uvm"), "container": "docker"},
               **NOTHING),
        "no-gpu-node", PROBLEM, "given the driver but none of the GPUs", "--gpus all"),
    "driver that found no GPU": Case(
        broken(system={"device_nodes": ("/dev/nvidiactl",)}, **NOTHING),
        "no-gpu-node", PROBLEM, "has found no GPU that it can run", "sudo nvidia-modprobe"),
    "locked nodes": Case(
        broken(system={"locked_nodes": ("/dev/nvidia0",)}, **NOTHING),
        "device-node-locked", PROBLEM, "this user may not open the GPU's device nodes", "usermod -aG"),
    "WSL without Windows' driver": Case(
        broken(system={"wsl": True, "dxg": True, "device_nodes": ()}, **NOTHING),
        "wsl-no-driver", PROBLEM, "the driver of Windows serves the GPU", "in Windows (none inside WSL)"),
    "WSL with a Linux driver": Case(
        broken(system={"wsl": True, "dxg": True, "windows_libcuda": True, "device_nodes": (),
                       "linux_libcuda": ("/usr/lib/x86_64-linux-gnu/libcuda.so.535.1",)}, **NOTHING),
        "wsl-linux-driver", PROBLEM, "a Linux driver is installed inside WSL", "sudo apt purge"),
    "NVML error 18": Case(
        broken(driver=Driver(error="Driver/library version mismatch", code=18), cuda={"code": 803},
               torch_cuda=NO_CUDA, proofs=(), links=()),
        "nvml-mismatch", PROBLEM, "the kernel still runs the module of the old one", "reboot"),
    "module not loaded": Case(
        broken(driver=Driver(error="Driver Not Loaded", code=9), cuda={"code": 100}, torch_cuda=NO_CUDA,
               proofs=(),
               links=()),
        "driver-not-loaded", PROBLEM, "its kernel module is not loaded", "sudo modprobe nvidia"),
    "lost GPU": Case(
        broken(driver=Driver(error="GPU is lost", code=15), cuda={"code": 999}, torch_cuda=NO_CUDA, proofs=(),
               links=()),
        "gpu-lost", PROBLEM, "fallen off the bus", "dmesg"),
    "every GPU lost": Case(
        broken(driver={"gpus": (DriverGpu(0, error="GPU is lost"), DriverGpu(1, error="GPU is lost"))},
               cuda={"code": 999}, torch_cuda=NO_CUDA, proofs=(), links=()),
        "gpu-lost", PROBLEM, "fallen off the bus", "dmesg"),
    "one lost GPU of two": Case(
        broken(environment={}, driver={"gpus": (GPUS[0], DriverGpu(1, error="GPU is lost"))}),
        "gpu-silent", WARNING, "does not reach GPU 1", "dmesg"),
    "driver that hangs": Case(
        broken(driver=None, cuda=None, torch_cuda=None, proofs=(), links=(),
               failures=(ProbeFailure("nvml", "no answer in 10 s", True),
                         ProbeFailure("cuda", "no answer in 10 s", True))),
        "driver-hangs", PROBLEM, "the driver hangs", "reboot"),
    "container without libcuda": Case(
        broken(cuda=Cuda(error="libcuda.so.1: cannot open"), torch_cuda=NO_CUDA, proofs=(), links=()),
        "no-libcuda", PROBLEM, "libcuda.so.1 is not to be found",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
    "no pynvml": Case(
        broken(driver=None, failures=(ProbeFailure("nvml", "No module named 'pynvml'"),)),
        "nvml-quiet", WARNING, "NVML does not answer", "pip install nvidia-ml-py"),
    "macOS": Case(
        broken(settings=Settings("cuda"), system={"kind": "Darwin", "device_nodes": ()}, **NOTHING),
        "macos", PROBLEM, "macOS has no CUDA", "device=mps"),
    "ROCm": Case(
        broken(torch={"cuda": None, "hip": "7.1"}, system={"device_nodes": ()}, **NOTHING),
        "rocm-build", WARNING, "built for AMD's GPUs", "rocminfo"),
    # -- do build, driver and variables fit together?
    "CPU build": Case(
        broken(torch={"cuda": None, "version": "2.15.0+cpu"}, torch_cuda=NO_CUDA, proofs=(), links=()),
        "torch-cpu-build", PROBLEM, "PyTorch 2.15.0+cpu is built without CUDA", "without +cpu"),
    "CPU build, old driver": Case(
        broken(torch={"cuda": None}, driver={"version": "550.54"}, torch_cuda=NO_CUDA, proofs=(), links=()),
        "torch-cpu-build", PROBLEM, "built without CUDA", "cu126"),
    "driver 550 for CUDA 13": Case(
        broken(driver={"version": "550.54.14"}, torch_cuda=TorchCuda(0, "The NVIDIA driver is too old"),
               proofs=(),
               links=()),
        "driver-too-old", PROBLEM,
        "CUDA 13.2, which this PyTorch brings, needs a driver of version 580 or later",
        "update the driver to 580 or later (sudo ubuntu-drivers install, or sudo dnf update; for a"
        " container on its"
        " host), and reboot; or pip install 'torch>=2.11,<2.15'"),
    "driver 470 for CUDA 13": Case(
        broken(driver={"version": "470.82"}, torch_cuda=NO_CUDA, proofs=(), links=()),
        "driver-too-old", PROBLEM, "version 580 or later", "update the driver to 580"),
    "driver 515 for CUDA 12": Case(
        broken(driver={"version": "515.1"}, torch={"cuda": "12.6"}, torch_cuda=NO_CUDA, proofs=(), links=()),
        "driver-too-old", PROBLEM, "CUDA 12.6, which this PyTorch brings, needs a driver of version 525",
        "525"),
    "driver 440 for CUDA 11": Case(
        broken(driver={"version": "440.33"}, torch={"cuda": "11.8"}, torch_cuda=NO_CUDA, proofs=(), links=()),
        "driver-too-old", PROBLEM, "needs a driver of version 450", "450"),
    "old driver on WSL": Case(
        broken(system={"wsl": True, "dxg": True, "windows_libcuda": True, "device_nodes": ()},
               driver={"version": "551.23"}, torch_cuda=NO_CUDA, proofs=(), links=()),
        "driver-too-old", PROBLEM, "version 580", "in Windows, not inside WSL"),
    "variable empty": Case(
        shows(""), "cvd-hides-all", PROBLEM, "CUDA_VISIBLE_DEVICES='' hides every GPU",
        "unset CUDA_VISIBLE_DEVICES"),
    "variable -1": Case(
        shows("-1"), "cvd-hides-all", PROBLEM, "CUDA_VISIBLE_DEVICES='-1' hides every GPU", "unset"),
    "variable beyond": Case(
        shows("2,0"), "cvd-out-of-range", PROBLEM,
        "names 2, and this machine has GPUs 0 to 1: CUDA hides that entry"
        " and all after it", "nvidia-smi -L"),
    "variable of another machine": Case(
        shows("GPU-ffff"), "cvd-out-of-range", PROBLEM, "names GPU-ffff, and this machine has",
        "nvidia-smi -L"),
    "variable misspelt": Case(
        shows("gpu0,1"), "cvd-invalid", PROBLEM, "'gpu0' in CUDA_VISIBLE_DEVICES='gpu0,1' names no GPU",
        "numbers"),
    "variable twice": Case(
        shows("0,1,0"), "cvd-duplicate", PROBLEM, "names a GPU twice", "export CUDA_VISIBLE_DEVICES=0,1"),
    "variable hides what is asked": Case(
        shows("1", settings=Settings("cuda:1")), "cvd-hides-asked", PROBLEM,
        "shows 1 of 2 GPUs, counted from 0 anew, so"
        " device=cuda:1 is hidden", "device=cuda:0"),
    "803": Case(start_code(803), "cuda-803", PROBLEM, "two versions of the driver meet", "LD_LIBRARY_PATH"),
    "802": Case(start_code(802), "cuda-802", PROBLEM, "fabric manager does not run", "nvidia-fabricmanager"),
    "999": Case(start_code(999), "cuda-999", PROBLEM, "in a bad state", "sudo modprobe nvidia_uvm"),
    "100": Case(start_code(100), "cuda-100", PROBLEM, "shows this process no GPU", "nvidia-smi -L"),
    "101": Case(start_code(101), "cuda-101", PROBLEM, "a GPU was named that is not there",
    "unset CUDA_VISIBLE"),
    "804": Case(start_code(804), "cuda-804", PROBLEM, "'compat' libcuda", "LD_LIBRARY_PATH"),
    "3": Case(start_code(3), "cuda-3", PROBLEM, "/dev/nvidia-uvm is missing", "nvidia-modprobe -u"),
    "46": Case(start_code(46), "cuda-46", PROBLEM, "CUDA does not start on this driver", "reboot"),
    "CUDA crashes": Case(
        broken(cuda=None, torch_cuda=None, proofs=(), links=(),
               failures=(ProbeFailure("cuda", "cuda: crashed by SIGSEGV"),)),
        "cuda-crashes", PROBLEM, "a process that starts CUDA on this machine comes to its end", "reinstall"),
    "old driver, NVML silent": Case(
        broken(driver=None, system={"module": "550.1"}, torch_cuda=NO_CUDA, proofs=(), links=()),
        "driver-too-old", PROBLEM, "version 580 or later", "update the driver"),
    "PyTorch alone fails": Case(
        broken(torch_cuda=TorchCuda(0, "libcudart: undefined symbol"), proofs=(), links=()),
        "cuda-unavailable", PROBLEM, "PyTorch does not start CUDA: libcudart", "--force-reinstall"),
    "asked for cuda:5": Case(
        broken(settings=Settings("cuda:5"), environment={}),
        "no-such-device", PROBLEM, "device=cuda:5 is not there: this machine has GPUs 0 to 1",
        "device=cuda:1"),
    # -- does it compute, is it free?
    "V100 on CUDA 13": Case(
        broken(torch_cuda={"gpus": tuple(dataclasses.replace(g, name="V100", capability=(7,
               0)) for g in SEEN),
                           "cudnn_error": "cuDNN 92600 is not compatible with devices with SM < 7.5"}),
        "no-kernel", PROBLEM, "no machine code for V100 (sm_70), V100 (sm_70): it is older than the build",
        "'torch>=2.11,<2.15' torchvision --index-url <PyTorch's index cu126>"),
    "next year's GPU": Case(
        broken(torch_cuda={"gpus": tuple(dataclasses.replace(g, name="X1", capability=(15,
               0)) for g in SEEN)}),
        "no-kernel", PROBLEM, "it is newer than the build", "--upgrade torch"),
    "one old GPU of two": Case(
        broken(torch_cuda={"gpus": (SEEN[0], dataclasses.replace(SEEN[1], name="P100", capability=(6, 0)))}),
        "no-kernel", PROBLEM, "P100 (sm_60)", "export CUDA_VISIBLE_DEVICES=0"),
    "another cuDNN": Case(
        broken(torch_cuda={"cudnn": "", "cudnn_error": "cuDNN version incompatibility: found (8, 9, 2)"},
               environment={"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"},
               proofs=(Proof("convolution", "cuda:0", "fp32", False, "CUDNN_STATUS"),)),
        "cudnn-mismatch", PROBLEM, "another cuDNN is loaded", "unset LD_LIBRARY_PATH"),
    "no cuDNN": Case(
        broken(torch_cuda={"cudnn": ""}), "cudnn-missing", PROBLEM, "convolutions need cuDNN",
        "--force-reinstall"),
    "prohibited": Case(
        broken(driver=gpus(mode="prohibited"), torch_cuda=TorchCuda(0, "all devices are busy"), proofs=(),
               settings=Settings("cuda")),
        "compute-prohibited", PROBLEM, "no program may compute on GPU 0, 1",
        "sudo nvidia-smi -i 0,1 -c DEFAULT"),
    "exclusive and taken": Case(
        broken(driver={"gpus": (dataclasses.replace(GPUS[0], mode="exclusive",
                                                    processes=(GpuProcess(77, "python", GIB),)), GPUS[1])},
               proofs=(Proof("matrix product", "cuda:0", "fp32", False, "busy or unavailable"),)),
        "compute-exclusive", PROBLEM,
        "EXCLUSIVE_PROCESS), and it is taken: GPU 0 by pid 77 (python, 1.0 GiB)", "kill 77"),
    "full GPU": Case(
        broken(driver={"gpus": (dataclasses.replace(
                   GPUS[0], used=78 * GIB, processes=(GpuProcess(99, "jupyter", 77 * GIB),)), GPUS[1])},
               proofs=(Proof("matrix product", "cuda:0", "fp32", False, "CUDA out of memory"),)),
        "memory-taken", PROBLEM, "78.0 GiB of GPU 0's 80.0 GiB are taken by pid 99 (jupyter, 77.0 GiB)",
        "kill 99, if it is yours; or take another GPU: export CUDA_VISIBLE_DEVICES=1"),
    "half-full GPU": Case(
        broken(driver={"gpus": (dataclasses.replace(GPUS[0], used=40 * GIB), GPUS[1])}),
        "memory-taken", WARNING, "a process that can't be seen from here", "sudo fuser -v /dev/nvidia0"),
    "MIG, not divided": Case(
        broken(environment={}, driver=gpus(mig=True), cuda={"code": 100}, torch_cuda=NO_CUDA, proofs=(),
               links=()),
        "mig-no-slices", PROBLEM, "in MIG mode and not divided yet", "-mig 0"),
    "MIG, one rank": Case(
        broken(environment={}, driver=gpus(mig=True, slices=("MIG-1", "MIG-2"))),
        "mig", WARNING, "CUDA gives a process one slice", "one slice with one rank"),
    "MIG, two ranks": Case(
        broken(environment={}, settings=Settings("auto", 4, local_ranks=2), driver=gpus(mig=True,
               slices=("MIG-1",))),
        "mig", PROBLEM, "NCCL can't join slices", "one rank instead of 2"),
    "hot": Case(
        broken(driver=first_gpu(slowed=("heat",))), "slowed-down", WARNING,
               "below its clock, because of heat",
        "fans"),
    "x4 slot": Case(
        broken(driver=first_gpu(pcie_width=4)), "pcie-narrow", WARNING, "joined by 4 of 16 PCIe lanes",
               "slot"),
    "four ranks on two GPUs": Case(
        broken(settings=Settings("auto", 1, local_ranks=4)),
        "ranks-over-gpus", WARNING, "several ranks share a GPU", "--nproc-per-node=2"),
    "no NCCL": Case(
        broken(torch={"nccl": ""}, links=()), "nccl-missing", PROBLEM, "built without NCCL",
        "--force-reinstall"),
    "NCCL fails": Case(
        broken(links=(Link(("cuda:0", "cuda:1"), 67.0, 0.0,
               "NCCL Error 2: unhandled system error"),)),
        "all-reduce-fails", PROBLEM, "the all-reduce over cuda:0-cuda:1 failed", "NCCL_DEBUG=INFO"),
    "NCCL hangs": Case(
        broken(links=(), failures=(ProbeFailure("all-reduce", "all-reduce: no answer in 90 s", True),)),
        "all-reduce-hangs", PROBLEM, "did not end", "NCCL_P2P_DISABLE=1"),
    "NCCL crashes": Case(
        broken(links=(), failures=(ProbeFailure("all-reduce", "all-reduce: crashed by SIGSEGV"),)),
        "all-reduce-fails", PROBLEM, "the all-reduce over all GPUs failed", "NCCL_DEBUG=INFO"),
    "no peer access": Case(
        broken(torch_cuda={"strangers": ((0, 1),)}),
        "no-peer-access", WARNING, "can't read each other's memory", "strategy.compression=bf16"),
    "one slow pair": Case(
        broken(links=(Link(("cuda:0", "cuda:1"), 67.0, 250.0), Link(("cuda:0", "cuda:2"), 67.0, 9.0))),
        "slow-pair", WARNING, "a much slower way", "nvidia-smi topo -m"),
    "wrong numbers": Case(
        broken(proofs=(Proof("convolution", "cuda:1", "bf16", False, "error 900 of its bound"),)),
        "computes-wrong", PROBLEM, "what cuda:1 computes is wrong", "ECC"),
    "proof that dies": Case(
        broken(proofs=(), failures=(ProbeFailure("proof", "proof: crashed by SIGSEGV"),)),
        "computes-wrong", PROBLEM, "computes is wrong, or fails", "doctor again"),
    "CPU that dies": Case(
        broken(settings=Settings("cpu"), driver=None, cuda=None, torch_cuda=None, proofs=(),
               failures=(ProbeFailure("proof", "proof: crashed by SIGILL"),)),
        "computes-wrong", PROBLEM, "computes is wrong, or fails", "doctor again"),
    "torchvision without CUDA": Case(
        broken(proofs=(*SOUND.proofs, Proof("nms", "cuda:0", "fp32", False,
               "'torchvision::nms' from 'CUDA'"))),
        "torchvision-no-cuda", PROBLEM, "built for the CPU only", "the two together"),
    # -- the host
    "torchvision mismatched": Case(
        broken(torchvision=TorchVision("0.21.0+cpu", "operator torchvision::nms does not exist")),
        "torchvision-mismatch", PROBLEM, "torchvision was built for another PyTorch",
        "pip install --force-reinstall torch torchvision (pairs: 2.15 with 0.29"),
    "no torchvision": Case(
        broken(torchvision=TorchVision("", "No module named 'torchvision'")),
        "torchvision-missing", PROBLEM, "not installed", "pip install torchvision"),
    "torch not importable": Case(
        broken(torch=None, torch_cuda=None, torchvision=None, proofs=(), links=(),
               failures=(ProbeFailure("torch", "torch: ImportError: libcudnn.so.9"),)),
        "torch-import", PROBLEM, "PyTorch can't be imported", "LD_LIBRARY_PATH"),
    "CPU without AVX2": Case(
        broken(torch={"cpu": "DEFAULT", "cpu_features": ()}),
        "cpu-no-avx2", WARNING, "no AVX2", "-cpu host"),
    "forced to plain code": Case(
        broken(torch={"cpu": "DEFAULT"}, environment={"ATEN_CPU_CAPABILITY": "default"}),
        "cpu-forced-slow", WARNING, "keeps PyTorch from", "unset ATEN_CPU_CAPABILITY"),
    "quota of 4 cores": Case(
        broken(limits={"quota": 4.0}, environment={"OMP_NUM_THREADS": "16"}),
        "cpu-quota", WARNING, "the time of 4 cores and sees 32", "OMP_NUM_THREADS=2, and data.workers=1"),
    "many workers": Case(
        broken(settings=Settings("auto", workers=20, local_ranks=2)),
        "oversubscribed", WARNING, "42 threads or workers share 32 cores", "data.workers=15"),
    "more ranks than cores": Case(
        broken(settings=Settings("auto", 0, local_ranks=2), limits={"affinity": 1}),
        "oversubscribed", WARNING, "2 ranks share 1 core", "start 1 rank"),
    "Docker's /dev/shm": Case(
        broken(limits={"shm_total": 64 * 2**20, "shm_free": 64 * 2**20}),
        "shm-small", PROBLEM,
        "as small as Docker makes it: a worker that hands over a batch ends with 'Bus error'",
        "docker run --shm-size=1g"),
    "small /dev/shm": Case(
        broken(limits={"shm_total": 400 * 2**20, "shm_free": 400 * 2**20}),
        "shm-small", WARNING, "may be too small: for large batches 8 workers take 1.0 GiB", "--shm-size"),
    "full /dev/shm": Case(
        broken(limits={"shm_total": 8 * GIB, "shm_free": 2**20}),
        "shm-full", PROBLEM, "full of files that something has left", "ls -lt /dev/shm"),
    "few open files": Case(
        broken(limits={"open_files": 256}),
        "open-files", WARNING, "received 0 items of ancdata", "ulimit -n 4096"),
    "InfiniBand without locked memory": Case(
        broken(system={"infiniband": ("mlx5_0",)}),
        "locked-memory", WARNING, "Cannot allocate memory", "ulimit -l unlimited"),
    "port in use": Case(
        broken(settings=Settings("auto", 4, port=29500), port=Port(29500, "Address already in use",
               "python (pid 12)")),
        "port-in-use", PROBLEM, "port 29500 is in use by python (pid 12)", "torchrun --standalone"),
    "torchrun's port in use": Case(
        broken(port=Port(29500, "Address already in use")),
        "port-in-use", WARNING, "port 29500, which torchrun takes by itself, is in use", "--rdzv-endpoint"),
    "left from debugging": Case(
        broken(environment={"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "1"}),
        "slow-settings", WARNING, "CUDA_LAUNCH_BLOCKING: the host waits for every kernel",
        "unset CUDA_LAUNCH_BLOCKING"),
    "a probe that failed": Case(
        broken(failures=(ProbeFailure("limits", "OSError: no /proc"),)),
        "no-answer", WARNING, "could not find out about limits", "--json"),
}  # fmt: skip


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != OK]


@pytest.mark.parametrize("name", CASES)
def test_a_broken_machine_is_told_what_is_wrong_and_nothing_else(name: str) -> None:
    case = CASES[name]
    found = bad(examine(case.facts))
    assert [(finding.id, finding.level) for finding in found] == [(case.id, case.level)], found
    assert case.cause in found[0].cause
    assert case.remedy in found[0].remedy
    assert found[0].evidence


def test_the_sound_machine_has_nothing_but_good_news() -> None:
    found = examine(SOUND)
    assert bad(found) == []
    assert [finding.id for finding in found] == [
        "cvd", "gpu", "gpu", "all-reduce", "torchvision", "cpu", "cores", "shm", "open-files", "port",
        "computes",
        "computes",
    ]  # fmt: skip
    told = {finding.id: finding.evidence for finding in found}
    assert (
        told["gpu"]
        == "cuda:1 NVIDIA H100, sm_90, 80.0 GiB; driver 580.95.05, CUDA 13.2, cuDNN 9.26.0, NCCL 2.30.7"
    )
    assert told["all-reduce"] == "NCCL 2.30.7, 67 MB: cuda:0-cuda:1 250.00 GB/s"


def test_every_rule_is_fired_by_a_machine() -> None:
    silent = {rule.__name__ for rule in RULES} - {"usable_gpus"}  # which has good news only
    for rule in RULES:
        if any(bad(list(rule(case.facts))) for case in CASES.values()):
            silent.discard(rule.__name__)
    assert silent == set()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_rule_speaks_ill_of_the_sound_machine(rule: Any) -> None:
    assert bad(list(rule(SOUND))) == []


def test_with_the_cpu_asked_for_gpus_are_left_out() -> None:
    on_cpu = tuple(Proof(name, "cpu", "fp32", True, "fine") for name in PROVED)
    for name, case in CASES.items():
        facts = dataclasses.replace(
            case.facts, settings=dataclasses.replace(case.facts.settings, device="cpu"), proofs=on_cpu
        )
        about = {finding.id for finding in bad(examine(facts))}
        host = case.id in ("computes-wrong", "slow-settings") or case.facts.failures
        assert about <= {case.id}, name
        if case.id.startswith(("no-", "cvd", "cuda", "driver", "mig", "memory", "compute-")) and not host:
            assert about == set(), name


def test_two_independent_causes_are_both_told() -> None:
    facts = dataclasses.replace(
        CASES["driver 550 for CUDA 13"].facts, environment={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert {finding.id for finding in problems(examine(facts))} == {"driver-too-old", "cvd-hides-all"}


def test_gpus_that_compute_are_there_whatever_else_is_not_seen() -> None:
    """Some machines have other device nodes, and NVML may be refused to a container."""
    refused = {"gpus": tuple(DriverGpu(i, error="Insufficient Permissions") for i in range(2))}
    facts = broken(environment={}, system={"device_nodes": ()}, driver=refused)
    assert [finding.id for finding in bad(examine(facts))] == ["nvml-quiet"]
    assert "2 x NVIDIA H100 80.0 GiB" in header(facts)


def test_a_driver_that_a_compat_library_lifts_is_not_blamed() -> None:
    assert bad(examine(broken(driver={"version": "535.1"}))) == []


def test_a_divided_gpu_that_is_hidden_is_not_blamed() -> None:
    divided = dataclasses.replace(GPUS[0], mig=True, slices=("MIG-1", "MIG-2"))
    facts = broken(
        environment={"CUDA_VISIBLE_DEVICES": "1"}, driver={"gpus": (divided, GPUS[1])},
        torch_cuda={"count": 1, "gpus": (dataclasses.replace(SEEN[1], index=0),)},
    )  # fmt: skip
    assert visible_gpus(facts) == [GPUS[1]]


def test_ample_memory_that_may_be_locked_is_enough_for_infiniband() -> None:
    facts = broken(system={"infiniband": ("mlx5_0",)}, limits={"locked_memory": 64 * GIB})
    assert bad(examine(facts)) == []


def test_workers_and_threads_are_those_that_training_starts() -> None:
    """By the container's quota, which needs no advice then."""
    facts = broken(settings=Settings("auto", local_ranks=2), limits={"quota": 8.0})
    assert facts.workers == 3
    assert bad(examine(facts)) == []


def test_what_a_device_lacks_is_no_fault() -> None:
    facts = broken(
        proofs=(*SOUND.proofs, Proof("convolution", "cuda:0", "fp16", False, "not implemented", True))
    )
    assert bad(examine(facts)) == []
    assert any("it has no fp16" in finding.evidence for finding in examine(facts))


def test_the_page_on_doctor_names_every_finding() -> None:
    page = (Path(__file__).parents[2] / "docs/doctor.md").read_text()
    assert [case.id for case in CASES.values() if f"`{case.id}`" not in page] == []
