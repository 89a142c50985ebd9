"""Do all ranks start the same run? Nodes may differ in versions, in code, in what they were told."""

import platform
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch
from torch import nn

from ddptrain import __version__
from ddptrain.config.schema import Config
from ddptrain.distributed.comm import from_all_ranks
from ddptrain.distributed.world import World
from ddptrain.errors import UserError


def check_same_command(world: World, config: Config) -> None:
    """Compare config and versions over all ranks. A collective.

    Raises UserError, on all ranks, listing what differs and on which rank.
    """
    _compare(
        world,
        {
            **_flat(asdict(config), ""),
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
        asked = "the ranks do not start the same run; give all nodes the same command and packages:"
        raise UserError("\n".join([asked, *problems[:10], *more]))


def _flat(value: Any, key: str) -> dict[str, str]:
    if isinstance(value, dict):
        return {k: v for name in value for k, v in _flat(value[name], f"{key}.{name}".lstrip(".")).items()}
    return {key: repr(value)}


def _shape(parameter: nn.Parameter) -> str:
    return f"{tuple(parameter.shape)} {parameter.dtype}"
