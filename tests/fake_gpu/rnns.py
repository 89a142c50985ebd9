"""cuDNN's recurrent layers, which torch takes on a GPU: what dtype they are given, and their numbers.

The emulation switches cuDNN off, so torch would take its own cells, which autocast handles as any product.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
"""In cuDNN's order."""
_plain = [getattr(torch, name) for name in _MODES]
_torchs = torch.library.Library("aten", "IMPL")


def as_torch_does(
    x: Tensor, weight: list[Tensor], stride: int, _: Any, hx: Tensor, cx: Tensor | None, *rest: Any
) -> Any:
    """torch's kernel for autocast (2.11 to 2.15; it would ask cuDNN for a layout): half under any."""
    with torch.autocast("cuda", enabled=False):
        half = [t.half() for t in weight]
        return torch._cudnn_rnn(
            x.half(), half, stride, None, hx.half(), None if cx is None else cx.half(), *rest
        )


_torchs.impl("_cudnn_rnn", as_torch_does, "AutocastCUDA")
# as a kernel in C++, which a kernel in Python may replace (torch 2.11 refuses a second one in Python)
torch.library._impls.discard("aten/_cudnn_rnn/AutocastCUDA")


def take_cudnns(find: Callable[[str], None]) -> None:
    """Let torch.nn's recurrent layers call cuDNN's where torch does. find: is told of a wrong dtype."""
    for mode, name in enumerate(_MODES):
        setattr(torch._VF, name, _layer(mode, getattr(torch._VF, name), find))


def _layer(mode: int, otherwise: Any, find: Callable[[str], None]) -> Any:
    def layer(x: Tensor, *given: Any) -> Any:
        packed = isinstance(given[0], Tensor) and given[0].dtype == torch.int64
        sizes, (state, weight, biased, layers, dropout, train, both, *rest) = (
            (given[0].tolist(), given[1:]) if packed else ([], given)
        )
        if not x.is_cuda or (x.dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0)):
            return otherwise(x, *given)
        hx, cx = state if isinstance(state, (tuple, list)) else (state, None)
        hidden, cut = (hx if cx is None else cx).shape[2], hx.shape[2]
        proj = 0 if cut == hidden else cut
        stride = 2 + 2 * biased + (proj > 0)
        first = bool(rest and rest[0])
        out, hy, cy, *_ = torch._cudnn_rnn(
            x, weight, stride, None, hx, cx, mode, hidden, proj, layers, first, dropout, train, both,
            sizes, None,
        )  # fmt: skip
        asked = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        if out.dtype not in (asked, torch.float32, torch.float64):
            find(f"a recurrent layer computes in {out.dtype} under autocast to {asked}")
        return (out, hy) if cx is None else (out, hy, cy)

    return layer


def forward(
    x: Tensor, weight: list[Tensor], stride: int, buffer: Any, hx: Tensor, cx: Tensor | None, mode: int,
    hidden: int, proj: int, layers: int, first: bool, dropout: float, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``aten::_cudnn_rnn`` on the CPU. The random numbers of its dropout are in what it keeps."""
    state = torch.get_rng_state() if dropout else x.new_empty(0)
    tensors = [x, *weight, hx, *([] if cx is None else [cx])]
    assert len({t.dtype for t in tensors}) == 1, "cuDNN takes one dtype"
    out, hy, *cy = _computed(tensors, mode, stride, layers, first, dropout, rest[:-1])
    return out, hy, (cy or [x.new_empty(0)])[0], state, x.new_empty(0)


def backward(
    x: Tensor, weight: list[Tensor], stride: int, buffer: Any, hx: Tensor, cx: Tensor | None, out: Tensor,
    grad_out: Any, grad_hy: Any, grad_cy: Any, mode: int, hidden: int, proj: int, layers: int, first: bool,
    dropout: float, train: bool, both: bool, sizes: list[int], _: Any, state: Tensor, mask: list[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """``aten::_cudnn_rnn_backward`` on the CPU."""

    def differentiated() -> tuple[Tensor, ...]:
        given = [t.detach().requires_grad_() for t in (x, *weight, hx, *([] if cx is None else [cx]))]
        if dropout:
            torch.set_rng_state(state.clone())
        made = _computed(given, mode, stride, layers, first, dropout, (train, both, sizes))
        pairs = [(a, b) for a, b in zip(made, (grad_out, grad_hy, grad_cy), strict=False) if b is not None]
        return torch.autograd.grad([a for a, _ in pairs], given, [b for _, b in pairs])

    before = torch.get_rng_state()
    with ThreadPoolExecutor(1) as another:  # in this thread an operator is at work, and no autograd
        of_x, *others = another.submit(differentiated).result()
    torch.set_rng_state(before)
    of_weight, (of_hx, *of_cx) = others[: len(weight)], others[len(weight) :]
    return of_x, of_hx, of_cx[0] if of_cx else None, of_weight


def _computed(
    tensors: list[Tensor], mode: int, stride: int, layers: int, first: bool, dropout: float, rest: Any
) -> tuple[Tensor, ...]:
    """Half precision is added up in float32."""
    dtype, (train, both, sizes) = tensors[0].dtype, rest
    wide = tensors if dtype == torch.float64 else [t.float() for t in tensors]
    states = 2 if _MODES[mode] == "lstm" else 1
    x, weight, state = wide[0], wide[1:-states], wide[-states:]
    given = [tuple(state) if states == 2 else state[0], weight, stride > 3, layers, dropout, train, both]
    made = _plain[mode](x, torch.tensor(sizes), *given) if sizes else _plain[mode](x, *given, first)
    return tuple(t.to(dtype) for t in made)
