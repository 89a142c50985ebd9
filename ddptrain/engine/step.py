"""One optimizer step over one global batch. Start reading here.

On a GPU the host waits in it for the outcome of the previous step: is the run to end? With an optimizer that
is not fused it waits for this step's, too: are its gradients finite?
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from torch import Tensor, nn

from ddptrain.api.recipe import Batch, Loss, Progress, Task
from ddptrain.api.sampler import MicroBatch
from ddptrain.engine.health import Checked, Health, NotFinite, Outcome
from ddptrain.engine.loss_scale import LossScale
from ddptrain.engine.meter import Addend
from ddptrain.engine.nonfinite import Undo
from ddptrain.engine.optimizer_step import OptimizerStep
from ddptrain.engine.phases import Phases
from ddptrain.engine.plan import Plan
from ddptrain.engine.precision import Precision
from ddptrain.engine.seeding import StepSeed
from ddptrain.engine.state import TrainState


class Applied(NamedTuple):
    """What a step has left on the device, for the host to read later; a captured one always in the same
    memory."""

    checked: Checked
    addends: Sequence[Addend]
    """Of the meter."""
    grad_norm: Tensor | None
    """0-d, before clipping."""


@final
class TrainStep:
    """The step of one rank, with its state."""

    def __init__(
        self,
        task: Task,
        precision: Precision,
        plan: Plan,
        state: TrainState,
        phase: Phases,
    ) -> None:
        self.task = task
        self.strategy = strategy = state.strategy
        self.precision = precision
        self.plan = plan
        self.state = state
        self.phase = phase
        self.sampler = plan.sampler(strategy.world)
        self.micro_batches = self.sampler.micro_batches
        self.stop_asked = False
        """Some rank wants to stop."""
        self.grad_norm: Tensor | None = None
        """0-d, of the last step, before clipping."""
        self.seed = StepSeed(plan.seed, strategy.world, strategy.further_gpus)
        self._loss_scale = LossScale(strategy, self.sampler, task.least_count)
        # what fp16's scaler leaves out does not end the run
        ends_run = not plan.skips_nonfinite and not precision.scaler.is_enabled()
        self._health = Health(state.model, state.wrapped, strategy, ends_run)
        self._optimizer = OptimizerStep(state.optimizer, precision.scaler)
        self._undo = Undo(task, state.model) if plan.skips_nonfinite else None

    def __call__(self, batches: Iterator[Batch], progress: Progress) -> None:
        """Raises NotFinite if the run should end because of a number that is not finite, OutOfStep if the
        ranks are at different steps."""
        self.state.schedule.at(progress.step)
        counts = self.passes(batches, progress)
        with self.phase("optimizer", progress.step):
            self._count(self._health.all())  # on a GPU: the step before
            applied = self.apply(counts, progress, self.state.average.weight(progress.step))
            self.expect(progress, self.phase.watchdog.stop is not None, applied)
            self._count(self._health.ready())  # on a CPU: this step
        self.phase.stopwatch.count(self.sampler.batch_size)

    def passes(self, batches: Iterator[Batch], progress: Progress) -> list[tuple[int, Tensor]]:
        """Forward and backward pass of each micro-batch. Returns the shard and the count of those whose count
        is on the device."""
        state, counts = self.state, []
        if self._undo is not None:
            self._undo.remember()
        state.meter.begin_step()
        for micro_batch in self.micro_batches:
            with self.phase("data", progress.step):
                batch = next(batches)
            with self.phase("all_reduce"), self.strategy.accumulate(state.wrapped, micro_batch.ends_shard):
                loss = self.forward_backward(batch, progress, micro_batch)
            state.meter.add(loss, micro_batch.shard)
            if isinstance(loss.count, Tensor):
                counts.append((micro_batch.shard, loss.count))
        return counts

    def apply(
        self, counts: list[tuple[int, Tensor]], progress: Progress, average_weight: float | Tensor
    ) -> Applied:
        """What follows from the gradients, on the device."""
        state = self.state
        self.precision.unscale(state.optimizer)
        if counts:
            self._loss_scale.rescale(state.model, counts)
        checked = self._health.check(progress.step)
        clip_norm, grad_norm = self.plan.clip_norm, None
        if clip_norm is not None:
            grad_norm = self.strategy.clip(state.model, clip_norm)
        self._optimizer(checked.nonfinite)
        if self._undo is not None:
            self._undo.put_back(checked.nonfinite)
        state.average.update(average_weight, checked.nonfinite)
        return Applied(checked, state.meter.end_step(checked.nonfinite), grad_norm)

    def expect(self, progress: Progress, stop: bool, applied: Applied) -> None:
        """Queue a step's outcome, which is read one step later on a GPU. stop: as `Health.expect`."""
        self._health.expect(progress.step, stop, applied.checked)
        self.state.meter.expect(applied.addends)
        self.grad_norm = applied.grad_norm

    def forward_backward(self, batch: Batch, progress: Progress, micro_batch: MicroBatch) -> Loss:
        """Add the gradients of a micro-batch. In the last one of a shard they are summed over ranks, together
        with the ranks' flags."""
        with self.phase("forward", progress.step):
            loss = self.forward(self.state.wrapped, batch, progress, micro_batch)
        if micro_batch is self.micro_batches[0]:
            # here and not after the step: memory given back before a forward pass is taken again
            # page by page (measured on CPUs: 6 % of a MobileNetV3 step)
            self._optimizer.forget_gradients()
        stop = self.phase.watchdog.stop is not None
        flags = self._health.send(progress.step, stop, loss, micro_batch.ends_shard)
        with self.phase("backward", progress.step):
            self.precision.backward(loss.sum, self._loss_scale.weight(loss, micro_batch.size), flags)
        return loss

    def forward(self, model: nn.Module, batch: Batch, progress: Progress, micro_batch: MicroBatch) -> Loss:
        self.seed(progress.step, micro_batch.stream)
        with self.precision.autocast():
            return self.task.loss(model, batch, progress)

    def check_gradients(self, progress: Progress) -> None:
        """After a backward pass: raises UserError where the strategy waits for a gradient that is not
        there."""
        self._health.check_gradients(progress.step)

    def synchronize(self) -> None:
        """Count all steps so far. On a GPU a sync point."""
        self._count(self._health.all())

    def discard(self) -> None:
        """Drop the gradients and flags of a pass that is not a step (warm-up)."""
        self._health.discard()
        self.state.wrapped.zero_grad(set_to_none=True)

    def _count(self, outcomes: Sequence[Outcome]) -> None:
        """What each step has come to; the same on all ranks. Raises NotFinite if the run should end."""
        state = self.state
        for outcome in outcomes:
            self.stop_asked |= outcome.stop
            state.meter.count(outcome.finite)
            if outcome.finite:
                state.left_out_in_a_row = 0
                continue
            state.left_out, state.left_out_in_a_row = state.left_out + 1, state.left_out_in_a_row + 1
            # an overflow in a gradient alone is fp16's scaler finding its scale
            expected = self.precision.scaler.is_enabled() and outcome.loss_finite
            goes_on = self.plan.skips_nonfinite or expected
            if not goes_on or state.left_out_in_a_row > self.plan.nonfinite_limit:
                raise NotFinite(outcome.step)
