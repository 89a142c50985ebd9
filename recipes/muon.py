"""Muon for the filters of a convolutional network, SGD with Nesterov momentum for the rest: one optimizer."""

from collections.abc import Mapping, Sequence
from ctypes import c_float
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from ddptrain.api import UserError
from ddptrain.torch_private import fused_sgd_is_wrong, is_dense

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""a, b, c of the polynomial a*s + b*s^3 + c*s^5, steep at 0 (kellerjordan.github.io/posts/muon)."""


def orthogonalised(matrices: Sequence[Tensor], iterations: int, moving: Tensor | None = None) -> list[Tensor]:
    """Each (m, ...), read as a matrix (m, n) = U S V^T, becomes about U V^T, with singular values near 1.

    The Newton-Schulz iteration of Muon (kellerjordan.github.io/posts/muon): matrix products alone, no
    decomposition. It does not settle at 1: from singular values above 0.005 of the matrix's Frobenius norm
    five iterations lead into [0.68, 1.16], and three lead into [0.68, 1.21] from above 0.02; smaller ones
    come less far. In bfloat16 on a GPU, as published, else in the dtype it is given.

    moving: (k,), 1, or 0 for a matrix that becomes zeros instead.

    All at once, padded with zeros to the largest (as in github.com/hiverge/cifar10-speedrun): rows and
    columns of zeros stay so and change no singular value. The answers are views of the padded ones.
    """
    a, b, c = _QUINTIC
    first = matrices[0]
    rows, columns = max(len(m) for m in matrices), max(m[0].numel() for m in matrices)
    dtype = torch.bfloat16 if first.is_cuda else first.dtype
    padded = first.new_zeros(len(matrices), rows, columns, dtype=dtype)
    torch._foreach_copy_(_unpadded(padded, matrices), list(matrices))
    x = padded.mT if rows > columns else padded  # the smaller of the two possible products with itself
    if moving is not None:
        x = x * moving[:, None, None].to(dtype)
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_(min=torch.finfo(dtype).tiny)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return _unpadded(x.mT if rows > columns else x, matrices)


def _unpadded(padded: Tensor, matrices: Sequence[Tensor]) -> list[Tensor]:
    """The matrices' own parts of (k, rows, columns), as views in their shapes."""
    return [
        page[: len(m), : m[0].numel()].unflatten(1, m.shape[1:])
        for page, m in zip(padded, matrices, strict=True)
    ]


@final
class MuonWithSgd(Optimizer):
    """For convolutional networks with BatchNorm after each convolution and a linear layer at the end.

    * Filters (three dimensions or more) by Muon (Jordan et al., kellerjordan.github.io/posts/muon): a step's
      direction is the orthogonalised Nesterov momentum, one matrix (out, in * height * width) a layer, of all
      layers at once. Before it, as in airbench94_muon (github.com/KellerJordan/cifar10-airbench), each
      layer's filters are brought to a mean square norm of 1, which BatchNorm makes harmless and which takes
      the place of weight decay.
    * Matrices and biases by SGD with Nesterov momentum, in torch's fused kernel.

    All groups carry one ``lr``, that of the filters, so that any schedule turns them alike; ``scale`` times
    that is a group's own rate.

    lr: of the filters, the 2-norm of a step in each direction. momentum: of the filters. iterations: of
    Newton-Schulz. normalise_every: in the first of so many steps the filters are brought to their size, as in
    github.com/hiverge/cifar10-speedrun. head_lr, bias_lr: of matrices and of biases, for gradients of the
    mean loss. sgd_momentum: of both. weight_decay: of both; their share that a step takes away at the full
    rate, before momentum makes ``1 / (1 - sgd_momentum)`` times as much of it.

    A step reads nothing on the host: where ``found_inf`` (0-d, on the device) is 1, nothing moves.
    Gradients have the memory layout of their parameters, as autograd gives them.
    """

    _step_supports_amp_scaling = True  # torch's word for: looks at found_inf itself
    takes_rates_on_device = True
    """A group's rate may be a 0-d tensor, as it is while a CUDA graph captures a step."""

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
        normalise_every: int = 1,
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
        if normalise_every < 1:
            raise UserError(f"optim.normalise_every={normalise_every}: must be 1 step or more.")
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._iterations = iterations
        self._normalise_every = normalise_every
        # beta, and not momentum, which onecycle would turn
        kinds = {
            "filters": {"scale": 1.0, "beta": momentum},
            "head": {"scale": head_lr / lr, "beta": sgd_momentum},
            "biases": {"scale": bias_lr / lr, "beta": sgd_momentum},
        }
        groups = []
        for given in as_groups(params):
            decay = given.get("weight_decay", weight_decay)
            if any(hasattr(p, "full_tensor") for p in given["params"]):
                raise UserError("optim: MuonWithSgd needs whole matrices, which strategy=fsdp cuts. Use ddp.")
            check_parameters("MuonWithSgd", given["params"])
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
            if moved and group["kind"] == "filters":
                self._turn(moved, group)
            elif moved:
                self._slide(moved, group)

    def _turn(self, filters: list[Tensor], group: dict[str, Any]) -> None:
        """Muon: the state's momentum, and the filters by it."""
        buffers = [self.state[p]["momentum_buffer"] for p in filters]
        gradients = [cast(Tensor, p.grad) for p in filters]
        directions = nesterov(gradients, buffers, group["beta"], self.found_inf)
        state = self.state[filters[0]]
        if "steps" not in state:  # also those that moved nothing: the host can't know
            state["steps"] = torch.zeros((), dtype=torch.int64, device=filters[0].device)
        self._normalise(filters, where=state["steps"] % self._normalise_every == 0)
        state["steps"].add_(1)
        torch._foreach_copy_(directions, orthogonalised(directions, self._iterations))  # from bfloat16
        torch._foreach_mul_(directions, -group["lr"])
        torch._foreach_add_(filters, directions)

    def _normalise(self, filters: list[Tensor], where: Tensor) -> None:
        """In each step, for a captured one can't leave it out; ``where`` (0-d) says whether it counts."""
        norms = torch._foreach_norm(filters)
        torch._foreach_div_(norms, [len(p) ** 0.5 for p in filters])
        scales = torch.stack(norms).clamp_(min=1e-8).reciprocal_()
        if self.found_inf is not None:
            where = where & (self.found_inf == 0)
        scales.masked_fill_(~where, 1.0)
        torch._foreach_mul_(filters, scales.unbind())

    def _slide(self, moved: list[Tensor], group: dict[str, Any]) -> None:
        """SGD for matrices or biases."""
        sgd(
            moved,
            [cast(Tensor, p.grad) for p in moved],
            [self.state[p]["momentum_buffer"] for p in moved],
            fused=True,
            found_inf=self.found_inf,
            weight_decay=group["weight_decay"],
            momentum=group["beta"],
            lr=_rate(group),
            dampening=0.0,
            nesterov=True,
            maximize=False,
        )


def nesterov(
    gradients: list[Tensor], buffers: list[Tensor], momentum: float, found_inf: Tensor | None
) -> list[Tensor]:
    """gradient + momentum * buffer of each, after the buffers have moved on; zeros, and buffers as they were,
    where found_inf is 1. By SGD's kernel, which moves zeros by it in one launch."""
    directions = list(torch._foreach_mul(buffers, 0.0))
    sgd(
        directions,
        gradients,
        [*buffers],
        fused=True,
        found_inf=found_inf,
        weight_decay=0.0,
        momentum=momentum,
        lr=-1.0,
        dampening=0.0,
        nesterov=True,
        maximize=False,
    )
    return directions


def check_parameters(optimizer: str, parameters: Sequence[Tensor]) -> None:
    """Raise UserError for those that torch's fused kernels can't move."""
    if not all(is_dense(p) for p in parameters):
        raise UserError(f"optim: {optimizer} moves no parameters with gaps in memory. Use optim=adamw.")
    if any(p.is_complex() for p in parameters):
        raise UserError(f"optim: {optimizer} moves no complex parameters. Use optim=adamw.")
    if fused_sgd_is_wrong(parameters):
        raise UserError(
            f"optim: {optimizer} moves bf16 and fp16 parameters on a CPU by a kernel of torch that is wrong"
            " before 2.14. Use a newer torch, or float32."
        )


def _rate(group: Mapping[str, Any]) -> float | Tensor:
    """A group's own. Rounded as on the device, where both factors are float32."""
    lr, scale = group["lr"], group["scale"]
    if isinstance(lr, Tensor):
        rate: Tensor = lr * scale
        return rate
    return c_float(c_float(lr).value * c_float(scale).value).value


def as_groups(params: ParamsT) -> list[dict[str, Any]]:
    """What torch's optimizers take, as groups, each with a list of parameters."""
    given = list(params)
    if given and isinstance(given[0], Mapping):
        return [{**group, "params": list(group["params"])} for group in cast(list[dict[str, Any]], given)]
    return [{"params": given}]


def _kind(parameter: Tensor) -> str:
    return "filters" if parameter.ndim > 2 else "head" if parameter.ndim == 2 else "biases"
