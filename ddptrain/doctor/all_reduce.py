"""One all-reduce among all ranks of all nodes: does it work, and how fast?"""

import datetime
import queue
import statistics
import threading
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddptrain.api.world import World
from ddptrain.doctor.facts import AllReduce
from ddptrain.doctor.proof import bandwidth

_CPU_BYTES, _GPU_BYTES = 16 * 2**20, 256 * 2**20
_TIMEOUT_S = 120.0


def measure_all_reduce(world: World, node: str, gpu: int | None, timeout_s: float = _TIMEOUT_S) -> AllReduce:
    """What this rank, of the node of that name, says of it. All ranks call this.

    gpu: the index of this rank's own GPU, for NCCL; None: over gloo on the CPU.
    """
    size = _CPU_BYTES if gpu is None else _GPU_BYTES
    result = partial(AllReduce, node, world.rank, "gloo" if gpu is None else "nccl", size / 1e6)
    outcomes: queue.SimpleQueue[float | RuntimeError] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcomes.put(_measure_speed(world, gpu, size, timeout_s))
        except RuntimeError as error:
            outcomes.put(error)

    threading.Thread(target=run, daemon=True).start()  # NCCL may wait for ever
    try:
        outcome = outcomes.get(timeout=timeout_s)
    except queue.Empty:
        return result(error=f"no end in {timeout_s:g} s", hung=True)
    if isinstance(outcome, RuntimeError):
        return result(error=str(outcome).splitlines()[0])
    return result(outcome)


def _measure_speed(world: World, gpu: int | None, size: int, timeout_s: float) -> float:
    """GB/s of each rank and direction. Raises RuntimeError where the sum is wrong."""
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if gpu is not None:
        torch.cuda.set_device(gpu)
    # later than ours: NCCL ends the process when its time is up, and then nothing is reported
    patience = datetime.timedelta(seconds=2 * timeout_s)
    group: Any = dist.new_group(timeout=patience, backend="gloo" if gpu is None else "nccl")
    tensor = torch.full((size // 4,), 1.0 + world.rank, device=device)
    seconds = []
    for attempt in range(4):  # the first makes the connections
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        first = tensor[0].item()  # waits for the device
        if attempt == 0 and (first != sum(range(1, world.size + 1)) or not bool((tensor == first).all())):
            raise RuntimeError("the sum is wrong")
        seconds.append(time.perf_counter() - began)
        tensor.div_(world.size)
    return bandwidth(size, world.size, statistics.median(seconds[1:]))
