"""Steps of an optimizer with drawn gradients, over a small network of filters, matrices and biases."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU(),
        nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 4, 5, bias=False),
    ).to(torch.float64)  # fmt: skip


def gradients(model: nn.Module, steps: int) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        [torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in model.parameters()]
        for _ in range(steps)
    ]


def take(optimizer: Optimizer, model: nn.Module, step: list[Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), step, strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(gradient)  # in its layout, as autograd does
    optimizer.step()


class HostReads(TorchDispatchMode):
    """Counts what on a GPU makes the host wait: a number read off a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return op(*args, **(kwargs or {}))
