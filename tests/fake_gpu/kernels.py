"""What CUDA has and a CPU has not: operators that only torch's CUDA code calls, and products in half
precision that are added up in float32."""

from typing import Any

import rnns
import torch
from torch import Tensor

aten = torch.ops.aten


def _gates(x: Tensor, h: Tensor, x_bias: Tensor | None, h_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    x, h = x.float(), h.float()
    return (x, h) if x_bias is None or h_bias is None else (x + x_bias.float(), h + h_bias.float())


def _lstm(x: Tensor, h: Tensor, cx: Tensor, x_bias: Any = None, h_bias: Any = None) -> tuple[Tensor, ...]:
    i, f, g, o = sum(_gates(x, h, x_bias, h_bias)).chunk(4, 1)  # type: ignore[union-attr]
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx.float() + i * g
    return tuple(t.to(x.dtype) for t in (o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)))


def _lstm_backward(
    grad_hy: Any, grad_cy: Any, cx: Tensor, cy: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor, ...]:
    i, f, g, o = kept.float().chunk(4, 1)
    grad_h, grad_c = (
        torch.zeros_like(cy, dtype=torch.float32) if t is None else t.float() for t in (grad_hy, grad_cy)
    )
    tanh = cy.float().tanh()
    grad_c = grad_c + grad_h * o * (1 - tanh * tanh)
    gates = [
        grad_c * g * i * (1 - i),
        grad_c * cx.float() * f * (1 - f),
        grad_c * i * (1 - g * g),
        grad_h * tanh * o * (1 - o),
    ]
    grad = torch.cat(gates, 1).to(kept.dtype)
    return grad, (grad_c * f).to(kept.dtype), grad.sum(0) if has_bias else grad.new_empty(0)


def _gru(x: Tensor, h: Tensor, hx: Tensor, x_bias: Any = None, h_bias: Any = None) -> tuple[Tensor, ...]:
    own, rank_state = _gates(x, h, x_bias, h_bias)
    (xr, xz, xn), (hr, hz, hn) = own.chunk(3, 1), rank_state.chunk(3, 1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    return (n + z * (hx.float() - n)).to(x.dtype), torch.cat([r, z, n, hx.float(), hn], 1).to(x.dtype)


def _gru_backward(grad_hy: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    r, z, n, hx, hn = kept.float().chunk(5, 1)
    grad = grad_hy.float()
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r, grad_z = grad_n * hn * (1 - r) * r, grad * (hx - n) * (1 - z) * z
    own, rank_state = (torch.cat([grad_r, grad_z, last], 1).to(kept.dtype) for last in (grad_n, grad_n * r))
    none = own.new_empty(0)
    return (
        own,
        rank_state,
        (grad * z).to(kept.dtype),
        own.sum(0) if has_bias else none,
        rank_state.sum(0) if has_bias else none,
    )


# Root mean square norm (arXiv 1910.07467), over the last dimensions
def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    dims = list(range(x.ndim - len(shape), x.ndim))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scale = (x.float().square().mean(dims, keepdim=True) + eps).rsqrt()
    y = x.float() * scale
    return (y if weight is None else y * weight.float()).to(x.dtype), scale


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], scale: Tensor, weight: Any, mask: list[bool]
) -> Any:
    first = x.ndim - len(shape)
    wide, normal = grad.float(), x.float() * scale.float()
    of_weight = (
        (wide * normal).sum(list(range(first))).to(weight.dtype) if mask[1] and weight is not None else None
    )
    wide = wide if weight is None else wide * weight.float()
    common = (wide * normal).mean(list(range(first, x.ndim)), keepdim=True)
    return (scale.float() * (wide - normal * common)).to(x.dtype), of_weight


# SyncBatchNorm's, over (n, channels, ...)
def _but_channels(x: Tensor) -> tuple[list[int], list[int]]:
    return [d for d in range(x.ndim) if d != 1], [1, -1, *[1] * (x.ndim - 2)]


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dims, _ = _but_channels(x)
    return x.float().mean(dims), (x.float().var(dims, unbiased=False) + eps).rsqrt()


def _gather_stats(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    counts = counts.float().view(-1, 1)
    total = counts.sum()
    middle = (mean * counts).sum(0) / total
    var = ((invstd.pow(-2) - eps + mean.pow(2)) * counts).sum(0) / total - middle.pow(2)
    if running_mean is not None:
        running_mean.lerp_(middle, momentum)
        running_var.lerp_(var * total / (total - 1), momentum)
    return middle, (var + eps).rsqrt()


def _normalised(x: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    _, view = _but_channels(x)
    y = (x.float() - mean.view(view)) * invstd.view(view)
    return (y if weight is None else y * weight.view(view) + bias.view(view)).to(x.dtype)


def _backward_sums(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, *_: Any) -> tuple[Tensor, ...]:
    dims, view = _but_channels(x)
    total, by_x = grad.float().sum(dims), (grad.float() * (x.float() - mean.view(view))).sum(dims)
    return total, by_x, by_x * invstd, total.clone()


def _normalised_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Any,
    total: Tensor,
    by_x: Tensor,
    counts: Tensor,
) -> Tensor:
    _, view = _but_channels(x)
    n, scale = counts.sum().float(), invstd if weight is None else invstd * weight
    centred = (x.float() - mean.view(view)) * (invstd.pow(2) * by_x / n).view(view)
    return ((grad.float() - (total / n).view(view) - centred) * scale.view(view)).to(x.dtype)


def _widened(func: Any) -> Any:
    def half(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)

    def computed(*args: Any, **kwargs: Any) -> Any:
        dtype = next((value.dtype for value in args if half(value)), None)
        if dtype is None:
            return func(*args, **kwargs)
        out = func(*(value.float() if half(value) else value for value in args), **kwargs)
        return (
            tuple(None if t is None else t.to(dtype) for t in out)
            if isinstance(out, tuple)
            else out.to(dtype)
        )

    return computed


PRODUCTS = (
    aten.convolution.default, aten.convolution_backward.default, aten.mm.default, aten.addmm.default,
    aten.bmm.default, aten.baddbmm.default,
)  # fmt: skip
KERNELS: dict[Any, Any] = {
    **{product: _widened(product) for product in PRODUCTS},
    aten._thnn_fused_lstm_cell.default: _lstm,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_backward,
    aten._thnn_fused_gru_cell.default: _gru,
    aten._thnn_fused_gru_cell_backward.default: _gru_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
    aten.batch_norm_stats.default: _stats,
    aten.batch_norm_gather_stats_with_counts.default: _gather_stats,
    aten.batch_norm_elemt.default: _normalised,
    aten.batch_norm_backward_reduce.default: _backward_sums,
    aten.batch_norm_backward_elemt.default: _normalised_backward,
    aten._cudnn_rnn.default: rnns.forward,
    aten._cudnn_rnn_backward.default: rnns.backward,
    aten.cudnn_is_acceptable.default: lambda *_: False,
}
