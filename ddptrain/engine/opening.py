"""Before the first step: is everything on the device, and is DDP in the order it will keep?"""

import logging

import torch
from torch import nn

from ddptrain.data.prefetch import tensors_of
from ddptrain.distributed.strategy import Strategy
from ddptrain.engine.flops import counter
from ddptrain.engine.precision import Precision
from ddptrain.engine.state import TrainState
from ddptrain.protocols import At, Batch, Task

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


def rehearse(
    task: Task, state: TrainState, strategy: Strategy, precision: Precision, batch: Batch, at: At
) -> int:
    """One throw-away forward and backward; returns their FLOPs, 0 where they can't be counted.

    DDP reorders its buckets after the first backward it sees; were that a real step, a resumed run would sum
    in another order than one that went on.
    """
    kept, carried = [buffer.clone() for buffer in state.model.buffers()], task.carried()
    flops = 0
    try:
        with counter() as counted:
            _pass(task, state, strategy, precision, batch, at)
        flops = int(counted.get_total_flops())
    except Exception as error:  # of an operator that torch's counter does not take, or of the task's own
        log.info("note       FLOPs are not counted: %s", str(error).partition("\n")[0])
        _pass(task, state, strategy, precision, batch, at)
    with torch.no_grad():
        for buffer, value in zip(state.model.buffers(), kept, strict=True):
            buffer.copy_(value)
    task.carry_on(carried)
    return flops


def _pass(
    task: Task, state: TrainState, strategy: Strategy, precision: Precision, batch: Batch, at: At
) -> None:
    with precision.autocast():
        loss = task.loss(state.wrapped, batch, at)
    roots, gradients = [loss.sum], [torch.ones_like(loss.sum)]
    ballot = strategy.ballot(state.wrapped)
    if ballot is not None:
        votes, vote = ballot.vote(at.step, False, loss.sum)
        roots, gradients = [*roots, votes], [*gradients, vote]
    torch.autograd.backward(roots, gradients)
    state.wrapped.zero_grad(set_to_none=True)
    if ballot is not None:
        ballot.take()
