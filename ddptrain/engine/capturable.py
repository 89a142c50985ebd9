"""What a step must be like to be captured in a CUDA graph: looked at before the first one."""

import math
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import SGD, Adam, AdamW

from ddptrain.api.recipe import Batch, Loss, Progress, Task
from ddptrain.api.sampler import MicroBatch
from ddptrain.distributed.comm import backend_for
from ddptrain.distributed.snapshot import unchanged, with_extra_state
from ddptrain.engine.rank_state import same_rank_state
from ddptrain.engine.step import TrainStep
from ddptrain.errors import UserError
from ddptrain.torch_private import is_fused, register_generator

WAY_OUT = "Use compile=step, or compile=off."
_ALIKE = 1e-5
"""Relative: losses of two passes, whose sums may be in another order."""
_CAPTURABLE = (Adam, AdamW, SGD)
"""Optimizers whose fused kernels read the rate from the device."""


def check_capturable(step: TrainStep, batch: Batch, progress: Progress) -> None:
    """By passes of the first micro-batch, of which nothing is kept. Raises UserError for what can't be
    captured. No collectives: ranks may fail by themselves."""
    _check_parts(step)
    _check_leaves(batch)
    strategy, state, micro_batch = step.strategy, step.state, step.micro_batches[0]
    no_sync = strategy.accumulate(state.wrapped, last=False) if strategy.shards is None else nullcontext()
    owners = {type(step.task).__name__: step.task, **dict(state.model.named_modules(prefix="model"))}
    with no_sync, step.phase.stopwatch.paused():
        try:
            with errors_told(type(step.task).__name__), without_progress(step):
                losses, kept = [], []
                for _ in range(2):
                    with unchanged(state.model), same_rank_state(step.task):
                        losses.append(_pass_without_waits(step, batch, progress, micro_batch))
                    step.discard()
                    kept.append({name: _plain_attributes(owner) for name, owner in owners.items()})
                _check_alike(float(losses[0]), float(losses[1]), *kept)
                with unchanged(state.model), same_rank_state(step.task):
                    _captured_pass(step, batch, progress, micro_batch)
        finally:
            step.discard()


def _check_parts(step: TrainStep) -> None:
    optimizer, why = step.state.optimizer, step.strategy.why_not_captured
    if step.strategy.world.size > 1 and backend_for(step.strategy.world) != "nccl":
        why = "gloo's all-reduce can't be captured; NCCL needs a GPU for each rank"
    if not is_fused(optimizer) or not (
        isinstance(optimizer, _CAPTURABLE) or getattr(optimizer, "takes_rates_on_device", False)
    ):
        why = (
            f"{type(optimizer).__name__} reads its rate on the host; fused Adam, AdamW and SGD,"
            " muon_with_adamw and muon_with_sgd do not"
        )
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        why = "the host waits for each kernel (debug.sync, CUDA_LAUNCH_BLOCKING)"
    if step.state.schedule.turns_momentum:
        why = "the schedule changes more of the optimizer than its rate (cycle_momentum)"
    if step.plan.skips_nonfinite and with_extra_state(list(step.state.model.modules())):
        why = "train.nonfinite=skip of a model with extra state (get_extra_state) waits for the device"
    if step.seed.seeds_pythons:
        why = f"{type(step.task).__name__} draws from the generators of Python or NumPy"
    if why:
        raise UserError(f"compile=graph: {why}. {WAY_OUT}")


def _pass_without_waits(step: TrainStep, batch: Batch, progress: Progress, micro_batch: MicroBatch) -> Tensor:
    """Returns the sum of the losses, 0-d. Raises RuntimeError where the host waits for the device, UserError
    where it draws."""
    step.seed(progress.step, micro_batch.stream)
    before = torch.get_rng_state()
    with warnings.catch_warnings(action="ignore"):  # it does not see every wait; a capture does
        torch.cuda.set_sync_debug_mode("error")
    try:
        loss = step.forward_backward(batch, progress, micro_batch._replace(ends_shard=False))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if not torch.equal(torch.get_rng_state(), before):
        raise UserError(
            f"compile=graph: Task.loss draws from the CPU's generator, and a captured"
            f" step would repeat that number. Draw on the device (torch.rand(..., device=...)). {WAY_OUT}"
        )
    return loss.sum.detach()


def _check_leaves(batch: Batch) -> None:
    """Raises UserError for what a batch holds beside tensors and plain values."""
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else None
    if isinstance(batch, PackedSequence):  # a tuple, with lengths on the host
        parts = None
    if parts is not None:
        for part in parts:
            _check_leaves(part)
    elif batch is not None and not isinstance(batch, Tensor | bool | int | float | str | slice | range):
        raise UserError(
            f"compile=graph: a batch holds a {type(batch).__name__}, and a captured step would keep the first"
            f" one. Give tensors. {WAY_OUT}",
            everywhere=False,
        )


def _plain_attributes(owner: object) -> dict[str, Any]:
    """Those whose change from pass to pass a captured step would not see."""
    kinds = Tensor | bool | int | float | str
    return {name: value for name, value in vars(owner).items() if isinstance(value, kinds)}


def _check_alike(
    first: float,
    second: float,
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raises UserError where the losses of two passes of one batch, with the same seeds, are apart by more
    than sums in another order are, or where the second has changed an attribute."""
    for owner, attributes in after.items():
        for name, value in attributes.items():
            known = before[owner].get(name)
            if known is not value and (isinstance(value, Tensor) or known != value):
                raise UserError(
                    f"compile=graph: {owner}.{name} is changed by each pass, on the host, and a captured step"
                    f" would not see that. Keep it in a buffer of the model (register_buffer). {WAY_OUT}"
                )
    if not math.isclose(first, second, rel_tol=_ALIKE) and math.isfinite(first):
        raise UserError(
            f"compile=graph: Task.loss gives {first:.6g} and then {second:.6g} for the same"
            " batch with the same seeds, so something on the host changes from call to call, and a captured"
            f" step would not see that. Keep it in a buffer of the model. {WAY_OUT}"
        )


def _captured_pass(step: TrainStep, batch: Batch, progress: Progress, micro_batch: MicroBatch) -> None:
    """Raises RuntimeError where it can't be captured."""
    generator = torch.Generator(step.strategy.world.device)
    graph = torch.cuda.CUDAGraph()
    register_generator(graph, generator)
    with step.seed.taken_from({micro_batch.stream: generator}), capturing(graph):
        step.forward_backward(batch, progress, micro_batch._replace(ends_shard=False))


def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> AbstractContextManager[Any]:
    """What the current stream does inside becomes the graph. pool: memory that captures share."""
    # of this thread: another one pins the next batches meanwhile
    stream = torch.cuda.current_stream()
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


@contextmanager
def errors_told(name: str) -> Iterator[None]:
    """Raises UserError for what torch and CUDA refuse. name: of the task."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        first: BaseException = error  # the end of a broken capture fails as well
        while first.__context__ is not None:
            first = first.__context__
        if isinstance(first, UserError):
            raise first from None
        own = [
            frame for frame in traceback.extract_tb(first.__traceback__) if "/torch/" not in frame.filename
        ]
        place = f" (line {own[-1].lineno} of {own[-1].filename})" if own else ""
        raise UserError(
            f"compile=graph: a step of {name} can't be captured:"
            f" {str(first).partition(chr(10))[0]}{place}. The host may not wait for the device, nor read a"
            f" number from it. {WAY_OUT}",
            everywhere=False,
        ) from error


class _Unknown:
    """In place of a step's `Progress`."""

    def __getattr__(self, name: str) -> Any:
        raise UserError(
            f"compile=graph: Task.loss reads progress.{name}, and a captured step would keep the number of"
            f" one step. {WAY_OUT}",
            everywhere=False,
        )


@final
class _WithoutProgress:
    """A task whose loss is not told of the step."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def loss(self, model: nn.Module, batch: Batch, _: Progress) -> Loss:
        unknown: Any = _Unknown()
        return self._task.loss(model, batch, unknown)


@contextmanager
def without_progress(step: TrainStep) -> Iterator[None]:
    """Inside, a loss that reads the step's `Progress` raises UserError."""
    task: Any = step.task
    step.task = cast(Task, _WithoutProgress(task))
    try:
        yield
    finally:
        step.task = task
