"""The model of a strategy that cuts it: with numbers on the first rank alone, so that the hosts of all ranks
together hold it once."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from ddptrain.api.recipe import Task
from ddptrain.api.world import World
from ddptrain.config.schema import Config
from ddptrain.distributed.comm import from_all_ranks
from ddptrain.distributed.foreach import mapped
from ddptrain.errors import reason
from ddptrain.run.setup import make_model

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
    try:
        with _META:
            model = make_model(config, task, _META)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:  # it reads what it has made
        return None, f"Task.build needs numbers ({reason(error)})"
    for owner in (task, *model.modules()):
        held = [value for name, value in vars(owner).items() if name not in ("_parameters", "_buffers")]
        if _has_meta(held):
            return None, f"{type(owner).__name__} keeps a tensor that is neither parameter nor buffer"
    return model, ""


def _has_meta(held: Any) -> bool:
    without_numbers = []
    mapped(held, lambda value: without_numbers.append(isinstance(value, Tensor) and value.is_meta))
    return any(without_numbers)
