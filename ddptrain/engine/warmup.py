"""Before the first step: check devices, count FLOPs, and run the warm-up passes."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ddptrain.api.recipe import Batch, Progress
from ddptrain.data.prefetch import changed, rows_of, tensors_of
from ddptrain.distributed.snapshot import unchanged
from ddptrain.engine.check_model import buffer_sizes, check_buffers
from ddptrain.engine.check_task import check_loss, looks_like_a_mean
from ddptrain.engine.compiled import eagerly, is_compiled
from ddptrain.engine.consistency import check_extra_state
from ddptrain.engine.evaluate import in_evaluation
from ddptrain.engine.flops import counter
from ddptrain.engine.rank_state import check_rank_state, same_rank_state
from ddptrain.engine.step import TrainStep
from ddptrain.errors import UserError

log = logging.getLogger("ddptrain")


def check_device(model: nn.Module, batch: Batch, device: torch.device) -> None:
    """Raise RuntimeError unless all parameters and the first batch are on the device."""
    for name, parameter in model.named_parameters():
        if parameter.device != device:
            raise RuntimeError(f"parameter {name} is on {parameter.device}, not on {device}")
    for tensor in tensors_of(batch):
        if tensor.device != device:
            raise RuntimeError(f"the first batch is on {tensor.device}, not on {device}: a bug in its Data")


def check_size(step: TrainStep, batch: Batch, name: str) -> None:
    """Raises UserError where the first batch is this rank's whole share of the global batch, by the rows of
    its tensors, and not a micro-batch. name: of its Data's class."""
    start, stop = step.sampler.share
    share, size = stop - start, step.micro_batches[0].size
    rows = {len(tensor) if tensor.ndim else 0 for tensor in tensors_of(batch)}
    if rows == {share} and size != share:
        raise UserError(
            f"{name}.train_batches: gave {share} samples for a micro-batch of {size} (train.micro_batch)."
            " Give a batch for each micro-batch, as sampler.samples(...) and sampler.slices(step) do.",
            everywhere=False,  # another rank's share may be one micro-batch
        )


def warm_up(step: TrainStep, batch: Batch, progress: Progress) -> int:
    """Run the passes that the strategy and the compiler need; returns the FLOPs of one, 0 if unknown.
    Gradients, buffers, extra state and the task's state are restored afterwards; the batch stays as it is,
    also where a pass writes into it."""
    task, strategy, model = step.task, step.strategy, step.state.model
    sizes, fresh = buffer_sizes(model), partial(changed, batch, Tensor.clone)
    with unchanged(model), same_rank_state(task):
        with same_rank_state(task):
            with step.seed.watching():
                flops = _counted(step, fresh(), progress)
            check_rank_state(task, step.sampler.share, step.micro_batches[0].size)
            _note_a_mean(step, fresh, progress)
        with _calls_are_checked(step):
            for _ in range(strategy.warm_up_passes(is_compiled(task, model))):
                step.forward_backward(fresh(), progress, step.micro_batches[0]._replace(ends_shard=True))
                step.check_gradients(progress)
                step.discard()
        check_buffers(model, sizes)
        if strategy.shards is None:  # else all shards start from the same
            check_extra_state(strategy.world, model, progress.step)
    return flops


@contextmanager
def _calls_are_checked(step: TrainStep) -> Iterator[None]:
    """Around warm-up passes. Raises UserError where the loss was not computed by the model that the task was
    given: the strategy's own would then take no part, and gradients would not be summed."""
    model, wrapped = step.state.model, step.state.wrapped
    if wrapped is model or is_compiled(step.task, model) or not step.strategy.warm_up_passes(compiled=False):
        yield
        return
    calls: list[object] = []
    hook = wrapped.register_forward_pre_hook(lambda *_: calls.append(True))
    try:
        yield
    finally:
        hook.remove()
    if not calls:
        raise UserError(
            f"{type(step.task).__name__}.loss: has not called the model that it was given. With"
            f" {step.strategy.describe()} that one sums the gradients; another one, kept by the task, is"
            " trained by each rank for itself. Call the argument."
        )


def _note_a_mean(step: TrainStep, fresh: Callable[[], Batch], progress: Progress) -> None:
    """Warn of a loss that is no sum, by the first step's batch and its halves: their sums add up to its own,
    and their means to twice its mean. Only for tensors with a row for each sample, and without the layers by
    which samples depend on each other or on chance. Not where a pass is a collective: whether there is one
    depends on this rank's batch. fresh: makes the batch."""
    if step.strategy.sharded:
        return
    plan, model, size = step.plan, step.state.model, step.micro_batches[0].size
    share, half = plan.batch_size // step.sampler.world_size, size // 2
    rows = {len(tensor) if tensor.ndim else 0 for tensor in tensors_of(fresh())}
    if progress.step or min(share, plan.micro_batch or share) < 4 or rows != {size} or step.task.rank_state():
        return
    mixing = [module for module in model.modules() if isinstance(module, _BatchNorm | _DropoutNd)]
    parts = (slice(size), slice(half), slice(half, size))
    try:
        with eagerly(), torch.no_grad(), in_evaluation(*mixing):
            losses = [
                step.forward(model, rows_of(fresh(), part), progress, step.micro_batches[0]) for part in parts
            ]
    except Exception as error:  # of half a batch, which a task need not take
        log.info(
            "note       Task.loss is not compared with that of half a batch: %s",
            str(error).partition("\n")[0],
        )
        return
    if looks_like_a_mean(*losses):
        log.warning(
            "note       %s.loss: the losses of half a batch are as large as that of all of it (%.4g for %d),"
            " so Loss.sum looks like a mean; it must be the sum over the items that count counts"
            " (reduction='sum')",
            type(step.task).__name__,
            float(losses[0].sum),
            int(losses[0].count),
        )


def _counted(step: TrainStep, batch: Batch, progress: Progress) -> int:
    """FLOPs of one pass of the bare model, eagerly. A failure here, under torch's counter, is only logged."""
    model = step.state.model
    try:
        with eagerly(), counter(next(model.parameters()).device) as counted:
            loss = step.forward(model, batch, progress, step.micro_batches[0])
            check_loss(step.task, loss)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if step.strategy.sharded:  # its own tensors are not those of the pass
                loss.sum.backward()
                model.zero_grad(set_to_none=True)
            else:  # DDP has hooks where gradients are added up, and static_graph counts their calls
                torch.autograd.grad(loss.sum, trained, allow_unused=True)
        return int(counted.get_total_flops())
    except UserError:
        raise
    except Exception as error:  # the counter lacks an operator; the task's own errors come again
        log.info("note       FLOPs are not counted: %s", str(error).partition("\n")[0])
        return 0
