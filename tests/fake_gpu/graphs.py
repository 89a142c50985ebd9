"""CUDA graphs of a fake GPU. While a stream captures, nothing is computed: each operator is recorded with the
addresses of its tensors, and computed over them again at each replay, between the copies and collectives that
the runtime has recorded. So a replay reads what is in that memory then, whoever has it, and random numbers
follow from the generators' seeds of that moment.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from aliases import on_cpu, over_the_memory_of
from kernels import KERNELS
from torch import Tensor
from torch.utils import _pytree as pytree

_runtime = ctypes.CDLL(None)
_runtime.fake_gpu_last_graph.restype = ctypes.c_void_p


class _Kernel(NamedTuple):
    """An operator that was captured."""

    func: Any
    args: Any
    """On the CPU, over the memory of the device."""
    kwargs: Any
    out: list[Any] | None
    """What its results are copied to; None: they are in its arguments."""
    memory: list[tuple[int, int]]
    """The addresses of all of them, and their bytes."""
    generator: Any
    draw: int
    """How many random operators of this generator come before it in the graph."""
    grad: bool
    """Whether gradients were enabled: a CPU has another LSTM where they are not."""


_kernels: list[_Kernel] = []
"""Of all graphs."""
_draws: Counter[int] = Counter()
"""By generator, in the capture that goes on."""
_installed: dict[int, Any] = {}
"""The generator whose state each device's default one has now, if it is another's."""
_last: dict[int, tuple[bytes, int]] = {}
"""Of each generator, its state after the last random operator, and the number of that since it was seeded."""


class _DefaultGenerator:
    """A device's, which remembers whose state it has."""

    def __init__(self, index: int, own: torch.Generator) -> None:
        self._index = index
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def graphsafe_set_state(self, other: torch.Generator) -> Any:
        _installed[self._index] = other
        return self._own.graphsafe_set_state(other)


def take_torchs(find: Callable[[str], None]) -> None:
    """Let torch's graphs and default generators come by here. find: is told what is wrong."""
    graph = torch.cuda.CUDAGraph
    if hasattr(graph, "on_a_fake_gpu"):
        return
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay
    torch.cuda.default_generators = tuple(
        _DefaultGenerator(i, generator) for i, generator in enumerate(torch.cuda.default_generators)
    )

    def began(self: Any, *args: Any, **kwargs: Any) -> None:
        _draws.clear()
        self.first_kernel = len(_kernels)
        begin(self, *args, **kwargs)

    def ended(self: Any) -> None:
        end(self)
        self.on_a_fake_gpu = _runtime.fake_gpu_last_graph()
        self.kernels = _kernels[self.first_kernel :]

    def replayed(self: Any) -> None:
        seeds = {id(k.generator): _seed(k.generator) for k in self.kernels if k.generator is not None}
        replay(self)
        graph = ctypes.c_void_p(self.on_a_fake_gpu)
        for i in range(_runtime.fake_gpu_nodes(graph)):
            number = _runtime.fake_gpu_node(graph, i)
            if number >= 0:
                _run(_kernels[number], seeds, find)

    graph.capture_begin, graph.capture_end, graph.replay = began, ended, replayed
    graph.on_a_fake_gpu = None


def captured(
    func: Any, args: Any, kwargs: Any, device: torch.device, kind: str, waits: bool, random: bool
) -> Any:
    """The native result, whose numbers are made at each replay."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if waits:
        _runtime.fake_gpu_break_capture(stream)
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({func})")
    generator = None
    if random:
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = kwargs.get("generator") or _installed.get(index) or torch.cuda.default_generators[index]
    native = _shaped(func, args, kwargs, device) if kind == "reads" else func(*args, **kwargs)
    plain, named = pytree.tree_map(_baked, (args, {k: v for k, v in kwargs.items() if k != "generator"}))
    out = None if kind == "in place" else [on_cpu(leaf) for leaf in pytree.tree_leaves(native)]
    tensors = [t for t in pytree.tree_leaves((args, kwargs, native)) if isinstance(t, Tensor) and t.is_cuda]
    memory = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors]
    _runtime.fake_gpu_captured(stream, len(_kernels))
    _kernels.append(
        _Kernel(func, plain, named, out, memory, generator, _draws[id(generator)], torch.is_grad_enabled())
    )
    _draws[id(generator)] += 1
    return native


def _run(kernel: _Kernel, seeds: dict[int, tuple[bytes, int]], find: Callable[[str], None]) -> None:
    for address, size in kernel.memory:
        if size and not _runtime.fake_gpu_is_held(ctypes.c_void_p(address), ctypes.c_size_t(size)):
            find(f"{kernel.func} of a graph uses memory that was given back")
            return
    key = None
    if kernel.generator is not None:
        seed, first = seeds[id(kernel.generator)]
        key = seed, first + kernel.draw
    with torch.set_grad_enabled(kernel.grad), torch._C._AutoDispatchBelowAutograd():
        result = seeded(key, lambda: KERNELS.get(kernel.func, kernel.func)(*kernel.args, **kernel.kwargs))
        for to, value in zip(kernel.out or [], pytree.tree_leaves(result) if kernel.out else [], strict=True):
            if isinstance(to, Tensor) and isinstance(value, Tensor) and value.numel():
                to.copy_(value)


def _baked(leaf: Any) -> Any:
    """What a kernel is given: an address, or the number that the host has now."""
    if not isinstance(leaf, Tensor) or leaf.is_cuda:
        return on_cpu(leaf)
    if not leaf.is_pinned():
        return leaf.clone()
    return over_the_memory_of(leaf)


def _shaped(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Tensors as the operator returns, whose native code can't be run."""

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return on_cpu(leaf)
        return torch.full(leaf.size(), leaf.is_floating_point(), dtype=leaf.dtype)

    plain, named = pytree.tree_map(like, (args, {k: v for k, v in kwargs.items() if k != "generator"}))
    result = seeded((b"", 0), lambda: KERNELS.get(func, func)(*plain, **named))

    def on_device(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=device)

    return pytree.tree_map(on_device, result)


def _seed(generator: Any) -> tuple[bytes, int]:
    """And how far it has moved on since."""
    state = bytes(generator.get_state().tolist())
    return state[:8], int.from_bytes(state[8:], "little")


@contextmanager
def drawing(generator: Any) -> Iterator[tuple[bytes, int] | None]:
    """Around a random operator that is no part of a graph: its seed, and its number since then."""
    if generator is None:
        yield None
        return
    state = bytes(generator.get_state().tolist())
    after, number = _last.get(id(generator), (b"", 0))
    seed, moved = _seed(generator)
    number = 0 if not moved else number + 1 if state == after else moved
    yield seed, number
    _last[id(generator)] = bytes(generator.get_state().tolist()), number


def seeded(key: tuple[bytes, int] | None, compute: Callable[[], Any]) -> Any:
    """key: what random numbers follow from."""
    if key is None:
        return compute()
    before = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(hash(key))
        return compute()
    finally:
        torch.set_rng_state(before)
