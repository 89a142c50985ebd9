"""Are the ranks' weights still the same? A faulty device, or a rank that has left its place, would
train on beside the others without a word."""

import hashlib

import torch
from torch import Tensor, nn

from ddptrain.distributed.comm import from_all_ranks
from ddptrain.distributed.world import World
from ddptrain.errors import OutOfStep

_CHUNK = 1 << 20
"""Values at once: their sums take eight times the memory of a half-precision weight."""


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
    if world.size == 2:
        who = "the two ranks have other weights"  # nobody knows whose are right
    elif len(odd) == 1:
        who = f"rank {odd[0]} has other weights than the rest"
    else:
        who = f"ranks {', '.join(map(str, odd))} have other weights than the rest"
    raise OutOfStep(
        f"after step {step} {who}, first in {names[first]}: a device or memory is faulty, or a rank's code"
        " did something else. Start the same command again: the run goes on from its last checkpoint. If it"
        " comes again, leave that device out."
    )


def _checksum(tensor: Tensor) -> Tensor:
    """0-d int64: the sum of the bits, taken as whole numbers and weighted by their places."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for i, bits in enumerate(tensor.view(-1).view(width).split(_CHUNK)):
        places = torch.arange(len(bits), device=bits.device) % 65521 + 1
        total += (bits.to(torch.int64) * places).sum() * (2 * i + 1)
    return total
