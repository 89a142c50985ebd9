"""A process for each rank; gradients are averaged over all of them during the backward pass."""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World
from ddptrain.config.schema import Strategy as StrategyConfig
from ddptrain.distributed import eager
from ddptrain.distributed.comm import backend_for
from ddptrain.strategies.flag_bucket import FlagBucket
from ddptrain.strategies.powersgd import PowerSgd

log = logging.getLogger("ddptrain")

_NOTHING: AbstractContextManager[None] = nullcontext()
TORCHS_CAP_MB = 25.0
"""Of DDP's buckets by default. Given explicitly, there is no small first bucket, which is sent early."""
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@final
class Ddp(Strategy):
    """One process a rank (DistributedDataParallel); gradients are averaged while backward runs."""

    def __init__(self, config: StrategyConfig, world: World) -> None:
        self._config = config
        self._world = world
        self._powersgd: PowerSgd | None = None

    def prepare(self, model: nn.Module) -> nn.Module:
        if not self._config.sync_batchnorm:
            return model
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted

    def wrap(self, model: nn.Module) -> nn.Module:
        on_gpu, cap = self._world.device.type == "cuda", self._config.bucket_cap_mb
        with eager.wrapping():
            wrapped = DistributedDataParallel(
                FlagBucket(model, exact=self._config.compression in ("none", "powersgd")),
                device_ids=[self._world.device.index] if on_gpu else None,
                bucket_cap_mb=None if cap == TORCHS_CAP_MB else cap,
                gradient_as_bucket_view=self._config.gradient_as_bucket_view,
                static_graph=self._config.static_graph,
            )
        wrapped.broadcast_buffers = not _only_statistics(model)  # in each step; it has done so once
        self.flag_bucket(wrapped).hidden()
        self._register_hook(wrapped, model)
        return wrapped

    def sync(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        if last:
            return _NOTHING
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()

    def flag_bucket(self, wrapped: nn.Module) -> FlagBucket:
        flag_bucket = wrapped.module
        assert isinstance(flag_bucket, FlagBucket)
        return flag_bucket

    def rank_state(self) -> Mapping[str, Tensor]:
        return {} if self._powersgd is None else self._powersgd.rank_state()

    def load_rank_state(self, tensors: Mapping[str, Tensor]) -> None:
        if self._powersgd is not None:
            self._powersgd.load_rank_state(tensors)

    def scatter(self, ranks: Mapping[str, Tensor]) -> None:
        """Each rank gets its own back; on another number of ranks each gets the mean, so that their sum,
        and with it the training, lacks nothing."""
        if self._powersgd is None:
            super().scatter(ranks)
            return
        saved = len(next(iter(ranks.values()))) if ranks else self._world.size
        if saved != self._world.size:
            log.info("note       powersgd: what %d ranks had not sent yet is spread over all", saved)
        own = self._world.rank if saved == self._world.size else None
        self._powersgd.load_rank_state(
            {name: rows.mean(dim=0) if own is None else rows[own] for name, rows in ranks.items()}
        )

    @property
    def averages_over(self) -> int:
        return self._world.size

    def describe(self) -> str:
        return f"ddp over {backend_for(self._world)}"

    def _register_hook(self, wrapped: DistributedDataParallel, model: nn.Module) -> None:
        config = self._config
        if config.compression == "powersgd":
            self._powersgd = PowerSgd(model, config.powersgd_rank, self._world.size, config.static_graph)
            wrapped.register_comm_hook(self._powersgd, PowerSgd.reduce)
        elif config.compression != "none":
            hook: Any = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
            wrapped.register_comm_hook(None, hook[config.compression])


def _only_statistics(model: nn.Module) -> bool:
    """Whether all buffers are BatchNorm's. Its forward pass in training reads none of them, so each rank may
    have its own until they are used: evaluation and checkpoints take rank 0's, which are the same as if DDP
    had broadcast them in each step (of a MobileNetV3 some 100 small copies)."""
    owners = [layer for layer in model.modules() if any(True for _ in layer.buffers(recurse=False))]
    return all(type(layer) in _NORMS for layer in owners)
