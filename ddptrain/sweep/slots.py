"""What the jobs of a sweep are packed over: this machine's GPUs, or shares of its cores."""

import os
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


@dataclass(frozen=True, slots=True)
class Slots:
    """How many jobs run at once, and what each gets."""

    names: tuple[str, ...]
    """GPUs as CUDA_VISIBLE_DEVICES takes them, or numbers of CPU shares."""
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

    def environment(self, taken: Sequence[str]) -> dict[str, str]:
        """What a job on these slots is started with."""
        shared = {CORES: str(self.cores)}
        return {**shared, "CUDA_VISIBLE_DEVICES": ",".join(taken)} if self.are_gpus else shared

    def describe(self) -> str:
        named = f"{'slots' if self.on_cpu else 'GPUs'} {', '.join(self.names)}"
        kind = named if self.are_gpus else counted(len(self.names), "CPU slot")
        each = f"each {counted(self.per_job, 'rank')} and {counted(self.cores, 'core')}"
        return f"{kind} ({self.why}): {counted(self.parallel, 'job')} at once, {each}"


def share_out(config: Config) -> Slots:
    """The slots for jobs of this config (its ``sweep`` and ``device``).

    Raises UserError where a job needs more than there is.
    """
    asked = config.sweep
    names, are_gpus, why = _devices(asked.gpus, config.device)
    per_job = len(names) if asked.gpus_per_job == "all" else asked.gpus_per_job
    if per_job > len(names):
        raise UserError(
            f"sweep.gpus_per_job={per_job}: there are only {len(names)} to share out ({why}). Ask for fewer,"
            " or name more with sweep.gpus=[...]."
        )
    if per_job > 1 and any(name.startswith("MIG-") for name in names):
        raise UserError(
            f"sweep.gpus_per_job={asked.gpus_per_job}: these are slices of divided GPUs (MIG), and CUDA gives"
            " a process one of them. Say sweep.gpus_per_job=1."
        )
    parallel = min(len(names) // per_job, asked.max_parallel or len(names))
    share = max(1, cores() // parallel)
    on_cpu = config.device == "cpu" or not are_gpus
    return Slots(tuple(names), per_job, parallel, share, are_gpus, on_cpu, why)


def _devices(asked: Any, device: str) -> tuple[list[str], bool, str]:
    """Names, whether they are GPUs, and why these."""
    if device.startswith("cuda:"):
        index = device.removeprefix("cuda:")
        raise UserError(
            f"device={device}: each job of a sweep sees its own GPUs only. Write device=cuda, and"
            f" 'sweep.gpus=[{index}]' for that one."
        )
    if device == "mps":
        return ["mps"], False, "device=mps"
    found, why = ([], "device=cpu") if device == "cpu" else _gpus()
    if asked != "auto":
        if device != "cpu" and not found:
            raise UserError(
                f"sweep.gpus={asked}: {why}. Say device=cpu to pack CPU jobs on these slots. {DOCTOR_HINT}."
            )
        return [str(name) for name in asked], True, "sweep.gpus"
    if device == "cuda" and not found:
        raise UserError(f"device=cuda: {why}. Mend that, or say device=cpu. {DOCTOR_HINT}.")
    if found:
        return found, True, why
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
