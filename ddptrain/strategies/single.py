"""One process on one device."""

from contextlib import AbstractContextManager, nullcontext
from typing import final

from torch import nn

from ddptrain.api.strategy import Strategy
from ddptrain.errors import UserError


@final
class Single(Strategy):
    def check(self, compiled: bool) -> None:
        if self.world.size > 1:
            raise UserError(
                f"strategy=single: runs in one process, but torchrun started {self.world.size}."
                " Use strategy=ddp, or start it with python -m ddptrain."
            )

    def accumulate(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def describe(self) -> str:
        return "single"
