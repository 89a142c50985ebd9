"""The loop: from a batch to the optimizer's step, and what happens between steps."""

import time
from collections.abc import Iterator
from itertools import chain, islice
from typing import NoReturn

from torch import Tensor, nn

from ddptrain.api.observer import End, Evaluated, Log, Result, Saved, Start
from ddptrain.api.recipe import At, Batch, Data, Report, Task
from ddptrain.api.strategy import Strategy
from ddptrain.api.timing import Timing
from ddptrain.api.world import World
from ddptrain.distributed.comm import broadcast_buffers, from_all_ranks, from_first_rank, on_first_rank
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.consistency import check_replicas
from ddptrain.engine.evaluate import Interrupted, evaluate, figures_of
from ddptrain.engine.flops import peak_flops
from ddptrain.engine.health import Guard, Verdict
from ddptrain.engine.loss_scale import LossScale
from ddptrain.engine.nonfinite import Undo, divergence, evidence_of, where_it_began
from ddptrain.engine.optimizer_step import OptimizerStep
from ddptrain.engine.plan import Plan
from ddptrain.engine.precision import Precision
from ddptrain.engine.seeding import StepSeed
from ddptrain.engine.state import TrainState
from ddptrain.engine.stop_rule import Judge, Standing, Steps, always
from ddptrain.engine.stopwatch import Stopwatch
from ddptrain.engine.warmup import check_device, warm_up
from ddptrain.errors import Diverged, OutOfStep, Stopped
from ddptrain.observe.dispatch import Observers
from ddptrain.watchdog.watchdog import LONG_S, Watchdog


class Engine:
    """Trains a task on data, as one rank of a world."""

    def __init__(
        self,
        task: Task,
        data: Data,
        world: World,
        strategy: Strategy,
        precision: Precision,
        plan: Plan,
        checkpointer: Checkpointer,
        observers: Observers,
    ) -> None:
        self._task = task
        self._data = data
        self._world = world
        self._strategy = strategy
        self._precision = precision
        self._plan = plan
        self._checkpointer = checkpointer
        self._observers = observers
        self._sampler = plan.sampler(world)
        self._pieces = self._sampler.pieces
        self._seed_step = StepSeed(plan.seed, world, strategy.further_gpus)
        self._watch = Stopwatch(world.device)
        self._ranks: list[Timing] = []
        self._watchdog = Watchdog(world)
        self._mean = LossScale(world, self._sampler, strategy.averages_over)
        self._grad_norm: Tensor | None = None
        self._lr = 0.0
        self._saved_at = -1
        self._evaluated_at: int | None = None
        self._stopping = False
        self._last = Report({})

    def fit(
        self,
        state: TrainState,
        watchdog: Watchdog | None = None,
        judge: Judge = always,
        through: Steps = iter,
    ) -> Report:
        """Train from ``state.step`` to the plan's end; returns the last evaluation.

        watchdog: what watches over this rank, and is asked whether to stop. judge: asked on rank 0 after each
        evaluation whether to go on. through: goes through the steps.
        Raises Stopped where it was asked to, Diverged where the loss or a gradient left the finite numbers.
        """
        start, outcome = state.step, "failed"
        self._watchdog, self._judge = watchdog or self._watchdog, judge
        self._guard = Guard(self._world, state.model, self._strategy.flag_bucket(state.wrapped))
        self._undo = Undo(self._task, self._strategy, state.model)
        self._update = OptimizerStep(state.optimizer, self._precision.scaler)
        batches, flops = self._opened(state)
        peak = peak_flops(self._world.device, self._precision.name) * self._world.size
        preview = self._data.preview() if self._world.is_first else None
        # a checkpoint is written before the evaluation at its step: that comes again
        evaluates = state.evaluation_due
        self._observers.start(Start(start, self._plan.steps, evaluates, preview))
        self._watch.begin(flops, peak, state.wrapped)
        try:
            if evaluates:
                self._evaluate(state)
            for step in through(range(start, self._plan.steps)):
                self._step(state, self._plan.at(step), batches)
                state.step = done = step + 1
                self._heed(state, self._guard.ready())
                if self._plan.verifies(done):
                    check_replicas(self._world, state.model, done)
                if self._plan.logs(done):
                    self._log(state)
                if self._plan.saves(done) or self._stopping:
                    self._save(state)
                if self._stopping:
                    raise Stopped(f"stopped at step {done}")
                if self._plan.evaluates(done):
                    self._evaluate(state)
            self._checkpointer.finish()
            self._watch.settle()
            outcome = "done"
        except Stopped:
            self._checkpointer.finish()
            from_first_rank(self._world, None)  # the first rank to exit makes torchrun end the others
            self._watchdog.saved()
            outcome = "stopped"
            raise
        except Diverged:
            self._checkpointer.finish()
            outcome = "diverged"
            raise
        finally:
            best, higher = state.best_as(self._task.best_metric), self._task.higher_is_better
            result = Result(outcome, self._last.metrics, best, higher)
            self._observers.end(End(state.step, self._plan.steps, result, self._watch.times(self._ranks)))
        return self._last

    def _step(self, state: TrainState, at: At, batches: Iterator[Batch]) -> None:
        """One optimizer step over one global batch. Nothing here waits for the device, except, on a GPU,
        for the step before (`Guard`)."""
        counts: list[tuple[int, Tensor]] = []
        if self._plan.skips_nonfinite:
            self._undo.remember()
        for i, piece in enumerate(self._pieces):
            self._watchdog.mark("waiting for a batch", at.step)
            batch = self._watch.next(batches)
            self._watchdog.mark("forward", at.step)
            self._seed_step(at.step, piece.stream)
            with self._strategy.sync(state.wrapped, last=piece.ends_shard):
                with self._precision.autocast():
                    loss = self._task.loss(state.wrapped, batch, at)
                if i == 0:
                    # here and not after the step: memory given back before a forward pass is taken again
                    # page by page (measured on CPUs: 6 % of a MobileNetV3 step)
                    self._update.forget_gradients()
                vote = self._guard.vote(at.step, self._watchdog.stop is not None, loss, piece.ends_shard)
                self._watchdog.mark("backward", at.step)
                self._watch.mark("forward")
                # gradients are summed over ranks while this runs (DDP), with the ranks' votes among them
                self._precision.backward(loss.sum, self._mean.weight(loss, piece.size), vote)
                if vote is None:  # else it has marked its own end, before the wait for other ranks
                    self._watch.mark("backward")
            self._watch.mark("all_reduce")
            state.meter.add(loss, piece.shard)
            if isinstance(loss.count, Tensor):
                counts.append((piece.shard, loss.count))
        self._watchdog.mark("optimizer", at.step)
        self._precision.unscale(state.optimizer)
        if counts:
            self._mean.rescale(state.model, counts)
        self._heed(state, self._guard.all())
        nonfinite = self._guard.judge(at.step)
        if self._plan.clip_norm is not None:
            self._grad_norm = nn.utils.clip_grad_norm_(state.model.parameters(), self._plan.clip_norm)
        self._lr = state.optimizer.param_groups[0]["lr"]
        self._update(nonfinite)
        if self._plan.skips_nonfinite:
            self._undo.put_back(nonfinite)
        self._watch.count(self._sampler.batch_size)

    def _heed(self, state: TrainState, verdicts: list[Verdict]) -> None:
        """What follows from the steps' outcomes, the same on all ranks."""
        for verdict in verdicts:
            if not verdict.aligned:
                raise OutOfStep(
                    f"the ranks are not at the same step (rank {self._world.rank} is at {verdict.step}): one"
                    " has left out a backward pass, or done one more. Look for code that only some ranks run."
                )
            self._stopping |= verdict.stop
            if verdict.finite:
                state.average.update()
                state.scheduler.step()
                state.applied, state.skipped = state.applied + 1, 0
                continue
            state.skipped += 1
            # an overflow in a gradient alone is fp16's scaler finding its scale
            expected = self._precision.scaler.is_enabled() and verdict.loss_finite
            tolerated = self._plan.skips_nonfinite or expected
            if not tolerated or state.skipped > self._plan.nonfinite_limit:
                self._diverged(state, verdict)

    def _diverged(self, state: TrainState, verdict: Verdict) -> None:
        """Say where it began, from the step's own batch. Collectives; raises Diverged on all ranks."""
        at = self._plan.at(verdict.step)
        self._watchdog.mark("looking for what is not finite", verdict.step, LONG_S)
        batches = self._data.train_batches(self._sampler, range(verdict.step, self._plan.steps))
        own = islice(batches, len(self._pieces))
        began = where_it_began(
            self._task, state.model, self._precision, own, self._sampler, self._seed_step, at
        )
        ranks = from_all_ranks(self._world, evidence_of(began, self._sampler, verdict.step))
        raise divergence(verdict.step, state.skipped, ranks)

    def _log(self, state: TrainState) -> None:
        """A collective and a sync point, every ``log.every`` steps."""
        self._watch.mark("optimizer")
        self._heed(state, self._guard.all())
        values = state.meter.read()
        if self._grad_norm is not None:
            values["grad_norm"] = float(self._grad_norm)
        values["lr"] = float(self._lr)
        if state.step > state.applied:
            values["left_out"] = float(state.step - state.applied)
        done = state.step
        self._observers.log(Log(done, *self._position(done), values, self._watch.lap("log")))
        self._watch.mark("logging")

    def _evaluate(self, state: TrainState) -> None:
        self._heed(state, self._guard.all())
        self._watch.settle()
        began = time.perf_counter()
        broadcast_buffers(self._world, state.model)
        model = state.average.model()
        if model is not state.model:
            broadcast_buffers(self._world, model)
        try:
            size = self._plan.eval_batch_size
            self._last = evaluate(
                self._task, model, self._data, self._world, self._precision, size, self._watchdog
            )
        except Interrupted:
            self._save_and_stop(state, "stopped in the evaluation")
        self._evaluated_at = state.step
        figures = dict(self._last.figures)
        if self._world.is_first:
            figures |= figures_of(self._task, model, self._precision)
        metrics, name, higher = self._last.metrics, self._task.best_metric, self._task.higher_is_better
        self._watch.mark("evaluating")
        is_best = state.improves(metrics[name], higher)
        if is_best:
            state.evaluation_due = False
            state.gather(self._task, self._world)
            if self._world.is_first:
                self._observers.settle()
                self._watchdog.mark("saving the best", state.step, LONG_S)
                self._checkpointer.save_best(state.state_dict(), self._facts(state))
            self._watchdog.mark("saved", state.step)
            self._watch.mark("saving")
        self._ranks = from_all_ranks(self._world, self._watch.total())
        position, lap = self._position(state.step), self._watch.lap("evaluation").timing
        seconds = time.perf_counter() - began
        self._observers.evaluated(Evaluated(state.step, *position, metrics, figures, seconds, is_best, lap))
        self._watch.mark("drawing")
        standing = Standing(state.step, self._plan.steps, name, metrics[name], higher)
        if not on_first_rank(self._world, lambda: self._judge(standing)):  # a collective
            self._save_and_stop(state, "pruned")

    def _save_and_stop(self, state: TrainState, why: str) -> NoReturn:
        if self._saved_at != state.step:
            self._save(state)
        raise Stopped(f"{why} at step {state.step}")

    def _save(self, state: TrainState) -> None:
        self._heed(state, self._guard.all())
        self._watch.settle()
        state.evaluation_due = self._plan.evaluates(state.step)
        state.gather(self._task, self._world)
        self._watchdog.mark("saving", state.step, LONG_S)
        if self._world.is_first:
            self._observers.settle()
            path = self._checkpointer.save(state.state_dict(), self._facts(state))
            self._observers.saved(Saved(state.step, path))
        self._watchdog.mark("saved", state.step)
        self._saved_at = state.step
        self._watch.mark("saving")

    def _opened(self, state: TrainState) -> tuple[Iterator[Batch], float]:
        """The batches still to come, after a look at the first: is everything where it should be, and how
        many FLOPs does a sample cost?"""
        state.wrapped.train()
        steps, device = range(state.step, self._plan.steps), self._world.device
        batches = self._data.train_batches(self._sampler, steps)
        if not steps:
            return iter(()), 0.0
        state.scatter(self._task, self._sampler.share, device)
        first, at = next(batches), self._plan.at(state.step)
        check_device(state.model, first, device)
        self._seed_step(at.step, self._pieces[0].stream)
        flops = warm_up(self._task, state, self._strategy, self._precision, first, at)
        return chain([first], batches), flops / self._pieces[0].size

    def _position(self, done: int) -> tuple[float, int]:
        return self._plan.epoch(done), done * self._plan.batch_size

    def _facts(self, state: TrainState) -> dict[str, object]:
        epoch, samples = self._position(state.step)
        return {
            "step": state.step,
            "epoch": epoch,
            "samples": samples,
            "world_size": self._world.size,
            **self._plan.position_facts,
            "outputs": list(self._data.outputs),
            "recall": dict(self._data.metadata()),
            "metrics": dict(self._last.metrics),
            "metrics_step": self._evaluated_at,
        }
