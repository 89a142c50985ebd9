"""What each rank tells all others in every step, inside the all-reduce of the gradients.

A collective of its own would cost every step a round of messages. So the model is wrapped together
with one more parameter of two numbers, whose "gradient" is the rank's vote: it is summed with the
others' in a bucket that travels anyway.
"""

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

_CYCLE = 4
"""Steps are told apart modulo this: small, so that the rounding of a sum over a thousand ranks is smaller."""


class FlagBucket(nn.Module):
    """A model, and the parameter that carries the votes.

    voters: votes that are added up without being divided by their number, as DDP does. exact: gradients
    travel as they are; where they are rounded on the way, steps are not compared.
    """

    def __init__(self, model: nn.Module, voters: int = 1, exact: bool = True) -> None:
        super().__init__()
        self.model = model
        self._voters = voters
        trained = [p for p in model.parameters() if p.requires_grad]
        self.votes = nn.Parameter(trained[-1].detach().new_zeros(2))
        self._cycle = _CYCLE if exact and self.votes.dtype in (torch.float32, torch.float64) else 1
        self._on_host = self.votes.device.type == "cpu"
        # every possible vote, on the device once: a step picks one and copies nothing
        self._rows = [[self._row(stop, at) for at in range(self._cycle)] for stop in (0, 1)]
        self._nan = self._row(math.nan, math.nan)

    def hidden(self) -> Self:
        """To be called once whoever sums gradients knows the parameters: from here on ``parameters()`` are
        the model's alone, so that a task which adds up a penalty over them leaves the votes out."""
        self.__dict__["votes"] = self._parameters.pop("votes")
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._modules["model"](*args, **kwargs)  # type: ignore[misc]  # past `__getattr__`, which costs

    def __getattr__(self, name: str) -> Any:
        """The model's own attributes too, for recipes that unwrap DDP."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def __getitem__(self, index: Any) -> Any:
        return self.model[index]  # type: ignore[index]

    def vote(self, step: int, stop: bool, loss: Tensor) -> tuple[Tensor, Tensor]:
        """The parameter and its gradient, as one more root for ``torch.autograd.backward``.

        loss: 0-d. Both numbers become NaN where it is not finite, and a sum over ranks keeps that.
        """
        row = self._rows[stop][step % self._cycle]
        if self._on_host:
            return self.votes, row if math.isfinite(loss.item()) else self._nan
        return self.votes, row + (loss.detach() * 0).to(row.dtype)  # without waiting for the device

    def take(self) -> Tensor:
        """(2,): the mean of all ranks' votes: any stop, and the step. Gone from the parameter."""
        assert self.votes.grad is not None
        summed, self.votes.grad = self.votes.grad, None
        return summed / self._voters if self._voters > 1 else summed

    def _row(self, stop: float, at: float) -> Tensor:
        return torch.tensor([stop, at]).to(self.votes)

    def same_step(self, mean: float, step: int, world_size: int) -> bool:
        """Whether the mean vote says that all ranks stand at this rank's step."""
        return abs(mean - step % self._cycle) < 0.5 / world_size
