"""Averaged weights, often better on validation data than the last ones."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ddptrain.api.strategy import Strategy
from ddptrain.distributed.foreach import copy_all


class Average(ABC):
    """What evaluation uses in place of the last weights."""

    copies: bool
    """Whether there are weights and buffers beside the model's own."""

    @abstractmethod
    def update(self) -> None:
        """Add the model's new weights, after each optimizer step."""

    @abstractmethod
    def in_use(self) -> AbstractContextManager[None]:
        """Inside, the model has the averaged weights and buffers."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@final
class NoAverage(Average):
    """The last weights themselves."""

    copies = False

    def update(self) -> None:
        pass

    def in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@final
class ExponentialAverage(Average):
    """decay * average + (1 - decay) * weights, of parameters and floating buffers.

    The decay starts at (1 + t) / (10 + t) after t updates, as in TensorFlow's ExponentialMovingAverage with
    num_updates: otherwise the first weights would dominate a short run.

    Applies torch's averaging function to lists made once. torch's AveragedModel copies the model, which a
    sharded one does not allow, and reads a counter on the host, a sync point in every step of a GPU.
    """

    copies = True

    def __init__(self, model: nn.Module, decay: float, strategy: Strategy) -> None:
        self._strategy = strategy
        own = [*model.parameters(), *model.buffers()]
        averages = {id(tensor): tensor.detach().clone() for tensor in own}
        self._saved = {n: averages.get(id(v), v) for n, v in model.state_dict(keep_vars=True).items()}
        """By the names in a checkpoint."""
        pairs = [(strategy.local(averages[id(tensor)]), strategy.local(tensor.detach())) for tensor in own]
        self._floats = [(a, b) for a, b in pairs if a.is_floating_point()]
        self._others = [(a, b) for a, b in pairs if not a.is_floating_point()]
        self._decay = decay
        self._updates = 0

    @torch.no_grad()
    def update(self) -> None:
        self._updates += 1
        average = get_ema_multi_avg_fn(min(self._decay, (1 + self._updates) / (10 + self._updates)))
        average([a for a, _ in self._floats], [b for _, b in self._floats], self._updates)
        copy_all([a for a, _ in self._others], [b for _, b in self._others])

    @contextmanager
    def in_use(self) -> Iterator[None]:
        pairs = [*self._floats, *self._others]
        _swap(pairs)
        try:
            yield
        finally:
            _swap(pairs[::-1])  # in reverse: parameters may share memory

    def state_dict(self) -> dict[str, Any]:
        return {"weights": dict(self._saved), "updates": self._updates}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, average in self._saved.items():
            if isinstance(average, Tensor):
                average.copy_(self._strategy.part(state["weights"][name], average))
        self._updates = state["updates"]


@torch.no_grad()
def _swap(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for average, own in pairs:
        kept = own.clone()
        own.copy_(average)
        average.copy_(kept)
