"""How long all-reduces of several sizes take between ranks: a separate program, started under torchrun.

python -m ddptrain.bench.allreduce_bench <device> <largest size in bytes> <file for the result>
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ddptrain.api.world import World
from ddptrain.distributed.comm import backend_for, close_group, open_group
from ddptrain.distributed.device import choose_device
from ddptrain.distributed.world import world_from_environment
from ddptrain.doctor.examine import why_no_cuda
from ddptrain.launcher.process import leave

_SMALLEST = 1 << 10
_ROUNDS = 15
_TOGETHER = 1 << 22  # Bytes that small all-reduces make up together before the clock is read
_MOST = 30


def sizes_up_to(largest: int) -> list[int]:
    """Bytes, in steps of four from 1 KiB to the first that is as large, 4 MiB at least and 64 MiB at most."""
    end = max(largest, 1 << 22)
    sizes = [_SMALLEST << 2 * i for i in range(9)]
    return [size for size in sizes if size < 4 * end]


def measured(world: World, sizes: list[int]) -> list[float]:
    """The median seconds of an all-reduce of each size, by rounds in which all sizes take turns."""
    tensors = [torch.zeros(size // 4, device=world.device) for size in sizes]
    for tensor in tensors:  # the first makes the connections
        _timed(world, tensor, 2)
    rounds = [
        [_timed(world, tensor, max(1, min(_MOST, _TOGETHER // (4 * tensor.numel())))) for tensor in tensors]
        for _ in range(_ROUNDS)
    ]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _timed(world: World, tensor: torch.Tensor, times: int) -> float:
    dist.barrier()
    _wait(world)
    began = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(tensor)
    _wait(world)
    return (time.perf_counter() - began) / times


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def main(device: str, largest: str, out: str) -> None:
    world = world_from_environment()
    world = world.on(choose_device(device, world, why_no_cuda).device)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    world = open_group(world)
    sizes = sizes_up_to(int(largest))
    seconds = measured(world, sizes)
    if world.is_first:
        result = {"backend": backend_for(world), "measured": list(zip(sizes, seconds, strict=True))}
        Path(out).write_text(json.dumps(result))
    close_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)  # of 30 that ended as Python does, 13 were aborted at their end
