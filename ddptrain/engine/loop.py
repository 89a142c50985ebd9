"""The loop: from a batch to the optimizer's step, and what happens between steps."""

import logging
import math
import time
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddptrain.data.prefetch import tensors_of
from ddptrain.distributed.comm import add_up, broadcast_buffers, from_all_ranks
from ddptrain.distributed.strategy import Strategy
from ddptrain.distributed.world import World
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.evaluate import evaluate, figures_of
from ddptrain.engine.plan import Plan
from ddptrain.engine.precision import Precision
from ddptrain.engine.seeding import StepSeed
from ddptrain.engine.state import TrainState
from ddptrain.engine.stopwatch import Stopwatch
from ddptrain.errors import Diverged
from ddptrain.observe.observer import End, Evaluated, Log, Observers, Saved, Start
from ddptrain.protocols import At, Batch, Data, Loss, Report, Task

log = logging.getLogger(__name__)


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
        self._seed_step = StepSeed(plan.seed, world)
        self._watch = Stopwatch(world.device)
        self._weights: dict[tuple[float, torch.dtype], Tensor] = {}
        self._micro_sizes = self._sampler.micro_sizes
        self._grad_norm: Tensor | None = None
        self._lr = 0.0
        self._last = Report({})
        self._best: dict[str, float] = {}

    def fit(self, state: TrainState) -> Report:
        """Train from ``state.step`` to the plan's end; returns the last evaluation.

        Raises Diverged where the loss left the finite numbers.
        """
        start, outcome = state.step, "failed"
        if state.best is not None:
            self._best = {self._task.best_metric: state.best, "step": state.best_step}
        batches = self._opened(state)
        preview = self._data.preview() if self._world.is_first else None
        self._observers.start(Start(start, self._plan.steps, preview))
        self._watch.begin()
        try:
            for step in range(start, self._plan.steps):
                self._step(state, self._plan.at(step), batches)
                state.step = done = step + 1
                if self._plan.logs(done):
                    self._log(state)
                if self._plan.evaluates(done):
                    self._evaluate(state)
                if self._plan.saves(done):
                    self._save(state)
            outcome = "done"
        except Diverged:
            outcome = "diverged"
            raise
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            speed = self._watch.total()
            self._observers.end(
                End(state.step, self._plan.steps, outcome, self._last.metrics, self._best, speed)
            )
        return self._last

    def _step(self, state: TrainState, at: At, batches: Iterator[Batch]) -> None:
        """One optimizer step over one global batch. Nothing here waits for the device."""
        self._seed_step(at.step)
        last = len(self._micro_sizes) - 1
        counts: list[Tensor] = []
        for i, size in enumerate(self._micro_sizes):
            batch = self._watch.next(batches)
            with self._strategy.sync(state.wrapped, last=i == last):
                with self._precision.autocast():
                    loss = self._task.loss(state.wrapped, batch, at)
                if i == 0:
                    # here and not after the step: memory given back before a forward pass is taken again
                    # page by page (measured on CPUs: 6 % of a MobileNetV3 step)
                    state.optimizer.zero_grad(set_to_none=True)
                # DDP all-reduces bucket by bucket while this runs, in the last micro-batch only
                self._precision.backward(loss.sum, self._weight(loss, size))
            state.meter.add(loss)
            if isinstance(loss.count, Tensor):
                counts.append(loss.count)
        self._precision.unscale(state.optimizer)
        if counts:
            self._rescale(state.model, counts)
        if self._plan.clip_norm is not None:
            self._grad_norm = nn.utils.clip_grad_norm_(state.model.parameters(), self._plan.clip_norm)
        self._precision.step(state.optimizer)
        self._lr = state.optimizer.param_groups[0]["lr"]
        state.scheduler.step()
        state.average.update()
        self._watch.count(self._sampler.batch_size)

    def _weight(self, loss: Loss, size: int) -> Tensor:
        """What a loss sum is multiplied by, so that gradients averaged over ranks and added over
        micro-batches become those of the mean over the global batch.

        Where the count is only known on the device, the global batch's size stands in for it until
        `_rescale`.
        """
        each = loss.count / size if isinstance(loss.count, int) else 1.0
        value = self._world.size / (each * self._sampler.batch_size)
        key = (value, loss.sum.dtype)
        if key not in self._weights:
            self._weights[key] = torch.full((), value, dtype=loss.sum.dtype, device=loss.sum.device)
        return self._weights[key]

    def _rescale(self, model: nn.Module, counts: list[Tensor]) -> None:
        """Divide by the global count instead of the global batch size. One small all-reduce."""
        total = add_up(self._world, torch.stack(counts).sum().to(torch.float32))
        factor = self._sampler.batch_size / total.clamp(min=1)
        torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], factor)

    def _log(self, state: TrainState) -> None:
        """A collective and a sync point, every ``log.every`` steps."""
        values = state.meter.read()
        if self._grad_norm is not None:
            values["grad_norm"] = float(self._grad_norm)
        values["lr"] = float(self._lr)
        done = state.step
        self._observers.log(Log(done, *self._position(done), values, self._watch.lap()))
        if not math.isfinite(values["loss"]):
            raise Diverged(
                f"the mean loss of the last steps up to {done} is {values['loss']}: the training has"
                " diverged. A lower optim.lr, a longer sched.warmup or train.clip_norm=1 usually mends it."
                " Checkpoints of earlier steps are kept."
            )

    def _evaluate(self, state: TrainState) -> None:
        self._watch.settle()
        began = time.perf_counter()
        broadcast_buffers(self._world, state.model)
        model = state.average.model()
        if model is not state.model:
            broadcast_buffers(self._world, model)
        self._last = evaluate(
            self._task, model, self._data, self._world, self._precision, self._plan.eval_batch_size
        )
        figures = dict(self._last.figures)
        if self._world.is_first:
            figures |= figures_of(self._task, model, self._precision)
        metrics, name = self._last.metrics, self._task.best_metric
        sign = 1 if self._task.higher_is_better else -1
        known = state.best is not None and not math.isnan(state.best)
        is_best = not known or sign * metrics[name] > sign * (state.best or 0.0)
        if is_best:
            state.best, state.best_step = metrics[name], state.step
            self._gather(state)
            if self._world.is_first:
                self._checkpointer.save_best(state.state_dict(), self._facts(state))
        assert state.best is not None
        self._best = {name: state.best, "step": state.best_step}
        seconds = time.perf_counter() - began
        self._watch.pause(seconds)
        self._observers.evaluated(
            Evaluated(state.step, *self._position(state.step), metrics, figures, seconds, is_best)
        )

    def _save(self, state: TrainState) -> None:
        self._watch.settle()
        began = time.perf_counter()
        self._gather(state)
        if self._world.is_first:
            path = self._checkpointer.save(state.state_dict(), self._facts(state))
            self._observers.saved(Saved(state.step, path))
        self._watch.pause(time.perf_counter() - began)

    def _gather(self, state: TrainState) -> None:
        """Bring to rank 0, which writes the checkpoint, what each rank has by itself. Collectives."""
        state.meter.gather()
        if rows := {name: value.cpu() for name, value in self._task.carried().items()}:
            ranks = from_all_ranks(self._world, rows)
            state.carried = {name: torch.cat([rank[name] for rank in ranks]) for name in rows}

    def _opened(self, state: TrainState) -> Iterator[Batch]:
        """The batches still to come, after a look at the first: is everything where it should be?"""
        state.wrapped.train()
        steps = range(state.step, self._plan.steps)
        batches = self._data.train_batches(self._sampler, steps)
        if not steps:
            return iter(())
        mine, device = slice(*self._sampler.share), self._world.device
        self._task.carry_on({name: rows[mine].to(device) for name, rows in state.carried.items()})
        first = next(batches)
        _check_device(state.model, first, device)
        if isinstance(state.wrapped, DistributedDataParallel):
            self._rehearse(state, first)
        return chain([first], batches)

    def _rehearse(self, state: TrainState, batch: Batch) -> None:
        """One throw-away forward and backward. DDP reorders its buckets after the first backward it
        sees; were that a real step, a resumed run would sum in another order than one that went on."""
        kept, carried = [buffer.clone() for buffer in state.model.buffers()], self._task.carried()
        self._seed_step(state.step)
        with self._precision.autocast():
            loss = self._task.loss(state.wrapped, batch, self._plan.at(state.step))
        loss.sum.backward()
        state.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in zip(state.model.buffers(), kept, strict=True):
                buffer.copy_(value)
        self._task.carry_on(carried)

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
            "recall": dict(self._data.facts()),
            "metrics": dict(self._last.metrics),
        }


def _check_device(model: nn.Module, batch: Batch, device: torch.device) -> None:
    """Before the first step: is every weight and the first batch on the device? Else it would train
    on another one than the log says, or fail deep inside."""
    for name, parameter in model.named_parameters():
        if parameter.device != device:
            raise RuntimeError(f"parameter {name} is on {parameter.device}, not on {device}")
    for tensor in tensors_of(batch):
        if tensor.device != device:
            raise RuntimeError(f"the first batch is on {tensor.device}, not on {device}: a bug in its Data")
