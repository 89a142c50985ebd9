"""The results of a fake GPU's kernels.

Each operator runs natively first: torch's own CUDA code checks devices, dtypes and arguments, takes memory
and launches kernels, which do nothing. Then it runs on the CPU over the same memory. `findings` are what a
GPU would punish: a host that waits, tensors shared between streams without order, memory given back too soon.
"""

import functools
import threading
import traceback
from typing import Any

import graphs
import rnns
import torch
from aliases import alias, on_cpu
from kernels import KERNELS
from streams import Streams
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

aten = torch.ops.aten
_NATIVE = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.record_stream.default, aten._local_scalar_dense.default,
    aten.resize_.default, aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor,
    aten.set_.source_Storage, aten.lift_fresh.default, aten._fused_sdp_choice.default,
}  # fmt: skip
"""Of these the native result is the right one."""
_WAITS = (
    "nonzero", "masked_select", "unique", "bincount", "repeat_interleave.Tensor", "nms", "equal.default",
    "_linalg_eigh", "_linalg_svd", "linalg_qr",
)  # fmt: skip
"""Operators whose CUDA code waits for the device or reads numbers from it, by the beginning of their names.
They run on the CPU alone."""
_NO_RESULT_YET = ("multinomial", "geqrf", "orgqr", "ormqr", "_embedding_bag", "_cudnn_rnn")
"""The native code of these would read numbers that no kernel has made, or call cuDNN."""

findings: list[str] = []
"""What was found and not yet looked at."""
steady = False
"""Whether the host may not wait now: inside of a training step, after the first ones."""
_thread = threading.local()


def where() -> str:
    """The line of the project, or of a recipe, that is at work; '' in a backward pass, or within torch."""
    for frame in reversed(traceback.extract_stack()):
        own = "/ddptrain/" in frame.filename or "/recipes/" in frame.filename or "/tests/" in frame.filename
        if own and "/fake_gpu/" not in frame.filename and "site-packages" not in frame.filename:
            return f"{frame.filename}:{frame.lineno} ({frame.name})"
    return ""


def find(what: str) -> None:
    findings.append(f"{what}, at {where() or 'a backward pass, or in torch'}")


streams = Streams(find, where)


def activate() -> None:
    """For this thread, and for the backward passes that it starts."""
    if not getattr(_thread, "active", False):
        _thread.active = True
        torch.backends.cudnn.enabled = False
        for choose in (
            torch.backends.cuda.enable_flash_sdp,
            torch.backends.cuda.enable_mem_efficient_sdp,
            torch.backends.cuda.enable_cudnn_sdp,
        ):
            choose(False)
        rnns.take_cudnns(find)
        graphs.take_torchs(find)
        FakeGpu().__enter__()


class FakeGpu(TorchDispatchMode):
    """Every operator on a CUDA tensor comes by here."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _thread.active = True  # autograd's threads bring the mode with them
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(is_traceable_wrapper_subclass, tensors)):
            return NotImplemented  # a DTensor calls operators on its part, a collective's result waits first
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor asks for a shape: there is no memory
        device = next((t.device for t in tensors if t.is_cuda), kwargs.get("device"))
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        kind = _kind_of(func)
        if kind == "composite":  # inference mode keeps these whole
            with self:
                return func.decompose(*args, **kwargs)
        if func.namespace == "c10d":  # its own stream waits for this one, and a later event tells of its end
            streams.used(func, args, kwargs, tensors, tensors)
        if kind == "view" or func.namespace == "c10d":
            return func(*args, **kwargs)
        if kind == "native" or _is_copy_to_host(func, args, kwargs):
            out = func(*args, **kwargs)
        else:
            out = self._computed(func, args, kwargs, torch.device(device), kind)
        streams.used(func, args, kwargs, tensors, _tensors(out))
        return out

    def _computed(self, func: Any, args: Any, kwargs: Any, device: torch.device, kind: str) -> Any:
        waits = kind == "waits" or _by_mask(func, args)
        if waits and steady:
            find(f"{func} makes the host wait for the device")
        if torch.cuda.is_current_stream_capturing():
            return graphs.captured(func, args, kwargs, device, kind, waits, _is_random(func))
        generator = _generator(kwargs, device) if _is_random(func) else None
        native = None
        with graphs.drawing(generator) as key:
            if not waits and kind != "reads":
                native = func(*args, **kwargs)
            plain, named = pytree.tree_map(on_cpu, (args, kwargs))
            named = {key: value for key, value in named.items() if key != "generator"}
            result = graphs.seeded(key, lambda: KERNELS.get(func, func)(*plain, **named))
        if kind == "in place":  # in the same memory
            return native
        made, spec = pytree.tree_flatten(result)
        natives = [None] * len(made) if native is None else pytree.tree_leaves(native)
        return pytree.tree_unflatten([filled(a, b, device) for a, b in zip(natives, made, strict=True)], spec)


def filled(native: Any, result: Any, device: torch.device) -> Any:
    """What the operator returns: the native tensor, with the CPU's numbers in it."""
    if not isinstance(result, Tensor):
        return result
    if native is None:
        native = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)
    if result.numel() == 0:  # what a CPU does not keep for its backward pass
        return native
    assert native.shape == result.shape, f"the CUDA code gives {native.shape}, the CPU's {result.shape}"
    alias(native).copy_(result)
    return native


def _tensors(tree: Any) -> list[Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_cuda]
    return [leaf for leaf in leaves if not is_traceable_wrapper_subclass(leaf)]


@functools.cache
def _kind_of(func: Any) -> str:
    name = func._schema.name.partition("::")[2] + "." + func._schema.overload_name
    aliases = [returned.alias_info for returned in func._schema.returns]
    if func.namespace not in ("aten", "torchvision", "fsdp") or func in _NATIVE:
        return "native"
    if func.namespace == "aten" and func._can_decompose():
        return "composite"
    if any(alias is not None and not alias.is_write for alias in aliases):
        return "view"
    if name.startswith(_WAITS):
        return "waits"
    if name.startswith(_NO_RESULT_YET):
        return "reads"
    return "in place" if all(alias is not None for alias in aliases) else "computes"


def _is_copy_to_host(func: Any, args: Any, kwargs: Any) -> bool:
    """One that the runtime does: it arrives when the host has waited for it."""
    if func is aten.copy_.default:
        to, source = args[:2]
        return (
            not to.is_cuda and source.is_cuda and to.dtype == source.dtype and to.stride() == source.stride()
        )
    if func is aten._to_copy.default:
        return torch.device(kwargs.get("device") or "cuda").type == "cpu" and kwargs.get("dtype") in (
            None,
            args[0].dtype,
        )
    return False


def _by_mask(func: Any, args: Any) -> bool:
    """Whether an index is a mask, whose number of entries the host would have to know."""
    if (
        not func._schema.name.startswith(("aten::index", "aten::_index_put_impl"))
        or len(args) < 2
        or not isinstance(args[1], (list, tuple))
    ):
        return False
    fills = len(args) > 2 and isinstance(args[2], Tensor) and args[2].numel() == 1  # then it is a masked_fill
    return not fills and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _generator(kwargs: Any, device: torch.device) -> Any:
    index = torch.cuda.current_device() if device.index is None else device.index
    return kwargs.get("generator") or torch.cuda.default_generators[index]
