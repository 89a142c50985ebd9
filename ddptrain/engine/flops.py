"""FLOPs of a model, and peak FLOP/s of a device."""

import copy
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from ddptrain.torch_private import spare_dynamo_in

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

_TERA = 1e12
_PEAKS: dict[str, dict[str, float]] = {
    "GB200": {"fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500},
    "B200": {"fp32": 75, "tf32": 1100, "bf16": 2250, "fp16": 2250},
    "H200 NVL": {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5},
    "H200": {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    "H100 PCIe": {"fp32": 51, "tf32": 378, "bf16": 756, "fp16": 756},
    "H100 NVL": {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5},
    "H100": {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    "A100": {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
    "A40": {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7},
    "A30": {"fp32": 10.3, "tf32": 82, "bf16": 165, "fp16": 165},
    "A10": {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125},
    "L40S": {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362},
    "L4": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121},
    "T4": {"fp32": 8.1, "fp16": 65},
    "V100": {"fp32": 15.7, "fp16": 125},
}
"""TFLOP/s without sparsity, by NVIDIA's data sheets of these products."""
_SIDE = {"cuda": 4096, "cpu": 512}
_MEASURED_S = 0.02
"""For each kind of work: seven rounds on a core of 2024, more on anything faster."""


_counting: "list[FlopCounterMode]" = []


@contextmanager
def counter(device: torch.device) -> "Iterator[FlopCounterMode]":
    """Inside, forward and backward FLOPs on the device are counted.

    Recurrent layers' kernels too, which torch's own table leaves out; and a grouped convolution's weight
    gradient once, where torch 2.11 to 2.15 count it once for each group.
    """
    aten = torch.ops.aten
    mode = _flop_counter(device)(
        display=False,
        custom_mapping={
            aten.convolution_backward: _convolution_backward,
            aten.mkldnn_rnn_layer: _onednn_rnn,
            aten.mkldnn_rnn_layer_backward: _onednn_rnn_backward,
            aten._cudnn_rnn: _cudnn_rnn,
            aten._cudnn_rnn_backward: _cudnn_rnn_backward,
        },
    )
    _counting.append(mode)
    try:
        with mode:
            yield mode
    finally:
        _counting.remove(mode)


@contextmanager
def uncounted() -> "Iterator[None]":
    """Inside, nothing is: what is computed once more is no arithmetic of the model's (Chowdhery et al., arXiv
    2204.02311, appendix B)."""
    before = [copy.deepcopy(mode.flop_counts) for mode in _counting]
    try:
        yield
    finally:
        for mode, counts in zip(_counting, before, strict=True):
            mode.flop_counts = counts


def _flop_counter(device: torch.device) -> "type[FlopCounterMode]":
    """torch's. Its module imports triton, of 70 MB, for kernels that no CPU runs."""
    with _without("triton") if device.type == "cpu" else nullcontext():
        from torch.utils import flop_counter
    mode = getattr(flop_counter, "_FlopCounterMode", None)
    spare_dynamo_in(getattr(mode, "__torch_dispatch__", None))
    return flop_counter.FlopCounterMode


@contextmanager
def _without(package: str) -> Iterator[None]:
    """Inside, a package that is not imported yet can't be imported, and torch does not warn about it."""
    if package in sys.modules:
        yield
        return
    warnings = logging.getLogger("torch.utils.flop_counter")
    sys.modules[package] = None  # type: ignore[assignment]
    warnings.disabled = True
    try:
        yield
    finally:
        del sys.modules[package]
        warnings.disabled = False


def peak_flops(device: torch.device, precision: str) -> float:
    """FLOP/s of one device at a precision: from the table if the GPU is known, else measured. 0 for devices
    other than GPUs and CPUs."""
    if device.type == "cuda":
        known = known_peak(torch.cuda.get_device_name(device), precision)
        return known or _measured(device, precision)
    return _measured(device, precision) if device.type == "cpu" else 0.0


def known_peak(name: str, precision: str) -> float | None:
    """FLOP/s by the driver's name of the GPU; None if unknown, or for a MIG slice."""
    words = name.replace("-", " ").split()
    if "MIG" in words:
        return None
    for product, peaks in _PEAKS.items():
        if all(word in words for word in product.split()) and precision in peaks:
            return peaks[precision] * _TERA
    return None


@cache
def _measured(device: torch.device, precision: str) -> float:
    """The best of a few matrix products and convolutions (on some CPUs convolutions are more than twice as
    fast, by another library). Sync points."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    side = _SIDE[device.type]
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    pictures = torch.ones(16, 64, 28, 28, dtype=dtype, device=device)
    pictures = pictures.contiguous(memory_format=torch.channels_last)
    kernel = torch.ones(64, 64, 3, 3, dtype=dtype, device=device)
    works: list[tuple[int, Callable[[], Tensor]]] = [
        (2 * side**3, lambda: matrix @ matrix),
        (2 * pictures.numel() * kernel[0].numel(), lambda: conv2d(pictures, kernel, padding=1)),
    ]
    return max(flops / _fastest(work) for flops, work in works)


@torch.no_grad()
def _fastest(work: Callable[[], Tensor]) -> float:
    """Seconds."""
    best, spent = math.inf, 0.0
    while spent < _MEASURED_S:
        began = time.perf_counter()
        work().flatten()[0].item()
        seconds = time.perf_counter() - began
        best, spent = min(best, seconds), spent + seconds
    return best


def _convolution_backward(given: Any, pictures: Any, kernel: Any, *rest: Any, **__: Any) -> int:
    """Each of the gradients that are asked for costs what the forward pass does: two for each multiply-add
    of a kernel (of its group's channels) at each place."""
    *_, transposed, _padding, _groups, output_mask = rest
    places = pictures if transposed else given
    return int(2 * math.prod(places) * math.prod(kernel[1:]) * (output_mask[0] + output_mask[1]))


def _rnn(steps: Sequence[int], weights: Sequence[Sequence[int]]) -> int:
    """Two for each multiply-add of a step's (features,) with each weight matrix."""
    return 2 * math.prod(steps[:-1]) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def _onednn_rnn(steps: Any, input_weight: Any, hidden_weight: Any, *_: Any, **__: Any) -> int:
    return _rnn(steps, [input_weight, hidden_weight])


def _onednn_rnn_backward(steps: Any, input_weight: Any, hidden_weight: Any, *_: Any, **__: Any) -> int:
    return 2 * _rnn(steps, [input_weight, hidden_weight])


def _cudnn_rnn(steps: Any, weights: Any, *_: Any, **__: Any) -> int:
    return _rnn(steps, weights)


def _cudnn_rnn_backward(steps: Any, weights: Any, *_: Any, **__: Any) -> int:
    return 2 * _rnn(steps, weights)
