"""Checks that all ranks agree: at the start on command, versions and model; during the training on the
weights. They differ if a device is faulty, or a rank runs other code."""

import hashlib
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from ddptrain.api.world import World
from ddptrain.distributed.comm import from_all_ranks
from ddptrain.distributed.foreach import mapped
from ddptrain.distributed.snapshot import with_extra_state
from ddptrain.errors import OutOfStep, UserError
from ddptrain.keys import flat_values
from ddptrain.text import counted
from ddptrain.version import __version__

_CHUNK = 1 << 20
"""Values per chunk: the checksum takes eight times the memory of half-precision weights."""


def check_same_command(world: World, config: Mapping[str, Any]) -> None:
    """Compare config, a tree, and versions over all ranks. A collective.

    Raises UserError, on all ranks, listing what differs and on which rank.
    """
    _compare(
        world,
        {
            **{key: repr(value) for key, value in flat_values(config).items()},
            "version of ddptrain": __version__,
            "version of Python": platform.python_version(),
            "version of torch": torch.__version__,
            "version of torchvision": metadata.version("torchvision"),
        },
    )


def check_same_model(world: World, model: nn.Module) -> None:
    """The same for the model's parameters."""
    _compare(world, {f"parameter {name}": _shape(p) for name, p in model.named_parameters()})


def _compare(world: World, facts: dict[str, str]) -> None:
    problems = []
    ranks = from_all_ranks(world, facts)
    for rank, theirs in enumerate(ranks):
        for name in [*ranks[0], *(name for name in theirs if name not in ranks[0])]:
            first, other = ranks[0].get(name, "absent"), theirs.get(name, "absent")
            if first != other:
                problems.append(f"{name}: {other} on rank {rank}, {first} on rank 0.")
    if problems:
        more = [f"... and {len(problems) - 10} more."] if len(problems) > 10 else []
        rule = "the ranks do not start the same run; give all nodes the same command and packages:"
        raise UserError("\n".join([rule, *problems[:10], *more]))


def _shape(parameter: nn.Parameter) -> str:
    return f"{tuple(parameter.shape)} {parameter.dtype}"


def check_replicas(world: World, model: nn.Module, step: int) -> None:
    """Compare a checksum of every parameter over all ranks. A collective and a sync point.

    Raises OutOfStep, on all ranks, naming the ranks that differ and the first parameter in which.
    """
    if odd := _other_weights(world, model):
        raise OutOfStep(
            f"after step {step} {odd}: a device or memory is faulty, or a rank's code did something else, as"
            " by a Task.loss that calls another model than it is given. Start the same command again: the run"
            " goes on from its last checkpoint. If it comes again, leave that device out."
        )


def check_same_weights(world: World, model: nn.Module) -> None:
    """The same for the weights that a run starts with. Raises UserError."""
    if odd := _other_weights(world, model):
        raise UserError(
            f"model: at the start {odd}. Draw what is random in Task.build from torch, NumPy or Python's"
            " random, which are seeded alike on all ranks, and do not seed them again there."
        )


def _other_weights(world: World, model: nn.Module) -> str:
    """Which ranks have other weights than the rest, and in which parameter first; '' where all have the same.
    A collective and a sync point."""
    if world.size == 1:
        return ""
    names = [name for name, _ in model.named_parameters()]
    sums = torch.stack([_checksum(parameter.detach()) for parameter in model.parameters()]).tolist()
    digest = hashlib.sha256(repr(sums).encode()).hexdigest()
    digests = from_all_ranks(world, digest)
    if len(set(digests)) == 1:
        return ""
    by_rank = from_all_ranks(world, sums)
    common = max(digests, key=digests.count)
    odd = [rank for rank, other in enumerate(digests) if other != common]
    right = by_rank[digests.index(common)]
    first = next(i for i, _ in enumerate(names) if any(by_rank[rank][i] != right[i] for rank in odd))
    if world.size == 2:
        who = "the two ranks have other weights"  # nobody knows whose are right
    elif len(odd) == 1:
        who = f"rank {odd[0]} has other weights than the rest"
    else:
        who = f"ranks {', '.join(map(str, odd))} have other weights than the rest"
    return f"{who}, first in {names[first]}"


def check_extra_state(world: World, model: nn.Module, step: int) -> None:
    """Compare the model's extra state (``get_extra_state``) over all ranks. A collective, of a model that has
    any.

    Raises UserError, on all ranks: a checkpoint has the first rank's, and the others would go on with it.
    """
    stateful = {name: layer for name, layer in model.named_modules() if with_extra_state([layer])}
    if world.size == 1 or not stateful:
        return
    own = {name: repr(mapped(layer.get_extra_state(), _plain)) for name, layer in stateful.items()}
    ranks = from_all_ranks(world, own)
    for name, layer in stateful.items():
        if odd := [rank for rank, theirs in enumerate(ranks) if theirs[name] != ranks[0][name]]:
            raise UserError(
                f"model: after {counted(step, 'step')} the extra state (get_extra_state) of"
                f" {name or type(layer).__name__} on rank {odd[0]} differs from rank 0's, which alone a"
                " checkpoint holds: a resumed run would be another one. Keep what ranks see differently in a"
                " buffer (register_buffer), of which all get rank 0's, or use strategy=strict."
            )


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else value


def _checksum(tensor: Tensor) -> Tensor:
    """0-d int64: the sum of the bits, taken as whole numbers and weighted by their places."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for i, bits in enumerate(tensor.view(-1).view(width).split(_CHUNK)):
        places = torch.arange(len(bits), device=bits.device) % 65521 + 1
        total += (bits.to(torch.int64) * places).sum() * (2 * i + 1)
    return total
