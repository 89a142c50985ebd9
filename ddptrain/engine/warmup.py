"""Before the first step: is everything on the device, and is DDP in the order it will keep?"""

import logging

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddptrain.api.recipe import At, Batch, Task
from ddptrain.api.strategy import Strategy
from ddptrain.data.prefetch import tensors_of
from ddptrain.engine.compiled import eagerly, is_compiled
from ddptrain.engine.flops import counter
from ddptrain.engine.precision import Precision
from ddptrain.engine.state import TrainState

log = logging.getLogger("ddptrain")


def check_device(model: nn.Module, batch: Batch, device: torch.device) -> None:
    """Is every weight and the first batch on the device? Else it would train on another one than the
    log says, or fail deep inside."""
    for name, parameter in model.named_parameters():
        if parameter.device != device:
            raise RuntimeError(f"parameter {name} is on {parameter.device}, not on {device}")
    for tensor in tensors_of(batch):
        if tensor.device != device:
            raise RuntimeError(f"the first batch is on {tensor.device}, not on {device}: a bug in its Data")


def warm_up(
    task: Task, state: TrainState, strategy: Strategy, precision: Precision, batch: Batch, at: At
) -> int:
    """Forward and backward for nothing, before the first step; returns its FLOPs, 0 where they are unknown.

    DDP reorders its buckets after the first backward it sees; were that a real step, a resumed run would sum
    in another order than one that went on. A model that is compiled is so here, as part of the set-up.
    """
    kept = {name: buffer.clone() for name, buffer in state.model.named_buffers()}
    rank_state, unsent = task.rank_state(), strategy.rank_state()
    flops = _counted(task, state.model, precision, batch, at)
    task.load_rank_state(rank_state)
    passes = 1 if is_compiled(task, state.model) else 0
    if isinstance(state.wrapped, DistributedDataParallel):
        passes = 2 if state.wrapped.static_graph else 1  # which sees the order in the second only
    for _ in range(passes):
        _pass(task, state, strategy, precision, batch, at)
    with torch.no_grad():
        for name, buffer in state.model.named_buffers():
            if name in kept:  # a layer may make one in its first forward pass
                buffer.copy_(kept[name])
    task.load_rank_state(rank_state)
    strategy.load_rank_state(unsent)
    return 0 if isinstance(state.wrapped, nn.DataParallel) else flops  # whose peak is of several GPUs


def _counted(task: Task, model: nn.Module, precision: Precision, batch: Batch, at: At) -> int:
    """Of the bare model, eagerly: what fails here, under torch's counter, is no harm to the training."""
    try:
        with eagerly(), counter(next(model.parameters()).device) as counted:
            with precision.autocast():
                loss = task.loss(model, batch, at)
            # not backward(): DDP has hooks where gradients are added up, and static_graph counts their calls
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            torch.autograd.grad(loss.sum, trained, allow_unused=True)
        return int(counted.get_total_flops())
    except Exception as error:  # of an operator that the counter does not take; the task's own comes again
        log.info("note       FLOPs are not counted: %s", str(error).partition("\n")[0])
        return 0


def _pass(
    task: Task, state: TrainState, strategy: Strategy, precision: Precision, batch: Batch, at: At
) -> None:
    """As a step's, the votes among the gradients."""
    with precision.autocast():
        loss = task.loss(state.wrapped, batch, at)
    roots, gradients = [loss.sum], [torch.ones_like(loss.sum)]
    flag_bucket = strategy.flag_bucket(state.wrapped)
    if flag_bucket is not None:
        votes, vote = flag_bucket.vote(at.step, False, loss.sum)
        roots, gradients = [*roots, votes], [*gradients, vote]
    torch.autograd.backward(roots, gradients)
    state.wrapped.zero_grad(set_to_none=True)
    if flag_bucket is not None:
        flag_bucket.take()
