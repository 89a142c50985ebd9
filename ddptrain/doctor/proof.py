"""Does a device compute, and compute right? Shown by doing it. Imports torch."""

import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.cuda import nccl
from torch.nn.functional import conv2d

from ddptrain.doctor.facts import Link, Proof

_ROWS, _INNER = 256, 512
_SUMS = 4  # Times the bound of a sum by rounding: tensor cores cut where others round
_TRANSFORMS = 16
"""Roundings of a typical sum to the type: a convolution by Winograd's way adds before it multiplies."""
_LINK_BYTES = 64 * 2**20


def devices(requested: str, count: int) -> list[str]:
    """What to prove, where there are so many GPUs that start."""
    if requested == "cpu" or (requested == "auto" and not count):
        return ["cpu"]
    gpus = [f"cuda:{index}" for index in range(count)]
    return [name for name in gpus if requested in ("auto", "cuda", name)]


def prove(device: str) -> Iterator[Proof]:
    """A product, a convolution and a training step, in each type of numbers."""
    os.environ.pop("NVIDIA_TF32_OVERRIDE", None)  # would round what the bounds take for float32
    torch.manual_seed(0)  # on data that is the same each time
    where = torch.device(device)
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if where.type == "cuda":
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False  # sums in float32, again
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        if torch.cuda.get_device_capability(where) < (8, 0):
            yield Proof("training step", device, "bf16", False, "came with sm_80", lacks=True)
            del types["bf16"]
    for name, dtype in types.items():
        yield from _in_type(where, name, dtype)
    if where.type == "cuda":
        yield _nms(where)


def _in_type(device: torch.device, name: str, dtype: torch.dtype) -> Iterator[Proof]:
    for what, work in (("matrix product", _product), ("convolution", _convolution), ("training step", _step)):
        try:
            ok, said = work(device, dtype)
            yield Proof(what, str(device), name, ok, said)
        except (RuntimeError, AssertionError) as error:
            lacks = dtype != torch.float32 and "not implemented" in str(error)
            yield Proof(what, str(device), name, False, str(error).splitlines()[0], lacks)


def _product(device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    left, right = torch.randn(_ROWS, _INNER), torch.randn(_INNER, _ROWS)
    return _compare(lambda a, b: a @ b, left, right, (_INNER, 0), device, dtype)


def _convolution(device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    pictures, kernels = torch.randn(4, 32, 16, 16), torch.randn(32, 32, 3, 3)
    return _compare(
        lambda a, b: conv2d(a, b, padding=1), pictures, kernels, (32 * 9, _TRANSFORMS), device, dtype
    )


def _compare(
    work: Any,
    left: Tensor,
    right: Tensor,
    roundings: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[bool, str]:
    """Sums of products on the device against float64 on the CPU, from the same rounded numbers.

    A device multiplies exactly and adds n of them in float32, with an error below n u32 sum |a b|,
    u32 = 2^-24; then it rounds to its own type: u |result|, u half of its eps. Both doubled or more, against
    chance; k roundings on the way, each u sqrt(sum (a b)^2). A lost or a foreign term is far above.

    roundings: n, k.
    """
    a, b = left.to(dtype), right.to(dtype)
    result = work(a.to(device), b.to(device))
    if result.device.type != device.type or result.dtype != dtype:
        return False, f"came out on {result.device} in {result.dtype}"
    a, b, eps = a.double(), b.double(), torch.finfo(dtype).eps
    right_one, size, typical = work(a, b), work(a.abs(), b.abs()), work(a * a, b * b).sqrt()
    terms, on_the_way = roundings
    bound = _SUMS * terms * 2.0**-24 * size + eps * right_one.abs() + on_the_way * eps / 2 * typical
    share = float(((result.cpu().double() - right_one).abs() / bound).max())
    return share <= 1.0, f"error {share:.2g} of its bound"


def _step(device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    """Steps of a small network, under autocast where ``dtype`` is not float32: where are its numbers, and
    does the loss fall?"""
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)
    )
    net = net.to(device)
    activations: list[Tensor] = []
    for layer in net:
        layer.register_forward_hook(lambda _, __, output: activations.append(output))
    pictures, labels = torch.randn(16, 3, 16, 16).to(device), torch.arange(16).remainder(10).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=128.0, enabled=dtype == torch.float16)
    losses = []
    for _ in range(2):
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss = nn.functional.cross_entropy(net(pictures).float(), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    strays = {
        str(t.device) for t in (*net.parameters(), *gradients, *activations) if t.device.type != device.type
    }
    if strays or len(gradients) != len(list(net.parameters())):
        return (
            False,
            f"parameters, gradients or activations on {', '.join(sorted(strays)) or 'no device at all'}",
        )
    if activations[0].dtype != dtype:
        return False, f"autocast asked for {dtype}, and the convolution gave {activations[0].dtype}"
    return losses[1] < losses[0], f"loss {losses[0]:.3f} to {losses[1]:.3f}, all numbers on the device"


def _nms(device: torch.device) -> Proof:
    """torchvision's own operators have code for the device or not, whatever PyTorch has."""
    try:
        from torchvision.ops import nms

        kept = nms(torch.tensor([[0.0, 0.0, 9.0, 9.0]], device=device), torch.ones(1, device=device), 0.5)
        return Proof(
            "nms", str(device), "fp32", kept.device.type == device.type, "torchvision's own operator"
        )
    except ImportError:  # a finding of its own
        return Proof("nms", str(device), "fp32", False, "no torchvision", lacks=True)
    except (RuntimeError, AttributeError) as error:
        mismatched = "does not exist" in str(error)  # that too
        return Proof("nms", str(device), "fp32", False, str(error).splitlines()[0], lacks=mismatched)


def between_gpus(count: int) -> Iterator[Link]:
    """A real all-reduce by NCCL over each pair of GPUs here, then over all, from this one process."""
    groups = [*itertools.combinations(range(count), 2), *([tuple(range(count))] if count > 2 else [])]
    for group in groups:
        members = tuple(f"cuda:{index}" for index in group)
        try:
            yield Link(members, _LINK_BYTES / 1e6, _measure_speed(group))
        except RuntimeError as error:
            yield Link(members, _LINK_BYTES / 1e6, 0.0, str(error).splitlines()[0])


def _measure_speed(group: tuple[int, ...], rounds: int = 5) -> float:
    """GB/s of each GPU and direction. Raises RuntimeError where the sum is wrong."""
    tensors = [
        torch.full((_LINK_BYTES // 4,), 1.0 + place, device=f"cuda:{gpu}") for place, gpu in enumerate(group)
    ]
    nccl.all_reduce(tensors)  # the first makes the connections
    right = sum(1.0 + place for place in range(len(group)))
    if not all(bool((tensor == right).all()) for tensor in tensors):
        raise RuntimeError("the sum is wrong")
    _wait(group)
    began = time.perf_counter()
    for _ in range(rounds):
        nccl.all_reduce(tensors)
    _wait(group)
    return bandwidth(_LINK_BYTES * rounds, len(group), time.perf_counter() - began)


def bandwidth(size: int, members: int, seconds: float) -> float:
    """GB/s that each member sends: an all-reduce moves 2 (n-1)/n of its bytes out of each."""
    return 2 * (members - 1) / members * size / seconds / 1e9


def _wait(group: tuple[int, ...]) -> None:
    for gpu in group:
        torch.cuda.synchronize(gpu)
