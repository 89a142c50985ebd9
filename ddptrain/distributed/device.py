"""Which device this rank trains on, and why. A GPU that was asked for is never replaced by a CPU."""

import os
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ddptrain.api.world import World
from ddptrain.errors import DOCTOR_HINT, UserError


class Placement(NamedTuple):
    device: torch.device
    reason: str


def choose_device(requested: str, world: World, why_no_cuda: Callable[[], tuple[str, str]]) -> Placement:
    """The device for ``device=requested``, with the reason in words.

    ``cuda`` spreads the local ranks over the GPUs in turn; ``cuda:1`` puts all of them on that one.
    why_no_cuda: called where there is no GPU, for the cause and the remedy, in sentences.
    Raises UserError where the device can't be had.
    """
    on_gpus = requested.startswith(("auto", "cuda")) and torch.cuda.is_available()
    count = torch.cuda.device_count() if on_gpus else 0
    if requested == "auto":
        if count:
            in_turn = torch.device("cuda", world.local_rank % count)
            return Placement(in_turn, f"auto: {torch.cuda.get_device_name(in_turn)}")
        if torch.backends.mps.is_available() and world.size == 1:
            return Placement(torch.device("mps", 0), "auto: Metal")
        cause, _ = why_no_cuda()
        return Placement(torch.device("cpu"), f"auto: NO GPU IS USED, {cause} {DOCTOR_HINT}.")
    try:
        device = torch.device(requested)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu" and device.index is None:
        return Placement(torch.device("cpu"), "asked for")
    if device.type == "mps":
        if not torch.backends.mps.is_available():
            raise UserError("device=mps: PyTorch finds no Metal device here. Use device=cpu, or device=auto.")
        return Placement(torch.device("mps", 0), "asked for")
    if device.type != "cuda":
        raise UserError(f"device={requested}: must be auto, cpu, cuda, cuda:<index> or mps.")
    if not count:
        raise UserError(
            f"device={requested}: {' '.join(why_no_cuda())} The CPU instead (device=cpu, or device=auto)"
            f" would be a silent slowdown, so this stops here. {DOCTOR_HINT}."
        )
    if device.index is None:
        return Placement(torch.device("cuda", world.local_rank % count), "asked for")
    if device.index >= count:
        names = ", ".join(f"cuda:{i}" for i in range(count))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        because = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise UserError(f"device={requested}: this machine has {names}{because}. Choose one of them.")
    return Placement(device, "asked for")


def name_of_gpu(device: torch.device) -> str:
    """What all ranks on this GPU call it, on any node and whatever number it has for them: its name and UUID.
    '' where it is no GPU."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.uuid}"


def with_shared_gpus(world: World, gpus: Sequence[str]) -> World:
    """The world, once it is known which GPU each rank is on (`name_of_gpu`, by rank).

    Raises UserError where some ranks have a GPU and others none.
    """
    with_one = [rank for rank, gpu in enumerate(gpus) if gpu]
    if not with_one:
        return world
    if len(with_one) < len(gpus):
        raise UserError(
            f"device: rank {with_one[0]} has a GPU and rank {gpus.index('')} has none, and all would wait for"
            f" that one. Mend its node, or say device=cpu. {DOCTOR_HINT}."
        )
    # NCCL joins no slices of a GPU either, and CUDA's name of one tells that it is one
    shared = len(set(gpus)) < len(gpus) or (len(gpus) > 1 and any(" MIG " in gpu for gpu in gpus))
    return replace(world, shares_device=shared, sharers=gpus.count(gpus[world.rank]))


def has_bf16(gpu: torch.device) -> bool:
    """Whether a CUDA device computes in bf16: all from sm_80 on, of 2020."""
    return torch.cuda.get_device_capability(gpu) >= (8, 0)


def summing_dtype(device: torch.device) -> torch.dtype:
    """float64 for sums that must not lose what they add up, float32 where the device has no more."""
    return torch.float32 if device.type == "mps" else torch.float64


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has had: on a GPU by torch's allocator, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
