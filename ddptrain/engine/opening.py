"""Before the first step: is everything on the device, and is DDP in the order it will keep?"""

import torch
from torch import nn

from ddptrain.data.prefetch import tensors_of
from ddptrain.distributed.ballot import WithBallot
from ddptrain.engine.precision import Precision
from ddptrain.engine.state import TrainState
from ddptrain.protocols import At, Batch, Task


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
    task: Task, state: TrainState, ballot: WithBallot, precision: Precision, batch: Batch, at: At
) -> None:
    """One throw-away forward and backward. DDP reorders its buckets after the first backward it
    sees; were that a real step, a resumed run would sum in another order than one that went on."""
    kept, carried = [buffer.clone() for buffer in state.model.buffers()], task.carried()
    with precision.autocast():
        loss = task.loss(state.wrapped, batch, at)
    votes, vote = ballot.vote(at.step, False, loss.sum)
    torch.autograd.backward([loss.sum, votes], [torch.ones_like(loss.sum), vote])
    state.wrapped.zero_grad(set_to_none=True)
    ballot.take()
    with torch.no_grad():
        for buffer, value in zip(state.model.buffers(), kept, strict=True):
            buffer.copy_(value)
    task.carry_on(carried)
