"""Collectives. Each is a no-op in a world of one; each says so where it costs."""

import datetime
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddptrain.api.world import World
from ddptrain.distributed.cpu import bound_to, text_of, with_shared_cores
from ddptrain.distributed.device import name_of_gpu, with_shared_gpus
from ddptrain.distributed.foreach import by_dtype, copy_all
from ddptrain.errors import UserError
from ddptrain.text import named_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Result = TypeVar("Result")
log = logging.getLogger("ddptrain")

START_TIMEOUT = datetime.timedelta(hours=1)
_SAY_WHO_IS_MISSING = datetime.timedelta(seconds=30)
_PIECE = 64 * 2**20
"""Bytes that are sent at a time."""
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def backend_for(world: World) -> str:
    """nccl where every rank of the job has a GPU of its own, else gloo."""
    return "nccl" if world.device.type == "cuda" and not world.shares_device else "gloo"


def open_group(world: World, even_single: bool = False) -> World:
    """Join the process group that torchrun's environment describes. Returns the world, which knows now
    whether ranks share a GPU. Raises UserError where some have a GPU and others none.

    A world of one needs none, unless DDP itself was asked for.
    """
    if dist.is_initialized():
        raise UserError(
            "torch.distributed: this program has a process group already. Leave out init_process_group: the"
            " training makes one, and closes it."
        )
    if world.size == 1 and not (even_single and dist.is_torchelastic_launched()):
        return world
    store = _store_of_this_attempt()
    store.set(f"place-{world.rank}", json.dumps([name_of_gpu(world.device), bound_to()]))
    # no collective: which backend there can be follows from this
    gpus, bound = zip(*_places_of_all(store, world), strict=True)
    world = with_shared_cores(with_shared_gpus(world, gpus), bound)
    backend = backend_for(world)
    dist.init_process_group(
        backend,
        timeout=START_TIMEOUT,
        device_id=world.device if backend == "nccl" else None,
        store=store,
        rank=world.rank,
        world_size=world.size,
    )
    return world


def _places_of_all(store: "Store", world: World) -> list[tuple[str, int]]:
    """By rank, the GPU (`name_of_gpu`) and the cores (`bound_to`). Waits for all of them, and says for whom:
    a rank that is refused a device never comes."""
    keys = [f"place-{rank}" for rank in range(world.size)]
    until = time.monotonic() + START_TIMEOUT.total_seconds()
    said: list[int] = []
    while True:
        try:
            store.wait(keys, _SAY_WHO_IS_MISSING)
            return [tuple(json.loads(place)) for place in store.multi_get(keys)]
        except dist.DistStoreError:
            if time.monotonic() > until:
                raise
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if missing and missing != said:
            log.warning(
                "waiting    for %s to start; a rank that was refused says why where it runs",
                named_ranks(missing),
            )
            said = missing


def _store_of_this_attempt() -> "Store":
    """A part of torchrun's store that no earlier attempt has written to, nor an earlier group of these
    processes: a program may train twice.

    torchrun keeps one store over restarts (torch 2.11 to 2.15 do), and a restarted rank then dials what
    dead ranks have left there. Agents of several nodes may count restarts differently, so only on one
    node does the count name the attempt.
    """
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store: Store
    store, _, _ = next(rendezvous("env://", timeout=START_TIMEOUT))
    store.set_timeout(START_TIMEOUT)
    if _left:
        store = PrefixStore(f"group-{len(_left)}", store)
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if not restarts or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        log.warning(
            "torchrun keeps the addresses of dead ranks over a restart, so its restarts may fail: set"
            " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node before it starts, and a rendezvous"
            " (--rdzv-backend=c10d); or start with python -m ddptrain launch, which does"
        )
        return store
    return PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def close_group() -> None:
    """Leave together: a rank that leaves early can abort another one's gloo threads."""
    if dist.is_initialized():
        dist.barrier()
        _destroy_group()


def abandon_group() -> None:
    """Leave without waiting, for a rank that has failed while others may not answer.

    NCCL's group is left to the end of the process: closing it would wait for what was begun.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        _destroy_group()


_left: list[object] = []
"""Groups that were left. DDP's reducer has one too, and where it is the last to let go, it waits for gloo's
threads with Python's lock in its hand, which one of them may want for a tensor of the last collective: then
the process never ends (torch 2.11, seen on busy machines)."""


def gloo_group() -> dist.ProcessGroup:
    """A further group of all ranks, for a thread beside the training. A collective."""
    group = dist.new_group(backend="gloo", timeout=START_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _destroy_group() -> None:
    _left.append(dist.group.WORLD)
    dist.destroy_process_group()
    _await_gloo_threads()


def _await_gloo_threads() -> None:
    """Wait until they sleep, for five seconds at most. One that has done a collective lets go of its tensors,
    and takes Python's lock for that. If the interpreter is ending by then, the process is aborted: a training
    that has ended well counts as failed (pytorch#190489; torch 2.14, on a busy machine).

    A thread that waits for the lock sleeps, too, but not while this one reads a file, which leaves it the
    lock.
    """
    tasks, until = Path("/proc/self/task"), time.monotonic() + 5.0  # Linux has it
    at_rest = 0
    while at_rest < 3 and tasks.is_dir() and time.monotonic() < until:
        time.sleep(0.001)
        at_rest = 0 if any(map(_is_busy_gloo, tasks.iterdir())) else at_rest + 1


def _is_busy_gloo(task: Path) -> bool:
    stat = text_of(task / "stat")  # '' of one that has ended
    return "(pt_gloo_runloop)" in stat and "(pt_gloo_runloop) S" not in stat


def add_up(world: World, tensor: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, in place."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def only_statistics(model: nn.Module) -> bool:
    """Whether all buffers are statistics of BatchNorm or InstanceNorm, which the forward pass in training
    does not read. So DDP need not broadcast them in each step (about 100 small copies for a MobileNetV3):
    evaluation and checkpoints use rank 0's, with the same result."""
    return all(type(layer) in _NORMS or not _has_buffers(layer) for layer in model.modules())


def _has_buffers(layer: nn.Module) -> bool:
    """Of its own. One that is None counts if it is saved: a pass makes it."""
    not_saved = layer._non_persistent_buffers_set
    return any(buffer is not None or name not in not_saved for name, buffer in layer._buffers.items())


def broadcast(world: World, tensors: Iterable[Tensor]) -> None:
    """Give every rank the first rank's values of these tensors, in place. A collective for each dtype."""
    if world.size > 1:
        for group in by_dtype(tensors):
            packed = torch.cat([tensor.reshape(-1) for tensor in group])
            dist.broadcast(packed, src=0)
            parts = packed.split([tensor.numel() for tensor in group])
            copy_all(group, [part.view_as(own) for part, own in zip(parts, group, strict=True)])


def from_first_rank(world: World, value: Result) -> Result:
    """Rank 0's value (anything that pickles) on every rank."""
    box = [value]
    if world.size > 1:
        dist.broadcast_object_list(box, 0, device=world.device if backend_for(world) == "nccl" else None)
    return box[0]


def bytes_from_first_rank(world: World, content: bytes | bytearray) -> bytes | bytearray:
    """Rank 0's bytes on every rank, in pieces: NCCL takes them by way of the GPU, which may have no room for
    all of them. Collectives."""
    size, device = from_first_rank(world, len(content)), torch.device("cpu")
    if world.size == 1:
        return content
    if backend_for(world) == "nccl":
        device = world.device
    received = bytearray(0 if world.is_first else size)
    for begin in range(0, size, _PIECE):
        piece = torch.empty(min(_PIECE, size - begin), dtype=torch.uint8)
        if world.is_first:
            piece.numpy()[:] = np.frombuffer(content, np.uint8, len(piece), begin)
        piece = piece.to(device)
        dist.broadcast(piece, src=0)
        if not world.is_first:
            received[begin : begin + len(piece)] = piece.cpu().numpy().data
    return content if world.is_first else received


def from_all_ranks(world: World, value: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Every rank's value (anything that pickles), by rank, on every rank. group: of all ranks, beside the
    default one."""
    values = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value, group)
    return values


def on_first_rank(world: World, work: Callable[[], Result]) -> Result:
    """Do something on rank 0 only; every rank gets its result, or its UserError."""
    outcome = from_first_rank(world, _attempt(work) if world.is_first else None)
    if isinstance(outcome, UserError):
        outcome.agreed = True
        raise outcome
    return outcome  # type: ignore[return-value]


def once_a_node(world: World, work: Callable[[], Result]) -> Result:
    """Do something on each node's first rank while its others wait; they get its result. Any UserError
    reaches all ranks."""
    outcomes = _agree_on(world, _attempt(work) if world.is_first_on_node else None)
    return outcomes[world.rank - world.local_rank]  # type: ignore[return-value]


def on_all_ranks(world: World, work: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Do something on every rank, which gets its own result; a UserError of any of them reaches all: those
    that are in a collective of this kind inside the work meet it there. group: of all ranks, beside the
    default one."""
    outcome = _attempt(work)
    if isinstance(outcome, UserError) and outcome.agreed:  # by a collective inside the work
        raise outcome
    _agree_on(world, outcome if isinstance(outcome, UserError) else None, group)
    return outcome  # type: ignore[return-value]


def _agree_on(world: World, outcome: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Every rank's outcome; raises the first that is a UserError."""
    outcomes = from_all_ranks(world, outcome, group)
    for error in outcomes:
        if isinstance(error, UserError):
            error.agreed = True
            raise error
    return outcomes


def _attempt(work: Callable[[], Result]) -> Result | UserError:
    try:
        return work()
    except UserError as error:
        error.everywhere = True  # it is about to be
        return error
