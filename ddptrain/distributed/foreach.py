"""Many tensors at once: on a GPU one launch for each dtype, where one for each tensor would cost more than
the work itself."""

from collections.abc import Callable, Iterable
from typing import Any

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


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Nested dicts, lists and tuples with each value changed; a model's state_dict keeps its modules'
    versions."""
    if isinstance(tree, dict):
        new_tree = type(tree)((name, mapped(value, change)) for name, value in tree.items())
        if hasattr(tree, "_metadata"):
            new_tree._metadata = tree._metadata  # type: ignore[attr-defined]
        return new_tree
    if isinstance(tree, list | tuple):
        return type(tree)([mapped(value, change) for value in tree])
    return change(tree)
