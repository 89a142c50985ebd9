"""How one model is spread over devices: single, dp, ddp (and strict, in its own file). Another strategy is
another class."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddptrain.config.schema import Strategy as StrategyConfig
from ddptrain.distributed import eager
from ddptrain.distributed.ballot import WithBallot
from ddptrain.distributed.comm import backend_for
from ddptrain.distributed.powersgd import PowerSgd
from ddptrain.distributed.world import World

log = logging.getLogger("ddptrain")

_NOTHING: AbstractContextManager[None] = nullcontext()
TORCHS_CAP_MB = 25.0
"""Of DDP's buckets by default. Given explicitly, there is no small first bucket, which is sent early."""
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Strategy(ABC):
    """Wraps a model for training and says when its gradients are summed over ranks."""

    @abstractmethod
    def prepare(self, model: nn.Module) -> nn.Module:
        """Change the model itself, before it is compiled and wrapped (SyncBatchNorm)."""

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call in training; the model keeps the weights and the checkpoints."""

    @abstractmethod
    def sync(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; only the ``last`` one may communicate."""

    def ballot(self, wrapped: nn.Module) -> WithBallot | None:
        """Where the ranks' votes travel with the gradients; None for a process by itself."""
        return None

    @property
    def further_gpus(self) -> Sequence[int]:
        """Indexes of the GPUs that this process computes on beside its own."""
        return ()

    def carried(self) -> Mapping[str, Tensor]:
        """What this rank carries from step to step: gradients that it has not sent yet. Never changed in
        place."""
        return {}

    def carry_on(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `carried` has returned at a step, in this process."""
        assert not tensors, "a strategy that carries something has to implement carry_on"

    def hand_out(self, ranks: Mapping[str, Tensor]) -> None:
        """Go on from what all ranks carried at a save: their values of each tensor, stacked."""
        if ranks:
            log.info("note       what strategy.compression=powersgd had not sent yet is dropped")

    @property
    def averages_over(self) -> int:
        """What the sum of the ranks' gradients is divided by."""
        return 1

    @abstractmethod
    def describe(self) -> str:
        """One line for the log."""


@final
class Single(Strategy):
    """One process, one device."""

    def prepare(self, model: nn.Module) -> nn.Module:
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def sync(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        return _NOTHING

    def describe(self) -> str:
        return "single"


@final
class DataParallel(Strategy):
    """One process, all GPUs by threads (torch.nn.DataParallel). home: the GPU that keeps the weights."""

    def __init__(self, home: torch.device) -> None:
        self._home = home

    @property
    def further_gpus(self) -> Sequence[int]:
        return [i for i in range(torch.cuda.device_count()) if i != self._home.index]

    def prepare(self, model: nn.Module) -> nn.Module:
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        return _Replicated(model, device_ids=[self._home, *self.further_gpus])

    def sync(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        return _NOTHING

    def describe(self) -> str:
        return (
            "dp (one process copies the model to every GPU in every step and its threads share one"
            " interpreter; ddp has neither cost: torchrun --standalone --nproc-per-node=gpu -m ddptrain ...)"
        )


@final
class _Replicated(nn.DataParallel[nn.Module]):
    """torch's (2.11 to 2.15) takes autocast into its threads without the dtype: there bf16 would be fp16."""

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        calls: list[Any] = [torch.autocast("cuda", dtype, enabled)(replica.__call__) for replica in replicas]
        return super().parallel_apply(calls, inputs, kwargs)


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
                WithBallot(model, exact=self._config.compression in ("none", "powersgd")),
                device_ids=[self._world.device.index] if on_gpu else None,
                bucket_cap_mb=None if cap == TORCHS_CAP_MB else cap,
                gradient_as_bucket_view=self._config.gradient_as_bucket_view,
                static_graph=self._config.static_graph,
            )
        wrapped.broadcast_buffers = not _only_statistics(model)  # in each step; it has done so once
        self.ballot(wrapped).hidden()
        self._register_hook(wrapped, model)
        return wrapped

    def sync(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        if last:
            return _NOTHING
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()

    def ballot(self, wrapped: nn.Module) -> WithBallot:
        ballot = wrapped.module
        assert isinstance(ballot, WithBallot)
        return ballot

    def carried(self) -> Mapping[str, Tensor]:
        return {} if self._powersgd is None else self._powersgd.carried()

    def carry_on(self, tensors: Mapping[str, Tensor]) -> None:
        if self._powersgd is not None:
            self._powersgd.carry_on(tensors)

    def hand_out(self, ranks: Mapping[str, Tensor]) -> None:
        """Each rank gets its own back; on another number of ranks each gets the mean, so that their sum,
        and with it the training, lacks nothing."""
        if self._powersgd is None:
            super().hand_out(ranks)
            return
        saved = len(next(iter(ranks.values()))) if ranks else self._world.size
        if saved != self._world.size:
            log.info("note       powersgd: what %d ranks had not sent yet is spread over all", saved)
        own = self._world.rank if saved == self._world.size else None
        self._powersgd.carry_on(
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
