"""Ranks' flags inside the all-reduce of the gradients.

A separate collective would cost a round of messages per step. So the model is wrapped together with one more
parameter of two numbers, whose "gradient" is the rank's flags: it is summed with the others in a gradient
bucket.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ddptrain.torch_private import at_end_of_backward


class FlagBucket(nn.Module):
    """A model, and the parameter that carries the flags.

    divisor: turns summed flags into their mean, if gradients are summed and not averaged. in_graph: the flags
    are reached from the model's outputs, as DDP's search for unused parameters needs it; else they are a root
    of their own.
    """

    def __init__(self, model: nn.Module, divisor: int = 1, in_graph: bool = False) -> None:
        super().__init__()
        self._divisor = divisor
        self._in_graph = in_graph
        self._row: Tensor | None = None
        trained = [p.detach() for p in model.parameters() if p.requires_grad]
        last = trained[-1].real if trained[-1].is_complex() else trained[-1]
        self.rank_flags = nn.Parameter(last.new_zeros(2))
        self.model = model

    def hidden(self) -> Self:
        """To be called after DDP has registered the parameters: from now on ``parameters()`` does not include
        the flags, for tasks that add a penalty over parameters."""
        self.__dict__["rank_flags"] = self._parameters.pop("rank_flags")
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._modules["model"](*args, **kwargs)  # type: ignore[misc]  # past `__getattr__`, which costs
        return self._attach(outputs) if self._in_graph else outputs

    def send(self, row: Tensor) -> tuple[Tensor, Tensor] | None:
        """row: (2,), this rank's flags. Returns what `Strategy.send_flags` does."""
        if not self._in_graph:
            return self.rank_flags, row
        self._row = row
        return None

    def take_row(self) -> Tensor | None:
        """What was sent, once: the gradient of the flags."""
        row, self._row = self._row, None
        return row

    def __getattr__(self, name: str) -> Any:
        """The model's own attributes too, for recipes that unwrap DDP."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def __getitem__(self, index: Any) -> Any:
        return self.model[index]  # type: ignore[index]

    def mark_own_end(self, mark: Callable[[str], None]) -> None:
        """Call ``mark("backward")`` at the end of each backward pass of this rank's own.

        The flags' gradient comes first in a pass, and autograd runs callbacks in the order in which they were
        queued: this one before DDP's, which waits for other ranks.
        """
        self.rank_flags.register_hook(lambda _: at_end_of_backward(lambda: mark("backward")))

    def take(self) -> Tensor:
        """(2,): the mean of all ranks' flags; clears the parameter's gradient."""
        assert self.rank_flags.grad is not None
        summed, self.rank_flags.grad = self.rank_flags.grad, None
        return summed / self._divisor if self._divisor > 1 else summed

    def _attach(self, outputs: Any) -> Any:
        """The same outputs (tuples, lists, dicts, dataclasses of tensors). Each that has a graph reaches the
        flags: a loss need not use all of them."""
        if isinstance(outputs, Tensor):
            return _Attach.apply(outputs, self.rank_flags, self) if outputs.requires_grad else outputs
        if isinstance(outputs, dict):
            parts = dict(outputs)
        elif dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
            parts = {one.name: getattr(outputs, one.name) for one in dataclasses.fields(outputs)}
        elif isinstance(outputs, tuple | list):
            parts = dict(enumerate(outputs))
        else:
            return outputs
        changed = {name: part for name, value in parts.items() if (part := self._attach(value)) is not value}
        if not changed:
            return outputs
        if isinstance(outputs, tuple | list):
            values = (parts | changed).values()
            return type(outputs)(*values) if hasattr(outputs, "_fields") else type(outputs)(values)
        same = copy.copy(outputs)
        for name, part in changed.items():
            if isinstance(same, dict):
                same[name] = part
            else:
                object.__setattr__(same, name, part)  # it may be frozen
        return same


class _Attach(torch.autograd.Function):
    """Hands a tensor on; in the backward pass the flags get their row as gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, flags: Tensor, bucket: FlagBucket) -> Tensor:
        ctx.bucket = bucket
        return output.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return gradients[0], ctx.bucket.take_row(), None
