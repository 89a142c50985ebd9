"""Ranks in tests: ``run_ranks(fn, 3)`` runs a function as three gloo ranks on the CPU.

For ddptrain's own tests and for those of your recipe. Ranks are forked, which takes a tenth of a second
instead of several; so the function may be a closure, and its result must be picklable.

On a machine with a GPU hide it from these tests: ``os.environ["CUDA_VISIBLE_DEVICES"] = ""`` in their
conftest.py. Otherwise the first backward pass of the test's own process starts autograd's threads for the
GPU, and no process forked afterwards can run one.
"""

import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddptrain.api.world import World

Result = TypeVar("Result")

if not torch.cuda.is_available():
    # Autograd counts devices at a process' first backward pass. After torch.export or torch.compile, whose
    # fake tensors let a GPU appear, that pass would start threads, and no process forked afterwards
    # could run one.
    torch.ones(1, requires_grad=True).backward()


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; the message includes its traceback."""


def run_ranks(fn: Callable[[World], Result], size: int, timeout: float = 60.0) -> list[Result]:
    """Call ``fn(world)`` in ``size`` forked processes, each with one thread; returns their results by rank.

    A world of one runs in a process of its own too, without a process group.
    Raises RankFailed where a rank fails or is not done after ``timeout`` seconds.
    """
    importlib.import_module(
        "torch._dynamo"
    )  # optimizers and DDP import it, which takes seconds: here once for all ranks
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            world = World(rank=rank, size=size, local_rank=rank, local_size=size)
            process = context.Process(target=_rank, args=(fn, world, os.path.join(folder, "store"), sender))
            process.start()
            sender.close()
            ranks.append((process, receiver))
        try:
            return _results(ranks, timeout)
        finally:
            for process, receiver in ranks:
                receiver.close()
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _rank(fn: Callable[[World], Any], world: World, store: str, results: Connection) -> None:
    # the parent's thread pool does not survive a fork; told to all that would set another number, too
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        if world.size > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size
            )
        outcome: tuple[bool, Any] = (True, fn(world))
        if world.size > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        outcome = (False, traceback.format_exc())
    # not multiprocessing's pickling, which would share tensors through this process
    results.send_bytes(pickle.dumps(outcome))
    results.close()


def _results(ranks: list[tuple[ForkProcess, Connection]], timeout: float) -> list[Any]:
    """By rank; the first rank to fail is the one reported, not those that fail because of it."""
    receivers = [receiver for _, receiver in ranks]
    deadline = time.monotonic() + timeout
    values: dict[int, Any] = {}
    while len(values) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in values]
        ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(receivers)) if rank not in values]
            raise RankFailed(f"ranks {late} did not end within {timeout} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = receivers.index(receiver)
            try:
                succeeded, values[rank] = pickle.loads(receiver.recv_bytes())
            except EOFError as error:
                process, _ = ranks[rank]
                process.join(timeout=5)
                raise RankFailed(
                    f"rank {rank} died without a message, with exit code {process.exitcode}"
                ) from error
            if not succeeded:
                raise RankFailed(f"rank {rank} raised:\n{values[rank]}")
    return [values[rank] for rank in range(len(receivers))]
