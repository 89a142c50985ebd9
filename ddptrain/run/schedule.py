"""Builds the learning-rate schedule of a config."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddptrain.config.instantiate import build
from ddptrain.engine.schedule import Schedule
from ddptrain.errors import UserError


def check_schedule(node: Mapping[str, Any]) -> None:
    """Raise UserError where the sched node's own values are wrong, whatever the model is."""
    build_schedule(node, SGD(nn.Linear(1, 1).parameters(), lr=0.1, momentum=0.9), 100)


def build_schedule(node: Mapping[str, Any], optimizer: Optimizer, steps: int) -> Schedule:
    """The schedule of a config's node for a run of so many steps: one of `ddptrain.engine.lr_schedules`, of
    torch's or the user's own. Raises UserError where it is none that follows from the step."""
    schedule = build(node, "sched", optimizer=optimizer, steps=steps)
    if not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau):
        raise UserError(
            f"sched._target_={node['_target_']}: must be a torch.optim.lr_scheduler.LRScheduler whose rate"
            " follows from the step, or a function of optimizer and steps that returns one."
        )
    on_gpu = any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
    return Schedule(schedule, steps, on_gpu)
