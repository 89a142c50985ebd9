"""Which device this rank trains on, and why. A GPU that was asked for is never replaced by a CPU."""

import os
from typing import NamedTuple

import torch

from ddptrain.distributed.world import World
from ddptrain.doctor.brief import MORE, why_no_cuda
from ddptrain.errors import UserError


class Placement(NamedTuple):
    device: torch.device
    reason: str
    shared: bool = False
    """Other local ranks are on the same GPU."""


def choose_device(asked: str, world: World) -> Placement:
    """The device for ``device=asked``, with the reason in words.

    ``cuda`` spreads the local ranks over the GPUs in turn; ``cuda:1`` puts all of them on that one.
    Raises UserError where the device can't be had.
    """
    if asked == "auto":
        return _automatic(world)
    try:
        device = torch.device(asked)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu" and device.index is None:
        return Placement(torch.device("cpu"), "asked for")
    if device.type == "mps":
        if not torch.backends.mps.is_available():
            raise UserError("device=mps: PyTorch finds no Metal device here. Use device=cpu, or device=auto.")
        return Placement(torch.device("mps", 0), "asked for")
    if device.type != "cuda":
        raise UserError(f"device={asked}: must be auto, cpu, cuda, cuda:<index> or mps.")
    if not torch.cuda.is_available():
        raise UserError(
            f"device={asked}: {why_no_cuda()} Training on the CPU instead would be a silent"
            f" slowdown, so this stops here. Mend that, or say device=cpu (or device=auto). {MORE}."
        )
    count = torch.cuda.device_count()
    if device.index is None:
        return _spread(world, "asked for")
    if device.index >= count:
        names = ", ".join(f"cuda:{i}" for i in range(count))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        because = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise UserError(f"device={asked}: this machine has {names}{because}. Choose one of them.")
    return Placement(device, "asked for", shared=world.local_size > 1)


def summing_dtype(device: torch.device) -> torch.dtype:
    """float64 for sums that must not lose what they add up, float32 where the device has no more."""
    return torch.float32 if device.type == "mps" else torch.float64


def _spread(world: World, reason: str) -> Placement:
    count = torch.cuda.device_count()
    device = torch.device("cuda", world.local_rank % count)
    return Placement(device, reason, shared=world.local_size > count)


def _automatic(world: World) -> Placement:
    if torch.cuda.is_available():
        return _spread(
            world, f"auto: {torch.cuda.get_device_name(world.local_rank % torch.cuda.device_count())}"
        )
    if torch.backends.mps.is_available() and world.size == 1:
        return Placement(torch.device("mps", 0), "auto: Metal")
    return Placement(torch.device("cpu"), f"auto: NO GPU IS USED, {why_no_cuda()} {MORE}.")
