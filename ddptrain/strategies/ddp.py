"""DistributedDataParallel: a process for each rank; gradients are averaged during the backward pass."""

import logging
from collections.abc import Callable, Mapping
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
from ddptrain.strategies.powersgd import PowerSgd

log = logging.getLogger("ddptrain")

TORCHS_CAP_MB = 25.0
"""DDP's default. If it is passed explicitly, there is no small first bucket, which is sent early."""


@final
class Ddp(Strategy):
    """torch's DistributedDataParallel.

    bucket_cap_mb: most MB of gradients in one all-reduce. find_unused_parameters: look in each step for
    parameters without a gradient. compression: of gradients in the all-reduce: rounded, or as thin factors
    (arXiv 1905.13727) of ``powersgd_rank`` columns. sync_batchnorm: BatchNorm's statistics over all ranks, on
    GPUs.
    """

    takes_sparse_gradients = False

    def __init__(
        self,
        world: World,
        bucket_cap_mb: float = TORCHS_CAP_MB,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        compression: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 2,
        sync_batchnorm: bool = False,
    ) -> None:
        """Raises UserError for a value out of range."""
        super().__init__(world)
        if bucket_cap_mb <= 0:
            raise UserError(f"strategy.bucket_cap_mb={bucket_cap_mb:g}: must be above 0.")
        if powersgd_rank < 1:
            raise UserError(f"strategy.powersgd_rank={powersgd_rank}: must be at least 1.")
        self._bucket_cap_mb = bucket_cap_mb
        self._as_view = gradient_as_bucket_view
        self._static_graph = static_graph
        self._find_unused = find_unused_parameters
        self.needs_all_gradients = not (static_graph or find_unused_parameters)
        self._compression = compression
        self._powersgd_rank = powersgd_rank
        self._sync_batchnorm = sync_batchnorm
        self._powersgd: PowerSgd | None = None

    def check(self, compiled: bool) -> None:
        if not torch.distributed.is_initialized():
            raise UserError(
                "strategy=ddp: needs ranks, which torchrun starts:"
                " torchrun --standalone --nproc-per-node=2 -m ddptrain ..."
            )
        if self._sync_batchnorm and self.world.device.type != "cuda":
            raise UserError(
                "strategy.sync_batchnorm=true: PyTorch's SyncBatchNorm needs ddp on GPUs;"
                f" this is ddp on {self.world.device.type}."
            )

    def prepare(self, model: nn.Module) -> nn.Module:
        if not self._sync_batchnorm:
            return model
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted

    def wrap(self, model: nn.Module) -> nn.Module:
        on_gpu, cap = self.world.device.type == "cuda", self._bucket_cap_mb
        bucket = FlagBucket(model, in_graph=self._find_unused)
        self._flags = Flags(bucket.rank_flags, exact=self._compression in ("none", "powersgd"))
        with torch_private.wrapping():
            wrapped = DistributedDataParallel(
                bucket,
                device_ids=[self.world.device.index] if on_gpu else None,
                bucket_cap_mb=None if cap == TORCHS_CAP_MB else cap,
                gradient_as_bucket_view=self._as_view,
                static_graph=self._static_graph,
                find_unused_parameters=self._find_unused,
            )
        # in each step; the second is its name from torch 2.14 on, where the first is deprecated
        wrapped.broadcast_buffers = wrapped.forward_sync_buffers = not only_statistics(model)
        bucket.hidden()
        self._register_hook(wrapped, model)
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

    def rank_state(self) -> Mapping[str, Tensor]:
        return {} if self._powersgd is None else self._powersgd.rank_state()

    def load_rank_state(self, tensors: Mapping[str, Tensor]) -> None:
        if self._powersgd is not None:
            self._powersgd.load_rank_state(tensors)

    def scatter(self, ranks: Mapping[str, Tensor]) -> None:
        """Each rank gets its own errors back; on another number of ranks each gets the mean, which keeps the
        sum."""
        if self._powersgd is None:
            super().scatter(ranks)
            return
        saved = len(next(iter(ranks.values()))) if ranks else self.world.size
        if saved != self.world.size:
            log.info("note       powersgd: the errors of %d ranks are averaged over all ranks", saved)
        own = self.world.rank if saved == self.world.size else None
        self._powersgd.load_rank_state(
            {name: rows.mean(dim=0) if own is None else rows[own] for name, rows in ranks.items()}
        )

    def describe(self) -> str:
        return f"ddp over {backend_for(self.world)}"

    def _register_hook(self, wrapped: DistributedDataParallel, model: nn.Module) -> None:
        if self._compression == "powersgd":
            self._powersgd = PowerSgd(model, self._powersgd_rank, self.world.size, self._static_graph)
            wrapped.register_comm_hook(self._powersgd, PowerSgd.reduce)
        elif self._compression != "none":
            hook: Any = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
            wrapped.register_comm_hook(None, hook[self._compression])


def _ddp(wrapped: nn.Module) -> DistributedDataParallel:
    assert isinstance(wrapped, DistributedDataParallel)
    return wrapped


def _bucket(wrapped: nn.Module) -> FlagBucket:
    bucket = wrapped.module
    assert isinstance(bucket, FlagBucket)
    return bucket
