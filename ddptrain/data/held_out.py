"""What is held out for validation from a set that has no part for it: every tenth."""

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

Item = TypeVar("Item")
Place = TypeVar("Place", int, Tensor)
_EVERY = 10


def is_held_out(place: Place) -> Place:
    """By the sample's place in the set, from 0; of an integer Tensor element by element."""
    return place % _EVERY == _EVERY - 1


def split(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Training and validation."""
    kept = [item for place, item in enumerate(items) if not is_held_out(place)]
    return kept, list(items[_EVERY - 1 :: _EVERY])
