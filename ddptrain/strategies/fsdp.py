"""Fully sharded data parallel: each rank keeps its part of every weight, gradient and optimizer state.

torch's FSDP2: Zhao et al., "PyTorch FSDP", VLDB 2023 (arXiv 2304.11277), for each parameter by itself. A
block's weights are gathered for its forward pass, and again for its backward pass, after which its gradients
are summed and scattered.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, empty
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_map_only

from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World
from ddptrain.distributed.comm import START_TIMEOUT, broadcast, from_all_ranks, only_statistics
from ddptrain.distributed.device import has_bf16
from ddptrain.distributed.foreach import mapped
from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean

log = logging.getLogger("ddptrain")
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
class Fsdp(Strategy):
    """torch's ``fully_shard``.

    wrap: name patterns of the modules that are gathered one at a time (of nested ones the outermost); None:
    the repeated children of each `nn.Sequential` and `nn.ModuleList`. reshard_after_forward: free a block's
    weights between its forward and its backward pass; else they are gathered once a pass, for more memory.
    shard_over: all ranks, or those of a node, with replicas over nodes (HSDP). gather: the precision in which
    float32 weights are sent and used, but for blocks with BatchNorm; gradients are summed in float32.
    whole_checkpoint_gb: of a model with more GB of weights each rank writes its part of a checkpoint.
    """

    sharded = True
    takes_sparse_gradients = False
    needs_all_gradients = True
    why_not_captured = "fsdp gathers weights on streams of its own"

    def __init__(
        self,
        world: World,
        wrap: Sequence[str] | None = None,
        reshard_after_forward: bool = True,
        shard_over: Literal["world", "node"] = "world",
        gather: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "fp32",
        whole_checkpoint_gb: float = 4.0,
    ) -> None:
        super().__init__(world)
        self._patterns = wrap
        self._reshard = reshard_after_forward
        self._shard_over = shard_over
        self._gather = gather
        self._whole_bytes = whole_checkpoint_gb * 1e9
        self._gathers_checkpoints = True
        self._mesh: DeviceMesh | None = None
        self._syncs = True
        self._buffers_are_due = True

    def check(self, compiled: bool) -> None:
        if not dist.is_initialized():
            raise UserError(
                "strategy=fsdp: needs ranks, which torchrun starts:"
                " torchrun --standalone --nproc-per-node=2 -m ddptrain ..."
            )
        if self.world.shares_device:
            raise UserError("strategy=fsdp: needs a GPU for each rank. Start fewer ranks, or use ddp.")
        if self._shard_over == "node" and len(set(from_all_ranks(self.world, self.world.local_size))) > 1:
            raise UserError("strategy.shard_over=node: needs nodes with equally many ranks.")

    def prepare(self, model: nn.Module) -> nn.Module:
        """``fully_shard`` takes contiguous parameters only: of channels_last the activations' half stays."""
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        return model

    def compiled_parts(self, model: nn.Module) -> Sequence[nn.Module]:
        """The blocks: the graph of the whole model would break at each of them, and those of equal blocks are
        one."""
        return self._blocks(model) or [model]

    def wrap(self, model: nn.Module) -> nn.Module:
        if isinstance(model, FSDPModule):  # thawed: the parts stay
            return model
        _check_parameters(model)
        chosen = set(self._blocks(model))
        blocks = {name: module for name, module in model.named_modules() if module in chosen}
        shown = ", ".join([*list(blocks)[:4], *(["..."] if len(blocks) > 4 else [])])
        log.info("blocks     %d gathered one at a time, the rest at once: %s", len(blocks), shown or "all")
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        self._mesh, self._gathers_checkpoints = self._create_mesh(), weights <= self._whole_bytes
        for module in model.modules():  # optim.layer_decay asks for the class as it is written
            vars(module).setdefault("written_as", getattr(module, "written_as", type(module)))
        buffers = model.named_buffers(remove_duplicate=False)
        broadcast(self.world, _replaced(model, buffers, self._on_device))
        for block in blocks.values():
            self._shard(block, self._reshard)
        self._shard(model, None if self._reshard else False)
        _prefetch(model, list(blocks.values()))
        if not only_statistics(model):
            model.register_forward_pre_hook(self._same_buffers)
        return model

    def accumulate(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        if self._syncs:  # the pass before was the last of its step: this one is the first of another
            self._buffers_are_due = True
        if last != self._syncs:
            assert isinstance(wrapped, FSDPModule)
            wrapped.set_requires_gradient_sync(last)
            self._syncs = last
        return nullcontext()

    @property
    def averages_over(self) -> int:
        return self.world.size

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        norm = super().clip(model, max_norm)
        assert isinstance(norm, DTensor)
        return norm.full_tensor()

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def add_up_nonfinite(self, nonfinite: Tensor) -> None:
        dist.all_reduce(nonfinite, dist.ReduceOp.MAX)

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """The weights are gathered once, so that ranks may call any part of the model, any number of
        times."""
        gathered = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in gathered:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in gathered:
                module.reshard()
                module.set_reshard_after_forward(self._reshard and module is not model, recurse=False)

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        if not self._gathers_checkpoints:
            return state
        whole: dict[str, Any] = mapped(state, self._on_first)
        return whole

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        assert self._mesh is not None
        placements = [Replicate()] * (self._mesh.ndim - 1) + [Shard(0)]
        return empty(shape, dtype=dtype, device_mesh=self._mesh, placements=placements)

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        if isinstance(whole, DTensor) or not isinstance(like, DTensor):
            return whole
        value = whole.to(like.device, like.dtype)
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)

    def describe(self) -> str:
        return {"world": "fsdp", "node": "hsdp"}[self._shard_over]

    def _shard(self, block: nn.Module, reshard: bool | None) -> None:
        """Cut the first rank's parameters of a block, but for those that are cut already. A collective."""
        named = block.named_parameters(remove_duplicate=False)
        uncut = [(path, parameter) for path, parameter in named if not isinstance(parameter, DTensor)]
        for parameter in _replaced(block, uncut, self._parameter_on_device):
            dist.broadcast(parameter.detach(), src=0)  # one by one: packed, they would be held twice
        owners = {block.get_submodule(path.rpartition(".")[0]) for path, _ in uncut}
        # BatchNorm takes no weights of another dtype than its statistics', spectral norm than its vectors'
        in_own_dtype = any(isinstance(owner, _BatchNorm | ParametrizationList) for owner in owners)
        dtype = None if in_own_dtype else self._gathered_as(next(block.parameters()).dtype)
        sums = None if dtype is None else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=sums)
        # not compiled: the outputs of a graph would be views again
        block.register_forward_hook(torch.compiler.disable(_no_views))
        fully_shard(block, mesh=self._mesh, reshard_after_forward=reshard, mp_policy=policy)

    def _gathered_as(self, dtype: torch.dtype) -> torch.dtype | None:
        """What parameters of ``dtype`` are cast to; None: they stay as they are."""
        device, name = self.world.device, self._gather
        if name == "auto":
            name = "bf16" if device.type == "cuda" and has_bf16(device) else "fp32"
        return _HALF.get(name) if dtype == torch.float32 else None

    def _parameter_on_device(self, parameter: Tensor) -> Tensor:
        new = nn.Parameter(self._on_device(parameter.detach()), parameter.requires_grad)
        vars(new).update(vars(parameter))
        return new

    def _on_device(self, tensor: Tensor) -> Tensor:
        device = self.world.device
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    def _create_mesh(self) -> DeviceMesh:
        world, kind = self.world, self.world.device.type
        if self._shard_over == "world":
            return init_device_mesh(kind, (world.size,))
        nodes = torch.arange(world.size).view(-1, world.local_size)
        # groups that a mesh makes by itself wait ten minutes under NCCL, less than an evaluation may take
        groups = [_group(nodes.t().tolist()), _group(nodes.tolist())]
        return DeviceMesh.from_group(groups, kind, nodes, mesh_dim_names=("replicate", "shard"))

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        if self._patterns is None:
            return [block for block in _repeated(model) if not _shares(block, model)]
        called = [name for name, module in model.named_modules() if name and _is_called(module)]
        names: list[str] = []
        for pattern in self._patterns:
            matching = [name for name in called if fnmatchcase(name, pattern)]
            if not matching:
                hint = did_you_mean(pattern, called) or f" There are {', '.join(called[:4])}, ..."
                raise UserError(f"strategy.wrap: {pattern} matches the name of no module.{hint}")
            names += matching
        outermost = [name for name in names if not any(name.startswith(f"{above}.") for above in names)]
        chosen = {name: model.get_submodule(name) for name in outermost}
        for name, block in chosen.items():
            if _shares(block, model):
                raise UserError(f"strategy.wrap: {name} has a parameter that is used outside, too. Leave it.")
        return list(chosen.values())

    def _same_buffers(self, model: nn.Module, _: Any) -> None:
        """As DDP does, before the first forward pass of a step. Collectives."""
        if torch.is_grad_enabled() and self._buffers_are_due:
            broadcast(self.world, model.buffers())
            self._buffers_are_due = False  # a loss may call the model again, while autograd holds them

    def _on_first(self, value: Any) -> Any:
        """A DTensor complete on rank 0, on the CPU. A collective."""
        if not isinstance(value, DTensor):
            return value
        whole = value.full_tensor()
        return whole.cpu() if self.world.is_first else whole.new_empty(0)


@final
class _NoView(torch.autograd.Function):
    """The same memory and version, as a tensor of its own."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def _no_views(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    """Outputs to which the loss or the next block may write in place (``x += y``). FSDP gathers and scatters
    in hooks of the outputs, and autograd forgets those of a view that is written to: what a linear layer with
    a bias gives for three dimensions is one. (torch 2.14 warns of every view.)"""
    if not torch.is_grad_enabled():
        return outputs
    return tree_map_only(Tensor, lambda x: _NoView.apply(x) if x.requires_grad else x, outputs)


def _replaced(
    model: nn.Module, named: Iterable[tuple[str, Tensor]], new_one: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Put another tensor in the place of each, under all of its names. Returns the new ones."""
    new: dict[Tensor, Tensor] = {}
    for path, tensor in list(named):
        if tensor not in new:
            new[tensor] = new_one(tensor)
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, new[tensor])
    return list(new.values())


def _group(ranks: list[list[int]]) -> dist.ProcessGroup:
    """This rank's, of groups that are all ranks together. A collective."""
    if len(ranks) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    own, _ = dist.new_subgroups_by_enumeration(ranks, timeout=START_TIMEOUT)
    assert isinstance(own, dist.ProcessGroup)
    return own


def _prefetch(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Let each block's backward pass gather the one before it. By default FSDP takes the order of all forward
    passes since the last backward pass (torch 2.11 to 2.15), and ranks differ in those of an evaluation."""
    in_turn = [module for module in (model, *blocks, model) if isinstance(module, FSDPModule)]
    for module, after in pairwise(in_turn):
        after.set_modules_to_backward_prefetch([module])


def _check_parameters(model: nn.Module) -> None:
    """Raise UserError for what ``fully_shard`` refuses, or trains wrongly without an error (torch 2.15)."""
    parameters = dict(model.named_parameters())
    common = next(iter(parameters.values())).dtype
    for name, parameter in parameters.items():
        kinds = {
            "is 0-d": parameter.ndim == 0,
            "has no elements": not parameter.numel(),
            f"is of {parameter.dtype}": not parameter.is_floating_point() or parameter.dtype != common,
        }
        if problem := next((words for words, is_so in kinds.items() if is_so), None):
            raise UserError(
                f"strategy=fsdp: parameter {name} {problem}, and torch's FSDP cuts real ones of one dtype"
                " with at least one dimension and one element. Change the model, or use strategy=ddp."
            )


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a list that are of one kind and made of layers themselves, the outermost ones."""
    children = list(module.children())
    kinds = [getattr(child, "written_as", type(child)) for child in children]  # train.recompute has others
    for child, kind in zip(children, kinds, strict=True):
        is_list = isinstance(module, nn.Sequential | nn.ModuleList)
        is_block = is_list and kinds.count(kind) > 1 and any(True for _ in child.children())
        if is_block and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _repeated(child)


def _is_called(module: nn.Module) -> bool:
    """It has parameters, and is no `nn.ModuleList`."""
    return type(module).forward is not nn.Module.forward and any(True for _ in module.parameters())


def _shares(block: nn.Module, model: nn.Module) -> bool:
    """Whether a parameter of a block is used outside of it too."""
    own, inside = set(block.parameters()), set(block.modules())
    outside = (module for module in model.modules() if module not in inside)
    return any(p in own for module in outside for p in module.parameters(recurse=False))
