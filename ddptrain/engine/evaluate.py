"""Evaluation on all ranks, exact for any world size.

The validation set is cut into the same batches on any number of ranks, which share them out whole.
Nothing is padded or averaged twice: counts are added as integers, and each floating sum is kept in
its batch's own slot, so that adding over ranks only fills slots and the total is taken in one order.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ddptrain.distributed.comm import add_up, from_all_ranks
from ddptrain.distributed.device import summing_dtype
from ddptrain.distributed.world import World
from ddptrain.engine.precision import Precision
from ddptrain.protocols import Data, Figure, Report, Task


@torch.inference_mode()
def evaluate(
    task: Task, model: nn.Module, data: Data, world: World, precision: Precision, batch_size: int
) -> Report:
    """The task's report over the whole validation set. Some collectives and a sync point, at the end.

    model: the bare module, the same on every rank; DDP's wrapper would communicate in its forward.
    """
    was_training = model.training
    model.eval()
    size = data.valid_size
    chunks = [range(i, min(i + batch_size, size)) for i in range(0, size, batch_size)]
    mine = range(world.rank, len(chunks), world.size)
    counts: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for slot, batch in zip(mine, data.valid_batches([chunks[i] for i in mine]), strict=True):
        with precision.autocast():
            sums = task.evaluate(model, batch)
        for name, value in sums.items():
            if value.is_floating_point():
                if name not in floats:
                    floats[name] = torch.zeros(
                        len(chunks), dtype=summing_dtype(value.device), device=value.device
                    )
                floats[name][slot] = value
            else:
                counts[name] = counts[name] + value if name in counts else value.to(torch.int64)
    model.train(was_training)
    for name, shape in _union(world, {name: value.shape for name, value in counts.items()}).items():
        counts.setdefault(name, torch.zeros(shape, dtype=torch.int64, device=world.device))
    for name, shape in _union(world, {name: value.shape for name, value in floats.items()}).items():
        floats.setdefault(name, torch.zeros(shape, dtype=summing_dtype(world.device), device=world.device))
    totals = {name: add_up(world, counts[name]).cpu() for name in sorted(counts)}
    totals |= {name: add_up(world, floats[name]).cpu().sum() for name in sorted(floats)}
    return task.report(totals)


@torch.inference_mode()
def figures_of(task: Task, model: nn.Module, precision: Precision) -> Mapping[str, Figure]:
    """What the task draws from the model itself. No collectives: on rank 0 alone."""
    was_training = model.training
    model.eval()
    with precision.autocast():
        figures = task.figures(model)
    model.train(was_training)
    return figures


def _union(world: World, shapes: dict[str, torch.Size]) -> dict[str, torch.Size]:
    """The names of all ranks: one without a batch has none, and one may meet what others do not."""
    found: dict[str, torch.Size] = {}
    for of_rank in from_all_ranks(world, shapes):
        found |= of_rank
    return found
