"""DistributedDataParallel: a process for each rank; gradients are averaged during the backward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddptrain import torch_private
from ddptrain.api.strategy import Flags, Strategy
from ddptrain.api.world import World
from ddptrain.distributed.comm import backend_for, only_statistics
from ddptrain.errors import UserError
from ddptrain.strategies.flag_bucket import FlagBucket

TORCHS_CAP_MB = 25.0
"""DDP's default. If it is passed explicitly, there is no small first bucket, which is sent early."""


def no_sync_batchnorm(strategy: str, world: World) -> UserError:
    return UserError(
        "strategy.sync_batchnorm=true: PyTorch's SyncBatchNorm needs ddp on GPUs;"
        f" this is {strategy} on {world.device.type}."
    )


@final
class Ddp(Strategy):
    """torch's DistributedDataParallel.

    bucket_cap_mb: most MB of gradients in one all-reduce. find_unused_parameters: look in each step for
    parameters without a gradient. compression: what gradients are rounded to in the all-reduce.
    sync_batchnorm: BatchNorm's statistics over all ranks, on GPUs.
    """

    takes_sparse_gradients = False

    def __init__(
        self,
        world: World,
        bucket_cap_mb: float = TORCHS_CAP_MB,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        compression: Literal["none", "bf16", "fp16"] = "none",
        sync_batchnorm: bool = False,
    ) -> None:
        """Raises UserError for a value out of range."""
        super().__init__(world)
        if bucket_cap_mb <= 0:
            raise UserError(f"strategy.bucket_cap_mb={bucket_cap_mb:g}: must be above 0.")
        self._bucket_cap_mb = bucket_cap_mb
        self._as_view = gradient_as_bucket_view
        self._static_graph = static_graph
        self._find_unused = find_unused_parameters
        self.needs_all_gradients = not (static_graph or find_unused_parameters)
        self.times_waits = not sync_batchnorm
        if find_unused_parameters:
            self.why_not_captured = "strategy.find_unused_parameters looks on the host"
        elif sync_batchnorm:
            self.why_not_captured = "torch's SyncBatchNorm waits in each layer"
        self._compression = compression
        self._sync_batchnorm = sync_batchnorm

    def check(self, compiled: bool) -> None:
        if not torch.distributed.is_initialized():
            raise UserError(
                "strategy=ddp: needs ranks, which torchrun starts:"
                " torchrun --standalone --nproc-per-node=2 -m ddptrain ..."
            )
        if self._sync_batchnorm and self.world.device.type != "cuda":
            raise no_sync_batchnorm("ddp", self.world)

    def prepare(self, model: nn.Module) -> nn.Module:
        if not self._sync_batchnorm:
            return model
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted

    def wrap(self, model: nn.Module) -> nn.Module:
        on_gpu, cap = self.world.device.type == "cuda", self._bucket_cap_mb
        bucket = FlagBucket(model, in_graph=self._find_unused)
        self._flags = Flags(bucket.rank_flags, exact=self._compression == "none")
        with torch_private.sparing_dynamo():
            wrapped = DistributedDataParallel(
                bucket,
                device_ids=[self.world.device.index] if on_gpu else None,
                bucket_cap_mb=None if cap == TORCHS_CAP_MB else cap,
                gradient_as_bucket_view=self._as_view,
                static_graph=self._static_graph,
                find_unused_parameters=self._find_unused,
            )
        torch_private.never_time(wrapped)
        torch_private.lean_forward(wrapped)
        # in each step; the second is its name from torch 2.14 on, where the first is deprecated
        wrapped.broadcast_buffers = wrapped.forward_sync_buffers = not only_statistics(model)
        if wrapped.broadcast_buffers:
            torch_private.find_late_buffers(wrapped)
        bucket.hidden()
        self._register_hook(wrapped)
        return wrapped

    def accumulate(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else _ddp(wrapped).no_sync()

    @property
    def averages_over(self) -> int:
        return self.world.size

    def send_flags(
        self, wrapped: nn.Module, step: int, stop: bool, loss: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        return _bucket(wrapped).send(self.flags.row(step, stop, loss))

    def receive_flags(self, wrapped: nn.Module) -> Tensor | None:
        if self._static_graph and not torch_private.found_static_outputs(_ddp(wrapped)):
            raise UserError(
                "strategy.static_graph=true: torch finds no tensor with a gradient in what the model returns,"
                " and would send no gradients. Return a tensor, or a tuple, list or dict of tensors (no"
                " dataclass), or set strategy.static_graph=false."
            )
        return _bucket(wrapped).take()

    def warm_up_passes(self, compiled: bool) -> int:
        """DDP reorders its buckets after the first backward pass, under static_graph after the second. If
        those were real steps, a resumed run would sum in another order than an uninterrupted one."""
        return 2 if self._static_graph else 1

    def time_waits(self, wrapped: nn.Module, mark: Callable[[str], None]) -> None:
        _bucket(wrapped).mark_own_end(mark)
        if _ddp(wrapped).will_sync_module_buffers():
            # DDP broadcasts buffers before the model's own forward, and waits there for late ranks
            wrapped.register_forward_pre_hook(lambda *_: mark("forward"))
            _bucket(wrapped).register_forward_pre_hook(lambda *_: mark("all_reduce"))

    def describe(self) -> str:
        return f"ddp over {backend_for(self.world)}"

    def _register_hook(self, wrapped: DistributedDataParallel) -> None:
        hooks: Any = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
        if self._compression != "none":
            wrapped.register_comm_hook(None, hooks[self._compression])


def _ddp(wrapped: nn.Module) -> DistributedDataParallel:
    assert isinstance(wrapped, DistributedDataParallel)
    return wrapped


def _bucket(wrapped: nn.Module) -> FlagBucket:
    bucket = wrapped.module
    assert isinstance(bucket, FlagBucket)
    return bucket
