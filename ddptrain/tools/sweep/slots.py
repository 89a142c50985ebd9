"""What the jobs of a sweep are packed over: this machine's GPUs, or shares of its cores."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddptrain.config.schema import Config
from ddptrain.distributed.cpu import CORES, cores
from ddptrain.doctor.children import ask
from ddptrain.doctor.facts import Cuda, Driver
from ddptrain.errors import DOCTOR_HINT, UserError
from ddptrain.text import counted

_DRIVER_S = 45.0
_OF_A_GPU = 0.95
"""What jobs on one GPU may allocate together; the rest is for their CUDA contexts."""


@dataclass(frozen=True, slots=True)
class Slots:
    """How many jobs run at once, and what each gets."""

    names: tuple[str, ...]
    """GPUs as CUDA_VISIBLE_DEVICES takes them, each as often as it takes a job, or numbers of CPU shares."""
    per_job: int
    """Of them for each job: its ranks."""
    parallel: int
    """Most jobs at once."""
    cores: int
    """Of the machine for each job."""
    are_gpus: bool
    """They have names for CUDA_VISIBLE_DEVICES; with device=cpu to try a sweep out."""
    on_cpu: bool
    why: str
    per_gpu: int = 1
    """Jobs that share a GPU."""

    def environment(self, taken: Sequence[str]) -> dict[str, str]:
        """What a job on these slots is started with."""
        shared = {CORES: str(self.cores)}
        if not self.are_gpus:
            return shared
        return {**shared, **memory_share(self.per_gpu), "CUDA_VISIBLE_DEVICES": ",".join(taken)}

    def describe(self) -> str:
        named = f"{'slots' if self.on_cpu else 'GPUs'} {', '.join(dict.fromkeys(self.names))}"
        kind = named if self.are_gpus else counted(len(self.names), "CPU slot")
        each = f"each {counted(self.per_job, 'rank')} and {counted(self.cores, 'core')}"
        plan = f"{kind} ({self.why}): {counted(self.parallel, 'job')} at once, {each}"
        if self.per_gpu == 1:
            return plan
        share = f"{plan} and at most {_OF_A_GPU / self.per_gpu:.0%} of a GPU's memory"
        return share if self.on_cpu else f"{share}; {_mps()}"


def share_out(config: Config) -> Slots:
    """The slots for jobs of this config (its ``sweep`` and ``device``).

    Raises UserError where a job needs more than there is.
    """
    sweep = config.sweep
    names, are_gpus, why = _devices(sweep.gpus, config.device)
    per_job = len(names) if sweep.gpus_per_job == "all" else sweep.gpus_per_job
    if per_job > len(names):
        raise UserError(
            f"sweep.gpus_per_job={per_job}: there are only {len(names)} to share out ({why}). Ask for fewer,"
            " or name more with sweep.gpus=[...]."
        )
    if per_job > 1 and any(name.startswith("MIG-") for name in names):
        raise UserError(
            f"sweep.gpus_per_job={sweep.gpus_per_job}: these are slices of divided GPUs (MIG), and CUDA gives"
            " a process one of them. Say sweep.gpus_per_job=1."
        )
    per_gpu = sweep.jobs_per_gpu
    if per_gpu > 1 and (per_job > 1 or not are_gpus):
        rule = "a job that shares a GPU has one rank" if are_gpus else f"there is no GPU to share ({why})"
        raise UserError(f"sweep.jobs_per_gpu={per_gpu}: {rule}. Leave it out.")
    names = names * per_gpu
    parallel = min(len(names) // per_job, sweep.max_parallel or len(names))
    share = sweep.cores_per_job or max(1, cores() // parallel)
    on_cpu = config.device == "cpu" or not are_gpus
    return Slots(tuple(names), per_job, parallel, share, are_gpus, on_cpu, why, per_gpu)


def lost_of(gpus: Sequence[str]) -> list[str]:
    """Those of these GPUs that the driver no longer has. It knows UUIDs; CUDA's numbers are not its own, nor
    are slices by their older names, MIG-GPU-<uuid>/1/0."""
    named = [gpu for gpu in gpus if gpu.startswith(("GPU-", "MIG-")) and "/" not in gpu]
    driver: Driver = ask("ask_nvml", "nvml", _DRIVER_S).get("driver", Driver()) if named else Driver()
    sound = [gpu for gpu in driver.gpus if not gpu.error]
    if not driver.gpus or not all(gpu.uuid for gpu in sound):
        return []
    known = [uuid for gpu in sound for uuid in (gpu.uuid, *gpu.slices)]
    return [name for name in named if not any(uuid.startswith(name) for uuid in known)]


def memory_share(per_gpu: int) -> dict[str, str]:
    """The variable by which PyTorch keeps each of so many jobs on a GPU to its part of the memory; none for
    one alone. Settings that are there stay."""
    if per_gpu == 1:
        return {}
    known = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    limit = f"per_process_memory_fraction:{_OF_A_GPU / per_gpu:.4f}"
    return {"PYTORCH_ALLOC_CONF": f"{known},{limit}" if known else limit}


def _mps() -> str:
    """Whether NVIDIA's Multi-Process Service runs, with which kernels of several jobs run at once."""
    try:
        answer = subprocess.run(
            ["nvidia-cuda-mps-control"], input="get_server_list\n", capture_output=True, text=True, timeout=10
        )
        runs = answer.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        runs = False
    if runs:
        return "by MPS, so that kernels of several jobs run at once"
    return "without MPS, so that the jobs of a GPU take turns (nvidia-cuda-mps-control -d starts it)"


def _devices(gpus: Any, device: str) -> tuple[list[str], bool, str]:
    """Names, whether they are GPUs, and why these."""
    if device.startswith("cuda:"):
        index = device.removeprefix("cuda:")
        raise UserError(
            f"device={device}: each job of a sweep sees its own GPUs only. Write device=cuda, and"
            f" 'sweep.gpus=[{index}]' for that one."
        )
    if device == "mps":
        return ["mps"], False, "device=mps"
    present, why = ([], "device=cpu") if device == "cpu" else _gpus()
    if gpus != "auto":
        if device != "cpu" and not present:
            raise UserError(
                f"sweep.gpus={gpus}: {why}. Say device=cpu to pack CPU jobs on these slots. {DOCTOR_HINT}."
            )
        return [str(name) for name in gpus], True, "sweep.gpus"
    if device == "cuda" and not present:
        raise UserError(f"device=cuda: {why}. Mend that, or say device=cpu. {DOCTOR_HINT}.")
    if present:
        return present, True, why
    why = why if device == "cpu" else f"NO GPU IS USED, {why}"
    return [str(share) for share in range(cores())], False, why


def _gpus() -> tuple[list[str], str]:
    """GPUs as CUDA_VISIBLE_DEVICES takes them, and why these, or why none.

    Asks the driver, and where its NVML reports none (a container without the driver's utilities) CUDA itself:
    else every job would take the first GPU. In separate processes, because a driver may hang.
    """
    driver: Driver = ask("ask_nvml", "nvml", _DRIVER_S).get("driver", Driver())
    cuda = Cuda()
    # UUIDs, for CUDA counts in another order; of a GPU that is divided (MIG) it gives a process one slice
    names = [name for gpu in driver.gpus for name in (gpu.slices if gpu.mig else (gpu.uuid,)) if name]
    lost = ", ".join(f"GPU {gpu.index} ({gpu.error})" for gpu in driver.gpus if gpu.error)
    why = f"all of this machine but {lost}" if lost else "all of this machine"
    if not names:
        cuda = ask("ask_cuda", "cuda", _DRIVER_S).get("cuda", Cuda())
        names, why = [str(index) for index in range(cuda.count)], "as CUDA counts them, NVML tells of none"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names and visible is not None:
        entries = map(str.strip, visible.split(","))
        names, why = [entry for entry in entries if entry and entry[0] != "-"], "CUDA_VISIBLE_DEVICES"
    if not names:
        hidden = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible!r}"
        errors = f"NVML: {driver.error or 'no error'}; CUDA: {cuda.error or 'no error'}{hidden}"
        why = f"this machine shows no GPU ({errors})"
    return names, why
