"""The optimizer of a config: torch's own, or one of its kind."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from ddptrain.config.instantiate import build
from ddptrain.engine.parameter_groups import KEYS, ParameterGroup, check_groups, parameter_groups
from ddptrain.errors import UserError
from ddptrain.torch_private import fused_sgd_is_wrong, is_dense

_FUSED_IN_PARTS = ("torch.optim.Adam", "torch.optim.AdamW")
"""Whose fused kernels take DTensors (torch 2.11 to 2.15)."""


def check_optimizer(node: Mapping[str, Any]) -> None:
    """Raise UserError where the optim node's own values are wrong, whatever the model is."""
    problems = check_groups(node)
    if "lr" not in node and (node.get("layer_decay") or any("lr" in one for one in node.get("groups") or [])):
        problems.append("optim.lr: is missing; optim.layer_decay and lr of optim.groups are shares of it.")
    if problems:
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
    if sharded and node["_target_"] == "torch.optim.Adafactor":
        raise UserError("optim: torch's Adafactor takes no parameters in parts. Use AdamW, or strategy=ddp.")
    groups = [_as_torch(group, node) for group in parameter_groups(model, node, weight_decay_on)]
    sgd = node["_target_"] == "torch.optim.SGD"
    against = {
        "dampening": node.get("dampening"),  # its first step differs, and must not find a buffer
        "sparse gradients": sparse,
        "parameters in parts": sharded and node["_target_"] not in _FUSED_IN_PARTS,
        "parameters that are complex, or have gaps in memory": not all(
            p.is_floating_point() and is_dense(p) for p in trained
        ),
        "SGD of bf16 or fp16 parameters on a CPU before torch 2.14": sgd and fused_sgd_is_wrong(trained),
    }
    why_not = [what for what, holds in against.items() if holds]
    if node.get("fused") and why_not and node["_target_"].startswith("torch.optim."):
        raise UserError(f"optim.fused=true: can't be used with {why_not[0]}. Leave it out.")
    fused = node.get("fused") is None and node.get("foreach") is None and not why_not
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
    if isinstance(optimizer, SGD) and optimizer.defaults.get("fused"):
        _zero_momentum(optimizer)
    return optimizer


def _as_torch(group: ParameterGroup, node: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"params": list(group.parameters)}
    if group.lr_scale != 1:
        settings |= {"lr": node["lr"] * group.lr_scale, "lr_scale": group.lr_scale}
    if group.weight_decay is not None:
        settings["weight_decay"] = group.weight_decay
    return settings


def _zero_momentum(optimizer: SGD) -> None:
    """Set momentum buffers to zero. Fused SGD allocates them in its first step without writing to them; if
    that step is skipped, the next one would read uninitialised memory."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else []:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
