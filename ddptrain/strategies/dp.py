"""One process on all GPUs, by threads."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn

from ddptrain.api.strategy import Strategy

_NOTHING: AbstractContextManager[None] = nullcontext()


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
