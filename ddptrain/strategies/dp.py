"""One process on all GPUs, by threads (torch.nn.DataParallel)."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn

from ddptrain.api.strategy import Strategy
from ddptrain.errors import UserError
from ddptrain.strategies.single import check_one_process


@final
class DataParallel(Strategy):
    """The world's device holds the weights. Without GPUs it is the same as `Single`."""

    why_not_captured = "the threads of dp queue work on other GPUs"

    def check(self, compiled: bool) -> None:
        check_one_process(self.world, "dp")
        if compiled and self._on_gpu:
            raise UserError(
                "strategy=dp: its copies of a compiled model would all compute on the first GPU."
                " Use strategy=ddp, or compile=off."
            )

    @property
    def further_gpus(self) -> Sequence[int]:
        if not self._on_gpu:
            return ()
        return [i for i in range(torch.cuda.device_count()) if i != self.world.device.index]

    def wrap(self, model: nn.Module) -> nn.Module:
        if not self._on_gpu:
            return model
        return _Replicated(model, device_ids=[self.world.device, *self.further_gpus])

    def accumulate(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def describe(self) -> str:
        if not self._on_gpu:
            return f"single (strategy=dp: on {self.world.device} there is nothing to spread over)"
        return (
            "dp (one process copies the model to every GPU in every step and its threads share one"
            " interpreter; ddp has neither cost: torchrun --standalone --nproc-per-node=gpu -m ddptrain ...)"
        )

    @property
    def _on_gpu(self) -> bool:
        return self.world.device.type == "cuda"


@final
class _Replicated(nn.DataParallel[nn.Module]):
    """torch's DataParallel (2.11 to 2.15) does not pass autocast's dtype to its threads: bf16 would become
    fp16."""

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        calls: list[Any] = [torch.autocast("cuda", dtype, enabled)(replica.__call__) for replica in replicas]
        return super().parallel_apply(calls, inputs, kwargs)
