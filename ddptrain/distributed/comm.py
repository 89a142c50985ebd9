"""Collectives. Each is a no-op in a world of one; each says so where it costs."""

import datetime
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddptrain.distributed.world import World
from ddptrain.errors import UserError

Result = TypeVar("Result")

START_TIMEOUT = datetime.timedelta(minutes=10)


def backend_for(world: World) -> str:
    """nccl where every rank has a GPU of its own, else gloo."""
    return "nccl" if world.device.type == "cuda" and not world.shares_device else "gloo"


def open_group(world: World, even_alone: bool = False) -> None:
    """Join the process group that torchrun's environment describes.

    A world of one needs none, unless DDP itself was asked for.
    """
    if world.size == 1 and not (even_alone and dist.is_torchelastic_launched()):
        return
    backend = backend_for(world)
    dist.init_process_group(
        backend,
        timeout=START_TIMEOUT,
        device_id=world.device if backend == "nccl" else None,
    )


def close_group() -> None:
    """Leave together: a rank that leaves early can abort another one's gloo threads."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def abandon_group() -> None:
    """Leave without waiting, for a rank that has failed while others may not answer.

    NCCL's group is left to the end of the process: closing it would wait for what was begun.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def add_up(world: World, tensor: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, in place."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def broadcast_buffers(world: World, model: nn.Module) -> None:
    """Give every rank the first rank's buffers (BatchNorm statistics), as the next DDP forward would."""
    if world.size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def from_first_rank(world: World, value: Result) -> Result:
    """Rank 0's value (anything that pickles) on every rank."""
    box = [value]
    if world.size > 1:
        dist.broadcast_object_list(box, src=0, device=_object_device(world))
    return box[0]


def from_all_ranks(world: World, value: Result) -> list[Result]:
    """Every rank's value (anything that pickles), by rank, on every rank."""
    values = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value)
    return values


def on_first_rank(world: World, work: Callable[[], Result]) -> Result:
    """Do something on rank 0 only; every rank gets its result, or its UserError."""
    outcome = from_first_rank(world, _attempt(work) if world.is_first else None)
    if isinstance(outcome, UserError):
        raise outcome
    return outcome  # type: ignore[return-value]


def once_a_node(world: World, work: Callable[[], Result]) -> Result:
    """Do something on each node's first rank while its others wait; they get its result. Any UserError
    reaches all ranks."""
    outcomes = _agree_on(world, _attempt(work) if world.is_first_on_node else None)
    return outcomes[world.rank - world.local_rank]  # type: ignore[return-value]


def on_all_ranks(world: World, work: Callable[[], None]) -> None:
    """Do something on every rank; a UserError of any of them reaches all."""
    _agree_on(world, _attempt(work))


def _agree_on(world: World, outcome: Result) -> list[Result]:
    """Every rank's outcome; raises the first that is a UserError."""
    outcomes = from_all_ranks(world, outcome)
    for error in outcomes:
        if isinstance(error, UserError):
            raise error
    return outcomes


def _attempt(work: Callable[[], Result]) -> Result | UserError:
    try:
        return work()
    except UserError as error:
        error.everywhere = True  # it is about to be
        return error


def _object_device(world: World) -> torch.device | None:
    return world.device if backend_for(world) == "nccl" else None
