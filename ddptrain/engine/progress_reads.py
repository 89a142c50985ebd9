"""Whether a training has read its `At.progress`, which depends on its length: an `At` that notes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddptrain.api.recipe import At
from ddptrain.api.world import World
from ddptrain.distributed.comm import from_all_ranks


@dataclass(slots=True)
class ProgressReads:
    """Of one run, on one rank."""

    seen: bool = False
    """It has been read, or may have been."""

    def at(self, step: int, epoch: int, progress: float) -> At:
        """A plain one where there is nothing left to note."""
        if self.seen:
            return At(step, epoch, progress)
        watched = _WatchedAt(step, epoch, progress)
        watched.reads = self
        return watched

    def agree(self, world: World) -> None:
        """Whether any rank has read it. A collective."""
        self.seen = any(from_all_ranks(world, self.seen))


class _WatchedAt(At):
    """Notes whatever may tell ``progress``: its name, an index, unpacking, comparing, hashing, printing.

    Only C code that takes any tuple apart without Python's protocols goes unnoticed; of that there is
    ``"%f" % at``, which makes text.
    """

    reads = ProgressReads()
    """That of its run; of a copy that is made by the constructor, nobody's: making it has read the values."""

    def __getattribute__(self, name: str) -> Any:
        if name not in ("step", "epoch"):
            tuple.__getattribute__(self, "reads").seen = True
        return tuple.__getattribute__(self, name)

    def __radd__(self, other: Any) -> Any:
        return other + tuple(self)


_WatchedAt.__name__ = At.__name__  # as it prints


def _noting(name: str) -> Callable[..., Any]:
    of_at = getattr(At, name)

    def noting(self: _WatchedAt, *arguments: Any) -> Any:
        tuple.__getattribute__(self, "reads").seen = True
        return of_at(self, *arguments)

    return noting


for _name in (
    *("__getitem__", "__iter__", "__contains__", "__add__", "__mul__", "__rmul__", "__repr__", "__hash__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
):
    setattr(_WatchedAt, _name, _noting(_name))
