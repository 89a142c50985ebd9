"""One process on one device."""

from contextlib import AbstractContextManager, nullcontext
from typing import final

from torch import nn

from ddptrain.api.strategy import Strategy

_NOTHING: AbstractContextManager[None] = nullcontext()


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
