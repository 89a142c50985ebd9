"""One process on one device."""

from contextlib import AbstractContextManager, nullcontext
from typing import final

from torch import nn

from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World
from ddptrain.errors import UserError


def check_one_process(world: World, name: str) -> None:
    """Raise UserError where there are several, for the strategy of this name."""
    if world.size > 1:
        raise UserError(
            f"strategy={name}: runs in one process, but torchrun started {world.size}."
            " Use strategy=ddp, or start it with python -m ddptrain."
        )


@final
class Single(Strategy):
    def check(self, compiled: bool) -> None:
        check_one_process(self.world, "single")

    def accumulate(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def describe(self) -> str:
        return "single"
