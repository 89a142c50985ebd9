"""What the jobs of a sweep are packed over: this machine's GPUs, or shares of its cores."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.config.schema import Config
from ddptrain.distributed.cores import CORES, cores
from ddptrain.errors import UserError


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
        count = len(self.names)
        named = f"{'slots' if self.on_cpu else 'GPUs'} {', '.join(self.names)}"
        kind = named if self.are_gpus else f"{count} CPU slot{'s' * (count > 1)}"
        ranks = f"{self.per_job} rank{'s' * (self.per_job > 1)}"
        at_once = f"{self.parallel} job{'s' * (self.parallel > 1)} at once"
        cores = f"{self.cores} core{'s' * (self.cores > 1)}"
        return f"{kind} ({self.why}): {at_once}, each {ranks} and {cores}"


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
    here = device != "cpu" and _any_gpu()
    if asked != "auto":
        if device != "cpu" and not here:
            raise UserError(
                f"sweep.gpus={asked}: this machine shows no GPU. Say device=cpu to pack CPU jobs on"
                " these slots."
            )
        return [str(name) for name in asked], True, "sweep.gpus"
    if device in ("auto", "cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None and here:
            found, why = [name.strip() for name in visible.split(",") if name.strip()], "CUDA_VISIBLE_DEVICES"
        else:
            found, why = _gpus(), "all of this machine"
        if found:
            return found, True, why
        if device == "cuda":
            raise UserError(
                "device=cuda: this machine shows no GPU (by its driver or CUDA_VISIBLE_DEVICES). Name GPUs"
                " with sweep.gpus=[...], or say device=cpu."
            )
    if device == "mps":
        return ["mps"], False, "device=mps"
    why = "device=cpu" if device == "cpu" else "NO GPU IS USED, this machine shows none"
    return [str(share) for share in range(cores())], False, why


def _any_gpu() -> bool:
    """Whether there is a GPU: by its device node too, for a container may lack the driver's library."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists() or bool(_gpus())


def _gpus() -> list[str]:
    """UUIDs, for CUDA counts GPUs in another order than their driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or no GPU
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
