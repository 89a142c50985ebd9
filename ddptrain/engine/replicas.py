"""Are the ranks' weights still the same? A faulty device, or a rank that has left its place, would
train on beside the others without a word."""

import hashlib

import torch
from torch import Tensor, nn

from ddptrain.distributed.comm import from_all_ranks
from ddptrain.distributed.world import World
from ddptrain.errors import OutOfStep


def check_replicas(world: World, model: nn.Module, step: int) -> None:
    """Compare a checksum of every parameter over all ranks. A collective and a sync point.

    Raises OutOfStep, on all ranks, naming the ranks that differ and the first parameter in which.
    """
    if world.size == 1:
        return
    names = [name for name, _ in model.named_parameters()]
    sums = torch.stack([_checksum(parameter.detach()) for parameter in model.parameters()]).tolist()
    digest = hashlib.sha256(repr(sums).encode()).hexdigest()
    digests = from_all_ranks(world, digest)
    if len(set(digests)) == 1:
        return
    by_rank = from_all_ranks(world, sums)
    common = max(digests, key=digests.count)
    odd = [rank for rank, other in enumerate(digests) if other != common]
    right = by_rank[digests.index(common)]
    first = next(i for i, _ in enumerate(names) if any(by_rank[rank][i] != right[i] for rank in odd))
    who = f"rank {odd[0]} has" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} have"
    raise OutOfStep(
        f"after step {step} {who} other weights than the rest, first in {names[first]}: its device or memory"
        " is faulty, or its code did something else. Start the same command again: the run goes on from its"
        " last checkpoint. If it comes again, leave that device out."
    )


def _checksum(tensor: Tensor) -> Tensor:
    """0-d int64: the sum of the bits, taken as whole numbers and weighted by their places."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.view(-1).view(width).to(torch.int64)
    return (bits * (torch.arange(len(bits), device=bits.device) % 65521 + 1)).sum()
