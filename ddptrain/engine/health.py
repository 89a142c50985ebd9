"""What each step came to: are its numbers finite, does any rank want to stop, do all stand at it?

Asked of all ranks in the gradients' own all-reduce (see `ddptrain.strategies.flag_bucket`). On a GPU the
answer is read one step later, while that step's work is already queued there, so the device never
waits for the host.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddptrain.api.recipe import Loss
from ddptrain.api.world import World
from ddptrain.distributed.foreach import by_dtype
from ddptrain.strategies.flag_bucket import FlagBucket


class Verdict(NamedTuple):
    """On one step, the same on all ranks."""

    step: int
    finite: bool
    """All gradients and losses; if not, the optimizer's step was left out."""
    loss_finite: bool
    stop: bool
    """A rank wants to stop."""
    aligned: bool
    """All ranks were at this step."""


class _Vote(NamedTuple):
    step: int
    stop: bool
    nonfinite: Tensor
    words: Tensor
    """The ranks' mean vote, or the loss of a process by itself."""
    arrived: torch.cuda.Event | None
    """Where both are on their way from a GPU."""


class Guard:
    """One rank's. ballot: None for a process by itself."""

    def __init__(self, world: World, model: nn.Module, flag_bucket: FlagBucket | None) -> None:
        self._world = world
        self._on_gpu = world.device.type == "cuda"
        self._flag_bucket = flag_bucket
        self._groups = [(group[0].dtype, group) for group in by_dtype(model.parameters())]
        self._nonfinite = torch.zeros((), device=world.device)
        self._one = torch.ones((), device=world.device)
        self._loss: Tensor | None = None
        self._stop = False
        self._open: list[_Vote] = []
        self._plain: bool | None = None
        """No gradient is sparse or complex; None until the first step shows it."""

    def vote(self, step: int, stop: bool, loss: Loss, ends_shard: bool) -> tuple[Tensor, Tensor] | None:
        """What this rank has to say after a micro-batch's forward pass, for `Precision.backward`."""
        seen = loss.sum.detach()
        self._loss = seen if self._loss is None else self._loss + seen
        self._stop = stop
        if self._flag_bucket is None or not ends_shard:
            return None
        return self._flag_bucket.vote(step, stop, self._loss)

    def judge(self, step: int) -> Tensor:
        """0-d, on the device: 0 where this step's gradients and losses are finite on all ranks."""
        assert self._loss is not None
        words = self._loss if self._flag_bucket is None else self._flag_bucket.take()
        self._loss = None
        self._nonfinite.zero_()
        if self._plain is None:
            trained = [parameter for _, group in self._groups for parameter in group]
            self._plain = not any(p.grad is not None and _is_odd(p.grad) for p in trained)
        looked_at = False
        for dtype, parameters in self._groups:
            values = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
            if not self._plain:
                values = [numbers_of(gradient) for gradient in values]
            if dtype == words.dtype:
                values.append(words)
                looked_at = True
            if values:
                self._look(values)
        if not looked_at:
            self._look([words])
        if self._on_gpu:
            self._open.append(_Vote(step, self._stop, *self._sent(words)))
        else:
            self._open.append(_Vote(step, self._stop, self._nonfinite, words, None))
        return self._nonfinite

    def ready(self) -> list[Verdict]:
        """What is known without waiting: on a CPU all verdicts, on a GPU none."""
        return [] if self._on_gpu else self.all()

    def all(self) -> list[Verdict]:
        """Every verdict not yet read. On a GPU the host waits for the steps they are of."""
        votes, self._open = self._open, []
        return [self._verdict(vote) for vote in votes]

    def _look(self, tensors: list[Tensor]) -> None:
        """One pass over them; the multiplication by one that comes with it changes nothing."""
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, self._nonfinite, self._one)

    def _sent(self, words: Tensor) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        values = torch.cat([self._nonfinite.view(1), words.view(-1)])
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return host[0], host[1:], arrived

    def _verdict(self, vote: _Vote) -> Verdict:
        if vote.arrived is not None:
            vote.arrived.synchronize()
        finite = not vote.nonfinite.item()
        if self._flag_bucket is None:
            return Verdict(vote.step, finite, math.isfinite(vote.words.item()), vote.stop, True)
        stop, at = vote.words.tolist()
        if not math.isfinite(stop + at):  # lost in the sum; it is voted for again
            return Verdict(vote.step, finite, False, False, True)
        aligned = self._flag_bucket.same_step(at, vote.step, self._world.size)
        return Verdict(vote.step, finite, True, stop > 0, aligned)


def _is_odd(gradient: Tensor) -> bool:
    return gradient.is_sparse or gradient.is_complex()


def numbers_of(gradient: Tensor) -> Tensor:
    """The numbers of a gradient that may be sparse or complex, in its own memory."""
    values = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values
