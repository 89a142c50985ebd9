"""The model of a strategy that cuts it: with numbers on the first rank alone, so that the hosts of all ranks
together hold it once."""

import logging
from copy import copy
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ddptrain.api.recipe import Task
from ddptrain.api.world import World
from ddptrain.config.schema import Config
from ddptrain.distributed.comm import from_all_ranks
from ddptrain.errors import reason
from ddptrain.run.setup import make_model, placed, seeded_model

log = logging.getLogger("ddptrain")
_CPU, _META = torch.device("cpu"), torch.device("meta")


def make_sharded_model(config: Config, task: Task, world: World) -> nn.Module:
    """The seeded model on the first rank's host; on others its shapes, which `Strategy.wrap` fills. A model
    that can't be made without numbers is made by each rank. A collective."""
    model, why = (make_model(config, task, _CPU), "") if world.is_first else _without_numbers(config, task)
    if why:
        model = make_model(config, task, _CPU)
    if problem := next(filter(None, from_all_ranks(world, why)), ""):
        log.info("note       each rank holds a whole model on its host for a while: %s", problem)
    assert model is not None
    return model


def _without_numbers(config: Config, task: Task) -> tuple[nn.Module | None, str]:
    """On torch's device `meta`. And why that is of no use; '' where it is."""
    tried = copy(task)  # what its `build` sets is thrown away where it fails
    try:
        with _META:
            model = seeded_model(config, tried)
    except Exception as error:
        # of any kind: it reads what it has made. An error of its own is raised again without `meta`
        return None, f"Task.build needs numbers ({reason(error)})"
    if not all(parameter.is_meta for parameter in model.parameters()):
        return None, f"{type(model).__name__} has numbers already"  # which a module that was given keeps
    model = placed(config, model, _META)
    known = {id(layer) for layer in model.modules()}
    for layer in model.modules():
        held = (value for name, value in vars(layer).items() if name not in _MODULES_OWN)
        if any(_has_meta(value, known, _DEEPEST) for value in held):
            return None, f"{type(layer).__name__} keeps a tensor that is neither parameter nor buffer"
    if _has_meta(vars(tried), known, _DEEPEST):
        return None, f"{type(task).__name__} keeps a tensor"
    vars(task).update(vars(tried))
    return model, ""


_MODULES_OWN = ("_parameters", "_buffers", "_modules")
_DEEPEST, _MOST = 4, 100
"""Objects within objects, and items of one."""


def _has_meta(held: Any, known: set[int], depth: int) -> bool:
    """Whether there is a tensor without numbers in it, or in what it holds. known: objects that need no
    look."""
    if isinstance(held, Tensor):
        return held.is_meta
    if depth == 0 or id(held) in known:
        return False
    known.add(id(held))
    if isinstance(held, dict):
        inside = list(islice(held.values(), _MOST))
    elif isinstance(held, list | tuple | set):
        inside = list(islice(held, _MOST))
    else:
        inside = list(getattr(held, "__dict__", {}).values())
    return any(_has_meta(one, known, depth - 1) for one in inside)
