"""The training loop: logging, evaluation and checkpoints between steps."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import final

from torch import Tensor

from ddptrain.api.observer import End, Evaluated, Log, Result, RunInfo, Saved, Start
from ddptrain.api.recipe import Batch, Data, Figure, Report
from ddptrain.api.timing import Timing
from ddptrain.data.prefetch import changed
from ddptrain.distributed.comm import broadcast, from_all_ranks, from_first_rank, on_first_rank
from ddptrain.distributed.snapshot import saved_buffers, unchanged
from ddptrain.distributed.watchdog.watchdog import LONG_S
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.compiled import is_compiled
from ddptrain.engine.consistency import check_replicas
from ddptrain.engine.divergence import divergence, evidence_of, where_it_began
from ddptrain.engine.evaluate import Interrupted, OwnBatches, evaluate, figures_of
from ddptrain.engine.flops import peak_flops
from ddptrain.engine.health import NotFinite
from ddptrain.engine.plain_state import check_plain
from ddptrain.engine.rehearsal import rehearse
from ddptrain.engine.step import TrainStep
from ddptrain.engine.step_graph import StepGraph
from ddptrain.engine.warmup import check_device, check_size, warm_up
from ddptrain.errors import Diverged, Stopped, UserError
from ddptrain.observe.dispatch import Observers

log = logging.getLogger("ddptrain")
StepIterator = Callable[[range], Iterable[int]]
"""Iterates over the steps; may do something between two of them (profiling)."""


@dataclass(slots=True)
class _LastDone:
    report: Report = field(default_factory=lambda: Report({}))
    """The last evaluation."""
    saved_at: int | None = None
    unannounced: Saved | None = None
    """A checkpoint that is being written, of which observers are not told yet."""
    ranks: Sequence[Timing] = ()
    """All ranks' timing at the last evaluation."""


@final
class Engine:
    """Trains on data, as one rank of a world. The step brings task, model, strategy and state."""

    def __init__(
        self,
        data: Data,
        step: TrainStep,
        checkpointer: Checkpointer,
        observers: Observers,
        make_graph: Callable[[TrainStep], StepGraph] | None = None,
    ) -> None:
        """make_graph: makes what captures the steps in a CUDA graph; None: all steps are eager."""
        self._task = step.task
        self._data = data
        self._world = step.strategy.world
        self._plan = step.plan
        self._state = step.state
        self._step = step
        self._make_graph = make_graph
        self._advance = self._captured_or_eager()
        """Takes one step."""
        self._checkpointer = checkpointer
        self._observers = observers
        self._watchdog = step.phase.watchdog
        self._watchdog.spare_while(lambda: checkpointer.writes_alone)
        self._stopwatch = step.phase.stopwatch
        self._last = _LastDone()
        self._next_evaluation: OwnBatches | None = None
        """Its batches, read while the training goes on."""

    def fit(self, run: RunInfo | None = None, step_iterator: StepIterator = iter) -> Report:
        """Train from ``state.step`` to the plan's end; returns the last evaluation.

        run: a description for observers and controllers.
        Raises Stopped if it was asked to stop, Diverged if the loss or a gradient is not finite.
        """
        state, plan, outcome = self._state, self._plan, "failed"
        first_step, self._last.report = state.step, Report(state.metrics)
        if on_first_rank(self._world, lambda: self._checkpointer.holds(first_step)):
            self._last.saved_at = first_step  # a controller that ends the run here would save it again
        batches = self._opened(run or RunInfo(world=self._world))
        try:
            goes_on = self._evaluate() if state.evaluation_due else True
            for step in step_iterator(range(first_step, plan.steps)) if goes_on else ():
                if state.frozen is not None and state.frozen.until == step:
                    batches = self._thaw(batches)
                self._advance(batches, plan.progress(step))
                state.step = done = step + 1
                if plan.verifies(done) and not state.strategy.sharded:
                    check_replicas(self._world, state.model, done)
                if plan.logs(done):
                    self._log()
                if plan.saves(done) or self._step.stop_asked:
                    self._save()
                if self._step.stop_asked:
                    raise Stopped(f"stopped at step {done}")
                if plan.evaluates(done) and not self._evaluate():
                    break
            self._wait_until_saved()
            self._stopwatch.synchronize()
            outcome = "done" if state.step == plan.steps else "stopped early"
        except Stopped:
            self._wait_until_saved()
            outcome = "stopped"
            raise
        except NotFinite as nonfinite:
            self._finish_saving()
            outcome = "diverged"
            raise self._diverged(nonfinite.step) from None
        finally:
            if outcome == "failed":
                self._mark_writing()
                self._checkpointer.wait()
            self._end(outcome)
        return self._last.report

    def _opened(self, run: RunInfo) -> Iterator[Batch]:
        """The remaining batches, after the checks and warm-up passes on the first one and a rehearsal of the
        evaluation; observers are started."""
        state, plan, step, device = self._state, self._plan, self._step, self._world.device
        steps = range(state.step, plan.steps)
        batches, flops = self._all_batches(steps), 0.0
        if steps:
            state.scatter(self._task, step.sampler.share)
            batches, flops = self._warmed_up(batches)
        # an evaluation that comes first shows the same
        metrics = rehearse(step, self._data) if steps and not state.evaluation_due else ()
        self._next_evaluation = self._valid_batches() if steps or state.evaluation_due else None
        gpus = self._world.size * (1 + len(state.strategy.further_gpus))
        peak = peak_flops(device, step.precision.name) * gpus
        preview = self._data.preview() if self._world.is_first else None
        # a checkpoint is written before the evaluation at its step, so that evaluation is repeated
        start = Start(state.step, plan.steps, state.evaluation_due, preview, run, metrics)
        for name, controller in self._state.controllers.items():
            controller.start(start)
            check_plain({f"controllers.{name}": dict(controller.state_dict())})
        self._observers.start(start)
        self._stopwatch.begin(flops, peak)
        state.strategy.time_waits(state.wrapped, self._stopwatch.mark_early)
        return batches

    def _all_batches(self, steps: range) -> Iterator[Batch]:
        """Raises UserError where the data has fewer."""
        batches = self._data.train_batches(self._step.sampler, steps)
        yield from batches
        raise UserError(
            f"{type(self._data).__name__}.train_batches: ended before the last step; it must give"
            " a batch for each micro-batch of each step in the range that it is given, over all epochs.",
            everywhere=False,
        )

    def _warmed_up(self, batches: Iterator[Batch]) -> tuple[Iterator[Batch], float]:
        """All of the batches again, after the checks and warm-up passes on the first one; the FLOPs of a
        sample."""
        step, state = self._step, self._state
        first = next(batches)
        check_device(state.model, first, self._world.device)
        check_size(step, first, type(self._data).__name__)
        progress = self._plan.progress(state.step)
        flops = warm_up(step, first, progress) / step.micro_batches[0].size
        if isinstance(self._advance, StepGraph):
            self._advance = self._advance.checked(changed(first, Tensor.clone), progress)
        return chain([first], batches), flops

    def _captured_or_eager(self) -> TrainStep | StepGraph:
        return self._step if self._make_graph is None else self._make_graph(self._step)

    def _thaw(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """From this step on, train what was frozen. Collectives and a sync point. Returns the batches. Raises
        Stopped where only now the device tells that a rank was asked to stop."""
        state, before = self._state, self._step
        before.synchronize()
        if before.stop_asked:
            self._save(evaluated=True)
            raise Stopped(f"stopped at step {state.step}")
        self._watchdog.forget_what_is_usual()
        self._watchdog.mark("thawing", state.step, LONG_S)
        state.thaw()
        self._step = TrainStep(self._task, before.precision, self._plan, state, before.phase)
        self._advance = self._captured_or_eager()
        log.info("thawed     at step %d: all groups are trained from here on", state.step)
        batches, flops = self._warmed_up(batches)
        self._stopwatch.flops = flops
        state.strategy.time_waits(state.wrapped, self._stopwatch.mark_early)
        self._stopwatch.mark("logging")
        return batches

    def _log(self) -> None:
        """A collective and a sync point, every ``log.every`` steps."""
        state, step = self._state, self._step
        self._stopwatch.mark("optimizer")
        step.synchronize()
        values = state.meter.read()
        if step.grad_norm is not None and not state.left_out_in_a_row:  # else it is that of a step left out
            values["grad_norm"] = float(step.grad_norm)
        rates = [(group.get("lr_scale", 1.0), group["lr"]) for group in state.optimizer.param_groups]
        values["lr"] = float(rates[0][1] / rates[0][0])
        if len({scale for scale, _ in rates}) > 1:
            values |= {f"lr/x{scale:.4g}": rate for scale, rate in rates}
        if state.left_out:
            values["left_out"] = float(state.left_out)
        event = Log(state.step, *self._position(), values, self._stopwatch.lap("log"))
        for controller in self._state.controllers.values():
            controller.log(event)
        self._observers.log(event)
        if self._observers.lost:
            self._watchdog.ask_to_stop("the loss of its folder")
        self._tell_if_saved()
        self._stopwatch.mark("logging")

    def _evaluate(self) -> bool:
        """Evaluate, and ask the controllers. Returns False if one of them has completed the run."""
        state, task, last = self._state, self._task, self._last
        self._step.synchronize()
        self._stopwatch.synchronize()
        began = time.perf_counter()
        try:
            figures = self._report()
        except Interrupted:
            self._save_once()
            raise Stopped(f"stopped in the evaluation at step {state.step}") from None
        metrics = last.report.metrics
        state.metrics, state.metrics_step = dict(metrics), state.step
        self._stopwatch.mark("evaluating")
        is_best = state.record_if_best(metrics, task.best_metric, task.higher_is_better)
        if is_best:
            state.evaluation_due = False
            self._write("saving the best", self._checkpointer.save_best)
        last.ranks = from_all_ranks(self._world, self._stopwatch.total())
        lap, seconds = self._stopwatch.lap("evaluation").timing, time.perf_counter() - began
        event = Evaluated(
            state.step, *self._position(), metrics, figures, seconds, is_best, lap,
            task.best_metric, task.higher_is_better, self._plan.steps,
        )  # fmt: skip
        self._watchdog.mark("telling observers", patience=LONG_S)
        self._observers.evaluated(event)
        goes_on = self._go_on(event)
        self._stopwatch.mark("drawing")
        self._next_evaluation = self._valid_batches() if goes_on and state.step < self._plan.steps else None
        return goes_on

    def _go_on(self, event: Evaluated) -> bool:
        """Ask all controllers. Returns False if one of them has completed the run; raises Stopped if one
        pauses it."""
        state, controllers = self._state, self._state.controllers
        before = {name: deepcopy(dict(one.state_dict())) for name, one in controllers.items()}
        ending = [
            one for one in controllers.values() if not on_first_rank(self._world, partial(one.goes_on, event))
        ]
        if not ending:
            return True
        if completing := [one for one in ending if one.completes]:
            # a resume evaluates again and asks again, so that it ends again, or goes on under other settings
            for name, controller in controllers.items():
                controller.load_state_dict(before[name])
            self._save_once()
            log.info("ended      %s at step %d", completing[0].why, state.step)
            return False
        self._save(evaluated=True)
        raise Stopped(f"{ending[0].why} at step {state.step}")

    def _report(self) -> dict[str, Figure]:
        """Evaluate the averaged weights, where there are some; returns the figures, on rank 0."""
        state, world, precision = self._state, self._world, self._step.precision
        model = state.model
        buffers = [buffer for *_, buffer in saved_buffers(model.modules())]
        broadcast(world, buffers)
        with state.average.in_use():
            if state.average.copies:
                broadcast(world, buffers)
            with unchanged(model), state.strategy.evaluating(model):
                batches, self._next_evaluation = self._next_evaluation or self._valid_batches(), None
                self._last.report = evaluate(self._task, model, batches, precision, self._watchdog)
                figures = figures_of(self._task, model, precision, world.device) if world.is_first else {}
        return {**self._last.report.figures, **figures}

    def _valid_batches(self) -> OwnBatches:
        plan = self._plan
        return OwnBatches(self._data, self._data.valid_size, plan.eval_batch_size, self._world)

    def _save_once(self) -> None:
        """Save, unless this step has been saved."""
        if self._last.saved_at != self._state.step:
            self._save()

    def _save(self, evaluated: bool = False) -> None:
        """evaluated: the evaluation at this step is over, and its controllers have been asked."""
        state = self._state
        self._step.synchronize()
        self._stopwatch.synchronize()
        state.evaluation_due = self._plan.evaluates(state.step) and not evaluated
        path = self._write("saving", self._checkpointer.save)
        self._last.saved_at = state.step
        if path is not None:
            self._last.unannounced = Saved(state.step, path)
        self._tell_if_saved()

    def _tell_if_saved(self) -> None:
        if not self._checkpointer.is_writing:
            self._finish_saving()

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that is being written, and tell of it."""
        self._mark_writing()
        self._checkpointer.finish()
        saved, self._last.unannounced = self._last.unannounced, None
        if saved is not None:
            self._watchdog.mark("telling observers", patience=LONG_S)
            self._observers.saved(saved)

    def _wait_until_saved(self) -> None:
        """On all ranks: the first one to exit makes torchrun end the others. A collective."""
        self._finish_saving()
        from_first_rank(self._world, None)
        self._watchdog.saved()

    def _mark_writing(self) -> None:
        """A slow disk is no hang, and a rank that is gone does not end what the next attempt needs."""
        if self._checkpointer.is_writing:
            self._watchdog.mark("writing a checkpoint", patience=LONG_S, writes=True)

    def _write(self, why: str, write: Callable[..., Path]) -> Path | None:
        """Write the whole state, on rank 0. Collectives and a sync point."""
        whole = self._state.gathered(self._task)
        self._finish_saving()
        self._watchdog.mark(why, self._state.step, LONG_S)
        rest, shards = self._checkpointer.write_shards(whole, self._world)
        path = None
        if self._world.is_first:
            self._observers.flush()
            # before the mark: a rank that is gone must end what waits for its collective, not what writes
            self._stopwatch.synchronize("saving")
            self._watchdog.mark(f"{why}: writing", patience=LONG_S, writes=True)
            path = write(rest, self._facts(), shards)
        self._watchdog.mark("saved", self._state.step)
        self._stopwatch.mark("saving")
        return path

    def _diverged(self, step: int) -> Diverged:
        """Repeat the step's batch to find the first number that is not finite. Collectives."""
        self._watchdog.mark("looking for what is not finite", step, LONG_S)
        train_step = self._step
        batches = self._data.train_batches(train_step.sampler, range(step, self._plan.steps))
        own = islice(batches, len(train_step.micro_batches))
        began = where_it_began(train_step, own, self._plan.progress(step))
        ranks = from_all_ranks(self._world, evidence_of(began, train_step.sampler, step))
        compiled = is_compiled(train_step.task, self._state.model)
        scaled = train_step.precision.scaler.is_enabled()
        return divergence(step, self._state.left_out_in_a_row, ranks, self._plan, compiled, scaled)

    def _end(self, outcome: str) -> None:
        state, task, last = self._state, self._task, self._last
        if outcome != "failed":  # of which the place is told
            self._watchdog.mark("ending", patience=LONG_S)  # rank 0 may wait for a tracker, the others for it
        best = state.best_as(task.best_metric)
        result = Result(outcome, last.report.metrics, best, task.higher_is_better)
        times = self._stopwatch.times(last.ranks)
        self._observers.end(End(state.step, self._plan.steps, result, times))

    def _position(self) -> tuple[float, int]:
        done = self._state.step
        return self._plan.epoch(done), done * self._plan.batch_size

    def _facts(self) -> dict[str, object]:
        epoch, samples = self._position()
        return {
            "step": self._state.step,
            "epoch": epoch,
            "samples": samples,
            "world_size": self._world.size,
            **self._plan.position_facts,
            "micro_batch": self._plan.micro_batch,
            "eval_batch_size": self._plan.eval_batch_size,
            "groups": list(self._state.groups),
            "thawed": self._state.thawed,
            "outputs": list(self._data.outputs),
            "recall": dict(self._data.metadata()),
            "metrics": dict(self._state.metrics),
            "metrics_step": self._state.metrics_step,
            "best": self._state.best_as(self._task.best_metric),
        }
