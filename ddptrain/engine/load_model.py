"""Putting saved weights into a model, or saying how the two differ."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddptrain.api.strategy import Strategy
from ddptrain.distributed.foreach import mapped
from ddptrain.errors import UserError
from ddptrain.torch_private import is_dense


def fit_model(model: nn.Module, weights: Mapping[str, Any], where: str) -> None:
    """Load weights into a whole model, or raise UserError that says how the two differ."""
    check_fits(model, weights, where)
    model.load_state_dict(weights)


def load_model(model: nn.Module, weights: Mapping[str, Any], strategy: Strategy) -> None:
    """Load weights that fit into a model of which this rank may keep its part."""
    own, parts = model.state_dict(), mapped(weights, lambda value: value)  # keeps modules' versions
    for name, value in weights.items():
        parts[name] = part_of(value, own[name], strategy)
    model.load_state_dict(parts)


def part_of(value: Any, like: Any, strategy: Strategy) -> Any:
    """An optimizer's state has tensors of its parameter's shape and others, which all ranks keep. The first
    get the parameter's layout, too: fused kernels read both number by number, as they lie in memory, and a
    run in channels_last may be resumed without. Not for a parameter with gaps, which no fused kernel moves:
    a kernel may round otherwise in another layout."""
    if not isinstance(value, Tensor) or value.shape != like.shape or value.layout != torch.strided:
        return value
    part = strategy.part(value, like)
    if part.stride() == like.stride() or not is_dense(like):
        return part
    return torch.empty_like(like, dtype=part.dtype, device=part.device).copy_(part)


def check_fits(model: nn.Module, weights: Mapping[str, Any], where: str) -> None:
    """Make the buffers that the model's first pass would make. Raise UserError that says how weights and
    model differ."""
    _make_late_buffers(model, weights)
    own = model.state_dict()
    for name in [*own, *weights]:
        ours, theirs = (_shape(state[name]) if name in state else "absent" for state in (own, weights))
        if ours != theirs:
            raise UserError(
                f"{where}: is of another model: {name} is {theirs} there and {ours} here."
                " Use the recipe and model it was trained with."
            )


def _make_late_buffers(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Those that are None until a layer has seen an input."""
    device = next(model.parameters()).device
    for prefix, layer in model.named_modules():
        for name, buffer in layer._buffers.items():
            value = weights.get(f"{prefix}.{name}" if prefix else name)
            if buffer is None and isinstance(value, Tensor):
                setattr(layer, name, torch.empty_like(value, device=device))


def _shape(value: object) -> str:
    """Of a tensor, with its dtype; what else a state_dict may hold (get_extra_state) has none."""
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else "no tensor"
