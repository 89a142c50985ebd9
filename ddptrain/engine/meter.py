"""Running sums of the loss and its companions, on the device until somebody asks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddptrain.distributed.comm import add_up, from_first_rank
from ddptrain.distributed.device import summing_dtype
from ddptrain.distributed.world import World
from ddptrain.protocols import Loss


class Meter:
    """Sums since the last reading. Adding launches one small kernel a value and never waits."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._dtype = summing_dtype(world.device)
        self._sums: dict[str, Tensor] = {}
        self._agreed: list[str] = []
        self._count = 0

    def add(self, loss: Loss) -> None:
        """Take in one micro-batch's sums."""
        self._add("loss", loss.sum.detach())
        for name, value in loss.logs.items():
            self._add(name, value.detach())
        if isinstance(loss.count, int):
            self._count += loss.count
        else:
            self._add("count", loss.count)

    def gather(self) -> None:
        """Bring all ranks' sums to rank 0, the others' to zero. A collective.

        Before a save: so the checkpoint, which rank 0 writes, holds what all have added.
        """
        if self._world.size == 1:
            return
        packed = add_up(self._world, self._packed())
        if not self._world.is_first:
            packed.zero_()
        self._unpack(packed)

    def read(self) -> dict[str, float]:
        """Means over all ranks since the last reading, then zero. A collective and a sync point."""
        packed = add_up(self._world, self._packed()).tolist()
        names = [*sorted(self._sums), "count"]
        totals: dict[str, float] = dict.fromkeys(names, 0.0)
        for name, value in zip(names, packed, strict=True):
            totals[name] += value
        count = totals.pop("count")
        self._unpack(torch.zeros(len(names), dtype=self._dtype, device=self._world.device))
        return {name: total / max(count, 1) for name, total in totals.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        share = 1 if self._world.is_first else 0
        self._count = state["count"] * share
        self._sums = {name: value.to(self._world.device) * share for name, value in state["sums"].items()}

    def _add(self, name: str, value: Tensor) -> None:
        if name not in self._sums:
            self._sums[name] = torch.zeros((), dtype=self._dtype, device=self._world.device)
        self._sums[name].add_(value)

    def _packed(self) -> Tensor:
        names = sorted(self._sums)
        if names != self._agreed:  # seldom: the first time, and when a task logs a new name
            if from_first_rank(self._world, names) != names:
                raise RuntimeError(f"Task.loss logs other names on rank {self._world.rank}: {names}")
            self._agreed = names
        count = torch.full((), self._count, dtype=self._dtype, device=self._world.device)
        return torch.stack([*(self._sums[name] for name in names), count])

    def _unpack(self, packed: Tensor) -> None:
        *sums, count = packed.unbind()
        self._sums = {name: value.clone() for name, value in zip(sorted(self._sums), sums, strict=True)}
        self._count = int(count)
