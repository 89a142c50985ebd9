"""The outcome of each step: are its numbers finite, does any rank want to stop, are all at the same step?

Ranks exchange this in the gradients' own all-reduce (see `ddptrain.strategies.flag_bucket`). On a GPU the
result is read one step later, when the next step's work is already queued, so the device never waits for the
host.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddptrain.api.recipe import Loss
from ddptrain.api.strategy import Strategy
from ddptrain.distributed.foreach import by_dtype
from ddptrain.engine.check_model import sparse_layers
from ddptrain.errors import OutOfStep, UserError
from ddptrain.text import first_few
from ddptrain.torch_private import check_finite


class NotFinite(Exception):
    """A step's loss or gradients are not finite on some rank, and the run should end; raised on all."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class Outcome(NamedTuple):
    """Of one step, the same on all ranks."""

    step: int
    finite: bool
    """All gradients and losses; if not, the optimizer's step was skipped."""
    loss_finite: bool
    stop: bool
    """A rank wants to stop."""


class Checked(NamedTuple):
    """What the check of a step has left on the device."""

    nonfinite: Tensor
    """0-d: 0 where gradients and losses are finite on all ranks."""
    flags: Tensor
    """The mean of the ranks' flags; in a world of one, the loss."""
    is_loss: bool
    both: Tensor | None
    """On a GPU: both in one, for the host."""


class _Pending(NamedTuple):
    step: int
    stop: bool
    checked: Checked
    arrived: torch.cuda.Event | None
    """On a GPU: recorded behind the copy of both to the host."""


class Health:
    """One rank's."""

    def __init__(self, model: nn.Module, wrapped: nn.Module, strategy: Strategy, ends_run: bool) -> None:
        """ends_run: the first step that is not finite ends the run, so all after it are left out as well: on
        a GPU one of them is on its way when the host gets to know."""
        device = strategy.world.device
        self._ends_run = ends_run
        self._strategy = strategy
        self._wrapped = wrapped
        self._on_gpu = device.type == "cuda"
        # those that the optimizer moves: between the passes a sharded model has others in their place
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._groups = [(group[0].dtype, group) for group in by_dtype(model.parameters())]
        self._nonfinite = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)
        self._loss: Tensor | None = None
        self._has_sent = False
        self._pending: list[_Pending] = []
        odd = any(p.is_complex() for p in model.parameters()) or bool(sparse_layers(model))
        self._plain: bool | None = False if odd else None
        """No gradient is sparse or complex; None until the first step shows it: of a functional embedding."""

    def send(self, step: int, stop: bool, loss: Loss, ends_shard: bool) -> tuple[Tensor, Tensor] | None:
        """After a micro-batch's forward pass: a further root of its backward pass, as `Strategy.send_flags`
        has it, or None."""
        seen = loss.sum.detach()
        self._loss = seen if self._loss is None else self._loss + seen
        if not ends_shard:
            return None
        self._has_sent = True
        return self._strategy.send_flags(self._wrapped, step, stop, self._loss)

    def check_gradients(self, step: int) -> None:
        """After a backward pass. Raises UserError where a parameter has none, and the strategy needs all."""
        if not self._strategy.needs_all_gradients:
            return
        missing = [name for name, parameter in self._trained.items() if parameter.grad is None]
        if missing:
            raise UserError(
                f"model: {first_few(missing, 3)} got no gradient in step {step + 1} on rank"
                f" {self._strategy.world.rank}, and the other ranks wait for one. Set (with ddp)"
                " strategy.find_unused_parameters=true, or requires_grad_(False) for what is never used.",
                everywhere=False,
            )

    def check(self, step: int) -> Checked:
        """After the backward passes. Never waits for the device; `expect` is to follow."""
        assert self._loss is not None
        received = self._strategy.receive_flags(self._wrapped)
        flags, is_loss = (self._loss, True) if received is None else (received, False)
        self._loss, self._has_sent = None, False
        if not self._ends_run:
            self._nonfinite.zero_()
        if self._plain is None:
            trained = [parameter for _, group in self._groups for parameter in group]
            self._plain = not any(p.grad is not None and _is_odd(p.grad) for p in trained)
        looked_at, with_gradient = False, 0
        for dtype, parameters in self._groups:
            values = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
            with_gradient += len(values)
            if not self._plain:
                values = [numbers_of(gradient) for gradient in values]
            if self._strategy.sharded:
                values = [self._strategy.local(gradient) for gradient in values]
            if dtype == flags.dtype:
                values.append(flags)
                looked_at = True
            if values:
                check_finite(values, self._nonfinite, self._one)
        if with_gradient < len(self._trained):
            self.check_gradients(step)
        if not looked_at:
            check_finite([flags], self._nonfinite, self._one)
        if self._strategy.sharded:  # a NaN may be in the part of any
            self._strategy.add_up_nonfinite(self._nonfinite)
        both = torch.cat([self._nonfinite.view(1), flags.view(-1)]) if self._on_gpu else None
        return Checked(self._nonfinite, flags, is_loss, both)

    def expect(self, step: int, stop: bool, checked: Checked) -> None:
        """Queue what a check has left, to be read later. stop: whether this rank was asked to stop."""
        arrived = None
        if checked.both is not None:
            host = torch.empty(checked.both.shape, dtype=checked.both.dtype, pin_memory=True)
            host.copy_(checked.both, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            checked = Checked(host[0], host[1:], checked.is_loss, None)
        self._pending.append(_Pending(step, stop, checked, arrived))

    def discard(self) -> None:
        """Drop the flags and the loss of a pass that is not a step (warm-up)."""
        if self._has_sent:
            self._strategy.receive_flags(self._wrapped)
        self._loss, self._has_sent = None, False

    def ready(self) -> list[Outcome]:
        """The outcomes that are known without waiting: on a CPU all, on a GPU none. Raises as `all`."""
        return [] if self._on_gpu else self.all()

    def all(self) -> list[Outcome]:
        """Every outcome that was not read yet. On a GPU the host waits for their steps.

        Raises OutOfStep if the ranks are at different steps.
        """
        pending, self._pending = self._pending, []
        return [self._outcome(one) for one in pending]

    def _outcome(self, pending: _Pending) -> Outcome:
        if pending.arrived is not None:
            pending.arrived.synchronize()
        checked = pending.checked
        finite = not checked.nonfinite.item()
        if checked.is_loss:
            return Outcome(pending.step, finite, math.isfinite(checked.flags.item()), pending.stop)
        stop, at = checked.flags.tolist()
        if not math.isfinite(stop + at):  # the flags are lost in the sum; they come again in the next step
            return Outcome(pending.step, finite, False, False)
        if not self._strategy.same_step(at, pending.step):
            raise OutOfStep(
                f"the ranks are not at the same step (rank {self._strategy.world.rank} is at {pending.step}):"
                " one has skipped a backward pass, or done one more. Look for code that only some ranks run."
            )
        return Outcome(pending.step, finite, True, stop > 0)


def _is_odd(gradient: Tensor) -> bool:
    return gradient.is_sparse or gradient.is_complex()


def numbers_of(gradient: Tensor) -> Tensor:
    """The numbers of a gradient that may be sparse or complex, in its own memory."""
    values = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values
