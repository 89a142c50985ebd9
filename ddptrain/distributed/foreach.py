"""Many tensors at once: on a GPU one launch for each dtype, where one for each tensor would cost more than
the work itself."""

from collections.abc import Iterable

import torch
from torch import Tensor


def by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors of each dtype, in order."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


@torch.no_grad()
def copy_all(to: Iterable[Tensor], of: Iterable[Tensor]) -> None:
    """Each of ``of`` into the tensor at its place in ``to``, of the same dtype."""
    for own, new in zip(by_dtype(to), by_dtype(of), strict=True):
        torch._foreach_copy_(own, new)
