"""Averaged weights, often better on validation data than the last ones."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn

from ddptrain.api.strategy import Strategy
from ddptrain.distributed.foreach import by_dtype, mapped
from ddptrain.distributed.snapshot import saved_buffers
from ddptrain.engine.load_model import load_model
from ddptrain.errors import UserError


class Average(ABC):
    """What evaluation uses in place of the last weights."""

    copies: bool
    """Whether there are weights and buffers beside the model's own."""

    @abstractmethod
    def weight(self, step: int) -> float:
        """Of the model's new weights after an optimizer step, counted from 0."""

    @abstractmethod
    def update(self, weight: float | Tensor, nonfinite: Tensor) -> None:
        """Add the model's new weights, with this weight (a 0-d tensor in a captured step), unless
        ``nonfinite`` (0-d) is not 0. Never waits for the device."""

    @abstractmethod
    def in_use(self) -> AbstractContextManager[None]:
        """Inside, the model has the averaged weights and buffers."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def check_averaged(model: nn.Module) -> None:
    """Raises UserError for trained parameters in which an average would stand still: its steps are a small
    share of the difference."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UserError(
                f"ema.decay: {name} of the model is {dtype}, in which the steps of an average are rounded"
                " away. Keep it in float32 (precision=bf16 computes in bf16), or set ema.decay=null."
            )


@final
class NoAverage(Average):
    """The last weights themselves."""

    copies = False

    def weight(self, step: int) -> float:
        return 0.0

    def update(self, weight: float | Tensor, nonfinite: Tensor) -> None:
        pass

    def in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@final
class ExponentialAverage(Average):
    """decay * average + (1 - decay) * weights, of parameters and saved buffers, floating or complex ones.
    Buffers of whole numbers and extra state (``get_extra_state``) are the model's own.

    The decay of step t, counted from 1, is (1 + t) / (10 + t) until that is more, as in TensorFlow's
    ExponentialMovingAverage with num_updates: otherwise the first weights would dominate a short run.

    torch's AveragedModel copies the model, which a sharded one does not allow, and reads a counter on the
    host, a sync point in every step of a GPU.
    """

    copies = True

    def __init__(self, model: nn.Module, decay: float, strategy: Strategy) -> None:
        self._model = model
        self._strategy = strategy
        self._layers = list(model.modules())
        own = [strategy.local(parameter.detach()) for parameter in model.parameters()]
        self._parameters = [(parameter.clone(), parameter) for parameter in own]
        self._buffers: dict[tuple[nn.Module, str], Tensor] = {}
        self._decay = decay
        self._move = _move_on_host if strategy.world.device.type == "cpu" else _move_on_device
        self._pairs()

    def weight(self, step: int) -> float:
        return 1 - min(self._decay, (2 + step) / (11 + step))

    @torch.no_grad()
    def update(self, weight: float | Tensor, nonfinite: Tensor) -> None:
        pairs = self._pairs()
        self._move(
            [_real(average) for average, _ in pairs], [_real(own) for _, own in pairs], weight, nonfinite
        )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        pairs = self._pairs()
        _swap(pairs)
        try:
            yield
        finally:
            _swap(pairs[::-1])  # in reverse: parameters may share memory

    def state_dict(self) -> dict[str, Any]:
        with self.in_use():
            weights = mapped(self._model.state_dict(), _copied)
        return {"weights": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self.in_use():
            load_model(self._model, state["weights"], self._strategy)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each average with what it is of. Buffers are looked up each time: a layer may replace one by
        another tensor, or make it in its first pass, where its average begins."""
        pairs = list(self._parameters)
        for layer, name, own in saved_buffers(self._layers):
            if own.layout == torch.strided and (own.is_floating_point() or own.is_complex()):
                if (layer, name) not in self._buffers:
                    self._buffers[layer, name] = own.detach().clone()
                pairs.append((self._buffers[layer, name], own))
        return pairs


def _move_on_host(
    averages: list[Tensor], new: list[Tensor], weight: float | Tensor, nonfinite: Tensor
) -> None:
    if not nonfinite:
        torch._foreach_lerp_(averages, new, float(weight))


def _move_on_device(
    averages: list[Tensor], new: list[Tensor], weight: float | Tensor, nonfinite: Tensor
) -> None:
    """In few launches. On a CPU it takes five times as long."""
    weights = (nonfinite == 0) * weight
    for some, own in zip(by_dtype(averages), by_dtype(new), strict=True):
        change = torch._foreach_sub(own, some)
        torch._foreach_mul_(change, weights.to(some[0].dtype))
        torch._foreach_add_(some, change)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def _swap(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for average, own in pairs:
        kept = own.clone()
        own.copy_(average)
        average.copy_(kept)
