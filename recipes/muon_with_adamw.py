"""Muon for the filters of a convolutional network, AdamW for the rest: one optimizer."""

from collections import defaultdict
from ctypes import c_float
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from ddptrain.api import UserError
from ddptrain.recipes.muon import as_groups, check_parameters, nesterov, orthogonalised

_GAIN = 0.2
"""Root mean square of a step of AdamW's, about, in shares of the rate (Liu et al., arXiv 2502.16982)."""

_MOST_PADDING = 16
"""Times the filters' own size."""


@final
class MuonWithAdamW(Optimizer):
    """For convolutional networks: learns in fewer steps than AdamW, with AdamW's rate and weight decay.

    * Filters that see several channels by Muon (Jordan et al., kellerjordan.github.io/posts/muon): a step's
      direction is the orthogonalised Nesterov momentum, one matrix (out, in * height * width) a layer, times
      0.2 * sqrt of its larger side. An element's step is then as large as AdamW's, so that one rate and one
      weight decay serve all (Liu et al., arXiv 2502.16982, section 2.2).
    * All else (depthwise filters, matrices, biases, scales of norms) by torch's fused AdamW.

    lr: of all. momentum: of the filters. iterations: of Newton-Schulz. betas, eps: of AdamW. weight_decay:
    decoupled, of all.

    A step reads nothing on the host: where ``found_inf`` (0-d, on the device) is 1, nothing moves.
    Gradients have the memory layout of their parameters, as autograd gives them.
    """

    _step_supports_amp_scaling = True  # torch's word for: looks at found_inf itself
    takes_rates_on_device = True
    """A group's rate may be a 0-d tensor, as it is while a CUDA graph captures a step."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        iterations: int = 5,
    ) -> None:
        if not lr > 0:
            raise UserError(f"optim.lr={lr}: must be above 0.")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise UserError(f"optim.betas={list(betas)}: must be two numbers from 0 to below 1.")
        if not eps > 0:
            raise UserError(f"optim.eps={eps}: must be above 0.")
        if weight_decay < 0:
            raise UserError(f"optim.weight_decay={weight_decay}: must be 0 or more.")
        if not 0 < momentum < 1:
            raise UserError(f"optim.momentum={momentum}: must be between 0 and 1.")
        if not 1 <= iterations <= 20:
            raise UserError(f"optim.iterations={iterations}: must be from 1 to 20.")
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._betas = tuple(betas)
        self._eps = eps
        self._momentum = momentum
        self._iterations = iterations
        groups = []
        for given in as_groups(params):
            check_parameters("MuonWithAdamW", given["params"])
            for by_muon in (True, False):
                chosen = [p for p in given["params"] if _is_filter(p) == by_muon]
                groups += [{**given, "by_muon": by_muon, "params": chosen}] if chosen else []
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "fused": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move all parameters that have a gradient. Raises RuntimeError for a closure."""
        if closure is not None:
            raise RuntimeError("MuonWithAdamW.step: takes no closure")
        assert self.grad_scale is None, "gradients are brought to their true size before"
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            if moved and group["by_muon"]:
                self._muon(moved, group)
            elif moved:
                self._adamw(moved, group)

    def _muon(self, filters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in filters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        gradients = [_local(cast(Tensor, p.grad)) for p in filters]
        buffers = [_local(self.state[p]["momentum_buffer"]) for p in filters]
        directions = nesterov(gradients, buffers, self._momentum, self.found_inf)
        moving = _have_gradients(gradients, filters)
        lr = group["lr"]
        if not isinstance(lr, Tensor):  # as in a captured step, for the same bits
            lr = torch.full((), lr, dtype=torch.float32, device=filters[0].device)
        decay = lr * group["weight_decay"]
        kept = 1 - (decay if self.found_inf is None else decay * (self.found_inf == 0))
        together = defaultdict(list)
        padded = _best_padded(filters)
        for one in zip(filters, directions, moving.unbind(), strict=True):
            together[one[0].dtype, None if padded else one[0].shape].append(one)
        for (dtype, _), ones in together.items():
            whole = [_whole(direction, parameter) for parameter, direction, _ in ones]
            moves = torch.stack([moves for _, _, moves in ones])
            turned = zip(ones, orthogonalised(whole, self._iterations, moves), strict=True)
            steps = [torch.empty_like(direction) for _, direction, _ in ones]
            torch._foreach_copy_(steps, [_part(step, parameter) for (parameter, _, _), step in turned])
            torch._foreach_mul_(steps, [_GAIN * max(len(d), d[0].numel()) ** 0.5 for d in whole])
            torch._foreach_mul_(steps, (-lr).to(dtype))
            parts = [_local(parameter) for parameter, _, _ in ones]
            torch._foreach_mul_(parts, kept.to(dtype))
            torch._foreach_add_(parts, steps)

    def _adamw(self, moved: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in moved:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                    "step": torch.zeros((), device=parameter.device),
                }
        states = [self.state[p] for p in moved]
        lr = group["lr"]
        adamw(
            [_local(p) for p in moved],
            [_local(cast(Tensor, p.grad)) for p in moved],
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=lr if isinstance(lr, Tensor) else c_float(lr).value,
            weight_decay=group["weight_decay"],
            eps=self._eps,
            maximize=False,
        )


def _best_padded(filters: list[Tensor]) -> bool:
    """Whether filters of all shapes are best padded and orthogonalised at once, and not those of each shape:
    on a GPU, where launches cost more than arithmetic, unless they would grow too much."""
    if not filters[0].is_cuda:
        return False
    largest = max(len(p) for p in filters) * max(p.shape[1:].numel() for p in filters)
    return len(filters) * largest <= _MOST_PADDING * sum(p.numel() for p in filters)


def _is_filter(parameter: Tensor) -> bool:
    """Of a convolution that sees several channels. (A transformer's table of positions has one row.)"""
    return parameter.ndim > 2 and min(parameter.shape[:2]) > 1


def _have_gradients(gradients: list[Tensor], filters: list[Tensor]) -> Tensor:
    """Float32 (filters,): 1, or 0 where the whole gradient is zeros, as of a detector's branch that no object
    of the batch is assigned to: what is left of the momentum, however small, would be a step of full size."""
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(gradients)])
    if hasattr(filters[0], "full_tensor"):
        torch.distributed.all_reduce(norms)  # a collective: a rank sees its part of each
    return (norms > 0).float()


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, under strategy=fsdp."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _whole(part: Tensor, parameter: Tensor) -> Tensor:
    """All ranks' parts of what is cut like this parameter: a collective, under strategy=fsdp."""
    if not hasattr(parameter, "full_tensor"):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    cut = DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
    return cut.full_tensor()


def _part(whole: Tensor, parameter: Tensor) -> Tensor:
    """What `_whole` put together, cut again."""
    if not hasattr(parameter, "full_tensor"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    # every rank has the same: nothing is sent
    return distribute_tensor(
        whole.contiguous(), parameter.device_mesh, parameter.placements, src_data_rank=None
    ).to_local()
