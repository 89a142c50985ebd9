"""compile=graph: what the device does in a step, captured once in a CUDA graph and replayed by one launch.

A replay reads the memory that the capture has seen. So each batch is copied into the place of the first one,
what only the host knows of a step (rates, the average's weight, the flags) is written into a tensor, and the
generators are seeded. Nothing else that the host decides may differ between steps:
`ddptrain.engine.capturable` looks for it before the first one.

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

import gc
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddptrain.api.recipe import Batch, Progress, Task
from ddptrain.data.prefetch import changed, tensors_of
from ddptrain.distributed.comm import from_first_rank, on_all_ranks
from ddptrain.distributed.snapshot import unchanged
from ddptrain.engine.capturable import WAY_OUT, capturing, check_capturable, errors_told, without_progress
from ddptrain.engine.out_of_memory import in_one_line
from ddptrain.engine.rank_state import copied_rank_state, same_rank_state
from ddptrain.engine.step import Applied, TrainStep
from ddptrain.errors import UserError
from ddptrain.torch_private import forget_unscaled, register_generator

log = logging.getLogger("ddptrain")

_EAGER_STEPS = 3
"""Before the capture: optimizers make their state in the first one."""
_EAGER_STEPS_UNDER_DDP = 12
"""In its first ten passes DDP times itself, for which the host reads events."""
_MEASURED_STEPS = 5
_LAUNCHING = 0.8
"""Share of a step that the host needs to launch it, from which on that is what limits it."""
_FORMS = 8
"""Most captures: of detection's batches, for example, with room for more and more boxes."""


def own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Around a run whose steps are captured, before its model is made: inside, this thread queues its work on
    a stream of its own. The default one can't be captured, and backward passes run where the first ran."""
    return torch.cuda.stream(torch.cuda.Stream(device))


@dataclass(frozen=True, slots=True)
class _Capture:
    """A step that was captured, and what its replays read."""

    graph: torch.cuda.CUDAGraph
    batches: Sequence[Batch]
    form: Any
    """Of the batches."""
    applied: Applied
    numbers: Tensor
    """float32, of one step: what `StepGraph._numbers` gives."""
    generators: Mapping[int, torch.Generator]
    """By the micro-batch's stream."""
    settings: Sequence[dict[str, Any]]
    """Of the optimizer's groups, without the rates."""
    carried: Mapping[str, Tensor]
    """The task's `rank_state`."""
    held: Sequence[Mapping[str, Any]]
    """Attributes of the task and of all layers: what is kept there (a mask) may be read by the graph, and
    replaced by an evaluation."""
    sums: Tensor | None
    """The meter's."""


@final
class StepGraph:
    """A `TrainStep` that is captured after some eager steps, once for each form of its batches that comes
    again; where these are more than a few, the others are trained eagerly.

    where_launches_limit: measure some steps first, and go on eagerly where launches are not what limits them.
    """

    def __init__(self, step: TrainStep, where_launches_limit: bool = False) -> None:
        self._step = step
        self._under_ddp = isinstance(step.state.wrapped, DistributedDataParallel)  # one rank's, too
        self._eager_left = _EAGER_STEPS_UNDER_DDP if self._under_ddp else _EAGER_STEPS
        self._measures_left = _MEASURED_STEPS if where_launches_limit else 0
        self._measured: list[tuple[float, float]] = []
        """Seconds of the host and in all."""
        self._stays_eager = False
        self._captures: list[_Capture] = []
        """By the form of the batches; they share their memory."""
        self._forms: deque[Any] = deque(maxlen=8 * _FORMS)
        """Of the last batches that were trained eagerly."""
        self._told_of_forms = False

    def __call__(self, batches: Iterator[Batch], progress: Progress) -> None:
        """As `TrainStep` does."""
        step = self._step
        if self._stays_eager:
            step(batches, progress)
            return
        with step.phase("data", progress.step):
            own = [next(batches) for _ in step.micro_batches]
        if self._eager_left:
            self._eager_left -= 1
            self._eagerly(own, progress)
        elif self._measures_left:
            self._measure(own, progress)
        else:
            self._step_by_graph(own, progress)

    def checked(self, batch: Batch, progress: Progress) -> "TrainStep | StepGraph":
        """Itself, or the eager step where it would be measured and can't be captured. By passes of the first
        micro-batch, of which nothing is kept. Collectives. Raises UserError for what can't be captured."""
        step = self._step
        with unchanged(step.state.model), same_rank_state(step.task):
            # one more warm-up: at the beginning of its second pass DDP rebuilds its buckets
            step.forward_backward(batch, progress, step.micro_batches[0]._replace(ends_shard=True))
            step.discard()
        try:
            on_all_ranks(step.strategy.world, lambda: self._check(batch, progress))
        except UserError as why:
            if not self._measures_left:
                raise
            _note_eager(why)
        else:
            return self
        _release()
        return step

    def _check(self, batch: Batch, progress: Progress) -> None:
        """Raises UserError for what can't be captured; where steps are measured, also for lack of memory."""
        try:
            check_capturable(self._step, batch, progress)
        except torch.OutOfMemoryError as error:
            if not self._measures_left:
                raise
            raise UserError(_no_room(error)) from error

    def _measure(self, own: Sequence[Batch], progress: Progress) -> None:
        """Train eagerly, and measure what launching takes. A sync point; at the end a collective."""
        step, device = self._step, self._step.strategy.world.device
        step.synchronize()
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        self._eagerly(own, progress)
        launched = time.perf_counter()
        torch.cuda.synchronize(device)
        self._measured.append((launched - began, time.perf_counter() - began))
        self._measures_left -= 1
        if self._measures_left:
            return
        host, whole = from_first_rank(
            step.strategy.world, tuple(map(median, zip(*self._measured, strict=True)))
        )
        self._stays_eager = host < _LAUNCHING * whole
        log.info(
            "compile    auto: the host launches a step in %.2f of %.2f ms, so steps are %s",
            *(1e3 * host, 1e3 * whole, "not captured" if self._stays_eager else "captured in a CUDA graph"),
        )

    def _step_by_graph(self, own: Sequence[Batch], progress: Progress) -> None:
        step, form = self._step, _form(own)
        if self._captures and self._captures[0].sums is not step.state.meter.tensor:  # a new name is logged
            self._drop()
        capture = next((one for one in self._captures if one.form == form), None)
        if capture is None and form in self._forms and len(self._captures) < _FORMS:
            capture = self._captured_or_not(own, progress)
        if capture is not None:
            self._replay(capture, own, progress)
            return
        many = len(self._captures) == _FORMS or len(self._forms) == self._forms.maxlen
        if many and not self._told_of_forms:
            log.info(
                "note       compile=graph: batches come in more than %d forms (sizes and types of tensors,"
                " and the rest of them); others are trained eagerly",
                _FORMS,
            )
            self._told_of_forms = True
        self._eagerly(own, progress)
        if step.task.rank_state():  # it is in other memory now
            self._drop()

    def _captured_or_not(self, own: Sequence[Batch], progress: Progress) -> _Capture | None:
        """None where this step is eager: it logs a name for the first time, or where steps were measured, and
        can't be captured."""
        try:
            capture = self._captured(own, progress)
        except (UserError, torch.OutOfMemoryError) as why:
            if not self._measured:
                raise
            if self._under_ddp or self._step.strategy.shards is not None:  # can't take back a pass
                said = f"compile=auto: steps can't be captured: {_reason(why)}. Set compile=off."
                raise UserError(said, everywhere=False) from why
            _note_eager(why)
            self._stays_eager = True
        if self._stays_eager:
            self._step.discard()  # a capture computes nothing: what its passes left is no number
            forget_unscaled(self._step.state.scaler)
            self._drop()
            _release()
            return None
        if capture is not None:
            self._captures.append(capture)
        return capture

    def _drop(self) -> None:
        """Give up all captures. A sync point."""
        torch.cuda.synchronize(self._step.strategy.world.device)
        self._captures.clear()

    def _eagerly(self, own: Sequence[Batch], progress: Progress) -> None:
        self._forms.append(_form(own))
        self._step(iter(own), progress)

    def _replay(self, capture: _Capture, own: Sequence[Batch], progress: Progress) -> None:
        step, state = self._step, self._step.state
        with step.phase("replay", progress.step):
            state.schedule.at(progress.step)
            if _settings(state.optimizer) != capture.settings:
                raise UserError(
                    "compile=graph: the schedule changes more of the optimizer than its rate, and a captured"
                    f" step does not see that. {WAY_OUT}"
                )
            stop = step.phase.watchdog.stop is not None
            numbers = torch.tensor(self._numbers(progress, stop), pin_memory=True)
            capture.numbers.copy_(numbers, non_blocking=True)
            for to, tensor in zip(tensors_of(capture.batches), tensors_of(own), strict=True):
                to.copy_(tensor)
            step.seed.seed_captured(capture.generators, progress.step)
            capture.graph.replay()
            # what draws between steps follows from the step, too
            step.seed(progress.step, step.micro_batches[-1].stream)
            step.synchronize()  # the step before
            step.expect(progress, stop, capture.applied)
        step.phase.stopwatch.count(step.sampler.batch_size)

    def _captured(self, own: Sequence[Batch], progress: Progress) -> _Capture | None:
        """None where the step logs a name for the first time. Raises UserError."""
        step, state = self._step, self._step.state
        step.synchronize()
        sums = state.meter.tensor
        batches = [changed(batch, torch.clone) for batch in own]
        numbers = torch.zeros(len(self._numbers(progress, False)), device=step.strategy.world.device)
        generators = {one.stream: torch.Generator(numbers.device) for one in step.micro_batches}
        graph = torch.cuda.CUDAGraph()
        pool = self._captures[0].graph.pool() if self._captures else None
        for generator in generators.values():
            register_generator(graph, generator)
        carried = self._captures[0].carried if self._captures else copied_rank_state(step.task)
        step.task.load_rank_state(carried)
        _check_carried(step.task, carried)
        buffers = [dict(layer._buffers) for layer in state.model.modules()]
        flags = state.strategy.flags
        settings = _settings(state.optimizer)
        try:
            with (
                errors_told(type(step.task).__name__), step.phase.stopwatch.paused(), without_progress(step),
                step.seed.taken_from(generators), _rates_on_device(state.optimizer, numbers),
                capturing(graph, pool),
            ):  # fmt: skip
                flags.captured = flags.like(numbers[-2:])
                counts = step.passes(iter(batches), progress)
                applied = step.apply(counts, progress, numbers[-3])
                for name, rows in step.task.rank_state().items():
                    carried[name].copy_(rows)
                _in_their_own_memory(state.model, buffers)
        except BaseException:
            for layer, before in zip(state.model.modules(), buffers, strict=True):
                layer._buffers.update(before)
            raise
        finally:
            flags.captured = None
            step.task.load_rank_state(carried)
        if sums is not None and sums is not state.meter.tensor:
            state.meter.forget_names_since(sums)
            return None
        log.info("graph      captured at step %d: each step is one launch", progress.step + 1)
        form, held = _form(own), [dict(vars(owner)) for owner in (step.task, *state.model.modules())]
        return _Capture(graph, batches, form, applied, numbers, generators, settings, carried, held, sums)

    def _numbers(self, progress: Progress, stop: bool) -> list[float]:
        """What the host knows of a step: the groups' rates, the average's weight, the two flags."""
        state = self._step.state
        rates = [group["lr"] for group in state.optimizer.param_groups]
        flags = state.strategy.flags.numbers(progress.step, stop)
        return [*rates, state.average.weight(progress.step), *flags]


def _note_eager(why: UserError | torch.OutOfMemoryError) -> None:
    log.info("compile    auto: steps are not captured: %s", _reason(why))


def _reason(why: UserError | torch.OutOfMemoryError) -> str:
    return str(why).removeprefix("compile=graph: ") if isinstance(why, UserError) else _no_room(why)


def _no_room(error: torch.OutOfMemoryError) -> str:
    """A graph keeps all of its step's memory, beside what eager steps have taken."""
    return f"there is no room for the memory that a graph keeps ({in_one_line(error)})"


def _release() -> None:
    """The memory of a broken graph, which a cycle may hold."""
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def _rates_on_device(optimizer: Optimizer, numbers: Tensor) -> Iterator[None]:
    """Inside, its groups' rates are the first of the numbers, in the device's memory."""
    before = [dict(group) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, numbers, strict=False):
        group["lr"] = rate
        if "capturable" in group:
            group["capturable"] = True
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group.update(own)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of each group, but for its rate."""
    return [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]


@torch.no_grad()
def _in_their_own_memory(model: nn.Module, before: Sequence[Mapping[str, Tensor | None]]) -> None:
    """Buffers that a layer has replaced in its pass: a replay reads those that were there before."""
    for layer, buffers in zip(model.modules(), before, strict=True):
        for name, own in buffers.items():
            now = layer._buffers.get(name)
            if now is not own and own is not None and now is not None:
                if (now.shape, now.dtype) != (own.shape, own.dtype):
                    raise UserError(
                        f"compile=graph: buffer {name} of {type(layer).__name__} changes its size or dtype,"
                        f" and a captured step keeps its memory. {WAY_OUT}"
                    )
                own.copy_(now)
                layer._buffers[name] = own


def _check_carried(task: Task, carried: Mapping[str, Tensor]) -> None:
    now = task.rank_state()
    if any(now[name].data_ptr() != rows.data_ptr() for name, rows in carried.items()):
        raise UserError(
            f"compile=graph: {type(task).__name__}.load_rank_state must keep the tensors that it is given: a"
            f" captured step goes on from their memory. {WAY_OUT}"
        )


def _form(batches: Sequence[Batch]) -> Any:
    """What must be the same in each step."""
    return [changed(batch, _described) for batch in batches]


def _described(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype
