"""How one model is spread over devices: single, dp, ddp. Another strategy is another class."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddptrain.config.schema import Strategy as StrategyConfig
from ddptrain.distributed.comm import backend_for
from ddptrain.distributed.world import World
from ddptrain.errors import UserError

_NOTHING: AbstractContextManager[None] = nullcontext()


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
    """One process, all GPUs by threads (torch.nn.DataParallel)."""

    def prepare(self, model: nn.Module) -> nn.Module:
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        home = next(model.parameters()).device
        if home.type != "cuda":
            return nn.DataParallel(model)  # passes through
        others = [i for i in range(torch.cuda.device_count()) if i != home.index]
        return nn.DataParallel(model, device_ids=[home.index, *others])

    def sync(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        return _NOTHING

    def describe(self) -> str:
        if not torch.cuda.is_available():
            return "dp (without GPUs there is nothing to spread over: it trains like single)"
        return (
            "dp (one process copies the model to every GPU in every step and its threads share one"
            " interpreter; ddp has neither cost: torchrun --standalone --nproc-per-node=gpu -m ddptrain ...)"
        )


@final
class Ddp(Strategy):
    """One process a rank (DistributedDataParallel); gradients are averaged while backward runs."""

    def __init__(self, config: StrategyConfig, world: World) -> None:
        self._config = config
        self._world = world

    def prepare(self, model: nn.Module) -> nn.Module:
        if not self._config.sync_batchnorm:
            return model
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted

    def wrap(self, model: nn.Module) -> nn.Module:
        on_gpu = self._world.device.type == "cuda"
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self._world.device.index] if on_gpu else None,
            bucket_cap_mb=self._config.bucket_cap_mb,
            gradient_as_bucket_view=self._config.gradient_as_bucket_view,
            static_graph=self._config.static_graph,
        )
        if self._config.compression != "none":
            hook: Any = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
            wrapped.register_comm_hook(None, hook[self._config.compression])
        return wrapped

    def sync(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        if last:
            return _NOTHING
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()

    def describe(self) -> str:
        return f"ddp over {backend_for(self._world)}"


def choose_strategy(config: StrategyConfig, world: World, compiled: bool = False) -> Strategy:
    """The strategy for ``strategy=...`` in this world, for a model that is ``compiled`` or not.

    Raises UserError where the two do not go together.
    """
    name = config.name
    if name == "auto":
        name = "ddp" if world.size > 1 else "single"
    if name in ("single", "dp") and world.size > 1:
        raise UserError(
            f"strategy={name}: runs in one process, but torchrun started {world.size}."
            " Use strategy=ddp, or start it with python -m ddptrain."
        )
    if name == "ddp" and not torch.distributed.is_initialized():
        raise UserError(
            "strategy=ddp: needs ranks, which torchrun starts:"
            " torchrun --standalone --nproc-per-node=2 -m ddptrain ..."
        )
    if config.sync_batchnorm and (name != "ddp" or world.device.type != "cuda"):
        raise UserError(
            "strategy.sync_batchnorm=true: PyTorch's SyncBatchNorm needs ddp on GPUs;"
            f" this is {name} on {world.device.type}."
        )
    if name == "dp" and compiled:
        raise UserError(
            "strategy=dp: its copies of a compiled model would all compute on the first GPU."
            " Use strategy=ddp, or compile=off."
        )
    if name == "dp":
        return DataParallel()
    return Single() if name == "single" else Ddp(config, world)
