"""Averaged weights, often better on validation data than the last ones."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddptrain.distributed.foreach import copy_all


class Average(ABC):
    """What evaluation uses in place of the last weights."""

    @abstractmethod
    def update(self) -> None:
        """Add the model's new weights, after each optimizer step."""

    @abstractmethod
    def model(self) -> nn.Module:
        """The model to evaluate."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@final
class NoAverage(Average):
    """The last weights themselves."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def update(self) -> None:
        pass

    def model(self) -> nn.Module:
        return self._model

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@final
class ExponentialAverage(Average):
    """decay * average + (1 - decay) * weights, of parameters and floating buffers.

    The decay starts at (1 + t) / (10 + t) after t updates, as in TensorFlow's ExponentialMovingAverage with
    num_updates: otherwise the first weights would dominate a short run.

    Holds torch's AveragedModel and applies torch's averaging function to lists made once: AveragedModel's
    own ``update_parameters`` reads a counter on the host, a sync point in every step of a GPU.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        self._averaged.eval()
        for parameter in self._averaged.parameters():
            parameter.requires_grad_(False)
        own = [*self._averaged.module.parameters(), *self._averaged.module.buffers()]
        pairs = list(zip(own, [*model.parameters(), *model.buffers()], strict=True))
        self._floats = [(a, b.detach()) for a, b in pairs if a.is_floating_point()]
        self._others = [(a, b.detach()) for a, b in pairs if not a.is_floating_point()]
        self._decay = decay
        self._updates = 0

    @torch.no_grad()
    def update(self) -> None:
        self._updates += 1
        average = get_ema_multi_avg_fn(min(self._decay, (1 + self._updates) / (10 + self._updates)))
        average([a for a, _ in self._floats], [b for _, b in self._floats], self._updates)
        copy_all([a for a, _ in self._others], [b for _, b in self._others])

    def model(self) -> nn.Module:
        module: nn.Module = self._averaged.module
        return module

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.model().state_dict(), "updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model().load_state_dict(state["weights"])
        self._updates = state["updates"]
