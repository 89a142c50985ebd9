"""Muon for the filters of a convolutional network, SGD with Nesterov momentum for the rest: one optimizer."""

from collections.abc import Mapping
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from ddptrain.errors import UserError

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""a, b, c of the polynomial a*s + b*s^3 + c*s^5, steep at 0 (kellerjordan.github.io/posts/muon)."""


def orthogonalised(matrices: Tensor, iterations: int) -> Tensor:
    """(k, m, n) -> (k, m, n): each matrix U S V^T of them becomes about U V^T, with singular values near 1.

    The Newton-Schulz iteration of Muon (kellerjordan.github.io/posts/muon): matrix products alone, no
    decomposition. It does not settle at 1: from singular values above 0.005 of the matrix's Frobenius norm
    five iterations lead into [0.68, 1.16], and three lead into [0.68, 1.21] from above 0.02; smaller ones
    come less far. In bfloat16 on a GPU, as published, else in the dtype it is given.
    """
    a, b, c = _QUINTIC
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices  # the smaller of the two possible products with itself
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-30)
    if x.is_cuda:
        x = x.bfloat16()
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)


@final
class MuonWithSgd(Optimizer):
    """For convolutional networks with BatchNorm after each convolution and a linear layer at the end.

    * Filters (three dimensions or more) by Muon (Jordan et al., kellerjordan.github.io/posts/muon): a step's
      direction is the orthogonalised Nesterov momentum, one matrix (out, in * height * width) a layer. Before
      it, as in airbench94_muon (github.com/KellerJordan/cifar10-airbench), each layer's filters are brought
      to a mean square norm of 1, which BatchNorm makes harmless and which takes the place of weight decay.
      Layers of one shape are moved together.
    * Matrices and biases by SGD with Nesterov momentum, in torch's fused kernel.

    All groups carry one ``lr``, that of the filters, so that any schedule turns them alike; ``scale`` times
    that is a group's own rate.

    lr: of the filters, the 2-norm of a step in each direction. momentum: of the filters. iterations: of
    Newton-Schulz. head_lr, bias_lr: of matrices and of biases, for gradients of the mean loss. sgd_momentum:
    of both. weight_decay: of both; their share that a step takes away at the full rate, before momentum
    makes ``1 / (1 - sgd_momentum)`` times as much of it.

    A step reads nothing on the host: where ``found_inf`` (0-d, on the device) is not 0, nothing moves.
    """

    _step_supports_amp_scaling = True  # torch's word for: looks at found_inf itself

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        head_lr: float,
        bias_lr: float,
        momentum: float = 0.6,
        sgd_momentum: float = 0.85,
        weight_decay: float = 0.0,
        iterations: int = 5,
    ) -> None:
        for name, rate in (("lr", lr), ("head_lr", head_lr), ("bias_lr", bias_lr)):
            if not rate > 0:
                raise UserError(f"optim.{name}={rate}: must be above 0.")
        for name, share in (("momentum", momentum), ("sgd_momentum", sgd_momentum)):
            if not 0 < share < 1:
                raise UserError(f"optim.{name}={share}: must be between 0 and 1.")
        if weight_decay < 0:
            raise UserError(f"optim.weight_decay={weight_decay}: must be 0 or more.")
        if not 1 <= iterations <= 20:
            raise UserError(f"optim.iterations={iterations}: must be from 1 to 20.")
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._iterations = iterations
        # beta, and not momentum, which onecycle would turn
        kinds = {
            "filters": {"scale": 1.0, "beta": momentum},
            "head": {"scale": head_lr / lr, "beta": sgd_momentum},
            "biases": {"scale": bias_lr / lr, "beta": sgd_momentum},
        }
        groups = []
        for given in _as_groups(params):
            decay = given.get("weight_decay", weight_decay)
            for kind, settings in kinds.items():
                chosen = [p for p in given["params"] if _kind(p) == kind]
                # SGD multiplies its decay by the rate, so it is divided by it here
                own = {"kind": kind, "weight_decay": decay / (lr * settings["scale"]), **settings}
                groups += [{**given, **own, "params": chosen}] if chosen else []
        super().__init__(groups, {"lr": lr, "fused": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move all parameters that have a gradient. Raises RuntimeError for a closure."""
        if closure is not None:
            raise RuntimeError("MuonWithSgd.step: takes no closure")
        assert self.grad_scale is None, "gradients are brought to their true size before"
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            for parameter in moved:
                if "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            if group["kind"] == "filters":
                shapes: dict[torch.Size, list[Tensor]] = {}
                for parameter in moved:
                    shapes.setdefault(parameter.shape, []).append(parameter)
                for alike in shapes.values():
                    self._turn(alike, group["lr"], group["beta"])
            elif moved:
                self._slide(moved, group)

    def _turn(self, filters: list[Tensor], lr: float, momentum: float) -> None:
        """Muon, for layers of one shape."""
        buffers = [self.state[p]["momentum_buffer"] for p in filters]
        weights, gradients, before = torch.stack(filters), _stacked_gradients(filters), torch.stack(buffers)
        after = momentum * before + gradients
        nesterov = (gradients + momentum * after).flatten(2)
        update = orthogonalised(nesterov, self._iterations).view_as(weights)
        norms = torch.linalg.vector_norm(weights.flatten(1), dim=1).clamp(min=1e-7)
        unit = weights * (weights.shape[1] ** 0.5 / norms).view(-1, *[1] * (weights.ndim - 1))
        self._put(filters, weights, unit - lr * update)
        self._put(buffers, before, after)

    def _put(self, tensors: list[Tensor], old: Tensor, new: Tensor) -> None:
        """Write ``new`` into the tensors, or what they hold where the step is to be left out."""
        if self.found_inf is not None:
            new = torch.where(self.found_inf != 0, old, new)
        for tensor, values in zip(tensors, new.unbind(), strict=True):
            tensor.copy_(values)

    def _slide(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        sgd(
            parameters,
            [cast(Tensor, p.grad) for p in parameters],
            [self.state[p]["momentum_buffer"] for p in parameters],
            fused=True,
            found_inf=self.found_inf,
            weight_decay=group["weight_decay"],
            momentum=group["beta"],
            lr=group["lr"] * group["scale"],
            dampening=0.0,
            nesterov=True,
            maximize=False,
        )


def _as_groups(params: ParamsT) -> list[dict[str, Any]]:
    """What torch's optimizers take, as groups, each with a list of parameters."""
    given = list(params)
    if given and isinstance(given[0], Mapping):
        return [{**group, "params": list(group["params"])} for group in cast(list[dict[str, Any]], given)]
    return [{"params": given}]


def _kind(parameter: Tensor) -> str:
    return "filters" if parameter.ndim > 2 else "head" if parameter.ndim == 2 else "biases"


def _stacked_gradients(parameters: list[Tensor]) -> Tensor:
    return torch.stack([cast(Tensor, p.grad) for p in parameters])
