"""Several nodes together: their clocks, and the links between them, in a gloo group of all ranks."""

import datetime
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddptrain.doctor.facts import Link
from ddptrain.doctor.proof import bandwidth

_ROUNDS = 7
_CPU_BYTES, _GPU_BYTES = 16 * 2**20, 256 * 2**20
_PATIENCE_S = 120.0


def clock_skews(rank: int, leaders: Sequence[int]) -> tuple[float, ...]:
    """Seconds by which the clock of each node's first rank is ahead of rank 0's; known on rank 0 only.

    Of some round trips the quickest counts: the other's clock was read about in its middle.
    """
    box, skews = torch.zeros(1, dtype=torch.float64), [0.0]
    for other in leaders[1:]:
        trips = []
        for _ in range(_ROUNDS):
            if rank == 0:
                began = time.time()
                dist.send(box, other)
                dist.recv(box, other)
                ended = time.time()
                trips.append((ended - began, box.item() - (began + ended) / 2))
            elif rank == other:
                dist.recv(box, 0)
                box.fill_(time.time())
                dist.send(box, 0)
        skews += [min(trips)[1]] if trips else []
    return tuple(skews)


def links(rank: int, groups: Sequence[Sequence[int]], names: Sequence[str], gpu: int | None) -> list[Link]:
    """An all-reduce over each group of ranks, by NCCL where this rank has a GPU of its own (``gpu``).

    All ranks call this; each knows the groups that it is in. One that hangs ends the round: what comes after
    it would hang as well.
    """
    done = []
    for group in groups:
        members = tuple(names[member] for member in group)
        backend = "gloo" if gpu is None else "nccl"
        size = _CPU_BYTES if gpu is None else _GPU_BYTES
        try:
            speed = _in_time(partial(_reduced, rank, list(group), gpu, size))
            done += [Link(members, backend, size / 1e6, speed)] if rank in group else []
        except (RuntimeError, TimeoutError) as error:
            done.append(Link(members, backend, size / 1e6, 0.0, str(error).splitlines()[0]))
            break
    return done


def _reduced(rank: int, group: list[int], gpu: int | None, size: int) -> float:
    """GB/s of each member and direction. Raises RuntimeError where the sum is wrong."""
    if gpu is not None:
        torch.cuda.set_device(gpu)
    patience = datetime.timedelta(seconds=_PATIENCE_S)
    joined: Any = dist.new_group(group, timeout=patience, backend="gloo" if gpu is None else "nccl")
    if rank not in group:
        return 0.0
    tensor = torch.full((size // 4,), 1.0 + group.index(rank), device="cpu" if gpu is None else f"cuda:{gpu}")
    seconds = []
    for attempt in range(4):  # the first makes the connections
        began = time.perf_counter()
        dist.all_reduce(tensor, group=joined)
        first = tensor[0].item()  # waits for the device
        if attempt == 0 and (first != sum(range(1, len(group) + 1)) or not bool((tensor == first).all())):
            raise RuntimeError("the sum is wrong")
        seconds.append(time.perf_counter() - began)
        tensor.div_(len(group))
    return bandwidth(size, len(group), statistics.median(seconds[1:]))


def _in_time(work: Callable[[], float]) -> float:
    """Raises TimeoutError where it does not end: NCCL waits for ever."""
    answers: queue.SimpleQueue[float | RuntimeError] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(work())
        except RuntimeError as error:
            answers.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        answer = answers.get(timeout=_PATIENCE_S)
    except queue.Empty:
        raise TimeoutError(f"no end in {_PATIENCE_S:g} s") from None
    if isinstance(answer, RuntimeError):
        raise answer
    return answer
