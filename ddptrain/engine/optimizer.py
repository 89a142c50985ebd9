"""The optimizer and the learning-rate schedule, both torch's own."""

import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from ddptrain.config.instantiate import build
from ddptrain.config.schema import Sched
from ddptrain.engine.parameter_groups import KEYS, ParameterGroup, check_groups, parameter_groups
from ddptrain.errors import UserError

_FUSED_IN_PARTS = ("torch.optim.Adam", "torch.optim.AdamW")
"""Whose fused kernels take DTensors (torch 2.11 to 2.15)."""
_WARMUP_START = 0.01
"""First rate of the warm-up, as a share of the peak."""


def check_optimizer(node: Mapping[str, Any]) -> None:
    """Raise UserError where the optim node's own values are wrong, whatever the model is."""
    if problems := check_groups(node):
        raise UserError("\n".join(problems))
    build_optimizer(arguments_of(node), nn.Linear(1, 1))


def arguments_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """The optim node without what says which parameters get which settings."""
    return {name: value for name, value in node.items() if name not in KEYS}


def build_optimizer(
    node: Mapping[str, Any],
    model: nn.Module,
    weight_decay_on: str = "all",
    sparse: bool = False,
    sharded: bool = False,
) -> Optimizer:
    """The optimizer of a config node, over the model's trained parameters, in the groups of
    `parameter_groups`.

    sparse: some gradients are sparse. sharded: a rank has its part of each parameter.
    Fused where torch supports it: one kernel per step instead of one for each parameter, on CPUs too.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UserError("model: no parameter requires a gradient, so there is nothing to train.")
    if sharded and node["_target_"] == "torch.optim.Adafactor":
        raise UserError("optim: torch's Adafactor takes no parameters in parts. Use AdamW, or strategy=ddp.")
    chosen = node.get("fused") is None and node.get("foreach") is None
    groups = [_as_torch(group, node) for group in parameter_groups(model, node, weight_decay_on)]
    # with dampening the first step differs from the others and must not find a buffer
    fused = chosen and not node.get("dampening") and not sparse
    fused = fused and (not sharded or node["_target_"] in _FUSED_IN_PARTS)
    fused = fused and all(p.is_floating_point() and _is_dense(p) for p in trained)
    built = build(arguments_of(node), "optim", params=groups, **({"fused": True} if fused else {}))
    if not isinstance(built, Optimizer):
        raise UserError(f"optim._target_={node['_target_']}: must be a torch.optim.Optimizer.")
    if "weight_decay" not in built.defaults and any(group.get("weight_decay") for group in groups):
        raise UserError(
            f"optim.groups: weight_decay: {node['_target_']} has no weight decay. Leave it out, or use"
            " another optimizer."
        )
    optimizer: Optimizer = built
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"optim._target_={node['_target_']}: evaluates the loss several times a step, which this"
            " engine does not; use another optimizer."
        )
    if isinstance(optimizer, SGD) and fused:
        _zero_momentum(optimizer)
    return optimizer


def _as_torch(group: ParameterGroup, node: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"params": list(group.parameters)}
    if group.lr_scale != 1:
        made |= {"lr": node["lr"] * group.lr_scale, "lr_scale": group.lr_scale}
    if group.weight_decay is not None:
        made["weight_decay"] = group.weight_decay
    return made


def _is_dense(parameter: nn.Parameter) -> bool:
    """Whether its numbers fill its memory without gaps. Of others torch's fused optimizers (2.11 to 2.15, on
    CPUs) update the wrong numbers, without an error."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _zero_momentum(optimizer: SGD) -> None:
    """Set momentum buffers to zero. Fused SGD allocates them in its first step without writing to them; if
    that step is skipped, the next one would read uninitialised memory."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else []:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def build_schedule(sched: Sched, optimizer: Optimizer, steps: int) -> LRScheduler:
    """The learning rate of each of ``steps`` optimizer steps: a linear warm-up, then ``sched.name``.

    wsd (warm-up, stable, decay): Hu et al. 2024, arXiv:2404.06395, section 4.
    """
    warmup = round(sched.warmup * steps)
    rest = max(1, steps - warmup)
    peaks = [group["lr"] for group in optimizer.param_groups]
    if sched.name == "onecycle":  # has its own warm-up, and varies the momentum inversely
        return OneCycleLR(
            optimizer,
            max_lr=peaks,
            total_steps=steps + 1,  # one more: the last step is followed by a schedule step too
            pct_start=sched.warmup or 0.3,
            final_div_factor=1 / (25 * sched.final) if sched.final else 1e4,
            cycle_momentum=_has_momentum(optimizer),
        )
    main: LRScheduler
    if sched.name == "cosine" and len(set(peaks)) > 1:  # CosineAnnealingLR has one eta_min for all

        def cosine(step: int) -> float:
            return sched.final + (1 - sched.final) * (1 + math.cos(math.pi * min(step, rest) / rest)) / 2

        main = LambdaLR(optimizer, cosine)
    elif sched.name == "cosine":
        main = CosineAnnealingLR(optimizer, T_max=rest, eta_min=sched.final * peaks[0])
    elif sched.name == "linear":
        main = LinearLR(optimizer, start_factor=1.0, end_factor=sched.final, total_iters=rest)
    elif sched.name == "step":
        milestones = [round(share * steps) - warmup for share in sched.milestones]
        main = MultiStepLR(optimizer, milestones, gamma=sched.gamma)
    else:
        main = ConstantLR(optimizer, factor=1.0)
    parts: list[LRScheduler] = [main]
    switches: list[int] = []
    if sched.name == "wsd" and (cooldown := min(round(sched.cooldown * steps), rest)):
        parts += [LinearLR(optimizer, start_factor=1.0, end_factor=sched.final, total_iters=cooldown)]
        switches += [steps - cooldown]
    if warmup:
        parts = [LinearLR(optimizer, start_factor=_WARMUP_START, total_iters=warmup), *parts]
        switches = [warmup, *switches]
    return SequentialLR(optimizer, parts, switches) if switches else main


def fast_forward(schedule: LRScheduler, steps: int) -> None:
    """Advance a new schedule by so many steps.

    Not restored from a checkpoint: a resumed run follows the config it is given, with more epochs or another
    rate; with the same config the rates are the same, bit for bit.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for _ in range(steps):
            schedule.step()


def _has_momentum(optimizer: Optimizer) -> bool:
    group = optimizer.param_groups[0]
    return "betas" in group or bool(group.get("momentum"))
