"""How one model is spread over devices. Another strategy is another class."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from ddptrain.strategies.flag_bucket import FlagBucket

log = logging.getLogger("ddptrain")


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

    def flag_bucket(self, wrapped: nn.Module) -> FlagBucket | None:
        """Where the ranks' votes travel with the gradients; None for a process by itself."""
        return None

    @property
    def further_gpus(self) -> Sequence[int]:
        """Indexes of the GPUs that this process computes on beside its own."""
        return ()

    def rank_state(self) -> Mapping[str, Tensor]:
        """What this rank carries from step to step: gradients that it has not sent yet. Never changed in
        place."""
        return {}

    def load_rank_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `rank_state` has returned at a step, in this process."""
        assert not tensors, "a strategy that carries something has to implement load_rank_state"

    def scatter(self, ranks: Mapping[str, Tensor]) -> None:
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
