"""Running sums of the loss and its companions, on the device until somebody asks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddptrain.distributed.comm import add_up, from_first_rank
from ddptrain.distributed.device import summing_dtype
from ddptrain.distributed.world import World
from ddptrain.protocols import Loss

_COUNT = "count"


class Meter:
    """Sums since the last reading, one for each shard of the global batch. Adding launches one small
    kernel a value and never waits.

    A shard's sum is kept by the rank that computes it, so adding over ranks only fills places, and a
    checkpoint puts every sum back where it was. finite_only: leave out losses that are not.
    """

    def __init__(self, world: World, shards: int | None = None, finite_only: bool = False) -> None:
        self._world = world
        self._shards = shards or world.size
        self._own = world.shards(self._shards)
        self._finite_only = finite_only
        self._dtype = summing_dtype(world.device)
        self._sums: dict[str, Tensor] = {}
        self._cells: dict[str, tuple[Tensor, ...]] = {}
        self._count = 0
        """Of this rank, as far as the host knows it."""
        self._agreed: list[str] = []
        self._gathered: dict[str, Tensor] = {}

    def add(self, loss: Loss, shard: int) -> None:
        """Take in one micro-batch's sums."""
        if "loss" in loss.logs or _COUNT in loss.logs:
            raise RuntimeError("Task.loss: loss and count are the engine's own names; log under another one")
        total, count = loss.sum.detach(), loss.count
        if self._finite_only:
            finite = torch.isfinite(total)
            count = finite * count
            total = torch.where(finite, total, 0)
        self._add("loss", shard, total)
        for name, value in loss.logs.items():
            self._add(
                name, shard, value.detach().nan_to_num(0, 0, 0) if self._finite_only else value.detach()
            )
        if isinstance(count, int):
            self._count += count
        else:
            self._add(_COUNT, shard, count)

    def gather(self) -> None:
        """Bring all ranks' sums to `state_dict`, for a save. A collective."""
        packed = add_up(self._world, self._packed())
        self._gathered = dict(zip([*self._names, _COUNT], packed.unbind(), strict=True))

    def read(self) -> dict[str, float]:
        """Means over all ranks since the last reading, then zero. A collective and a sync point."""
        sums = add_up(self._world, self._packed()).cpu().sum(dim=1).tolist()
        totals = dict(zip([*self._names, _COUNT], sums, strict=True))
        for value in self._sums.values():
            value.zero_()
        self._count = 0
        count = totals.pop(_COUNT)
        return {name: total / max(count, 1) for name, total in totals.items()}

    def state_dict(self) -> dict[str, Any]:
        """As of the last `gather`: of all ranks, by name, (shards,) each."""
        return {"sums": dict(self._gathered)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, saved in state["sums"].items():
            sums = self._zeros(name)
            if len(saved) == self._shards:
                mine = slice(self._own.start, self._own.stop)
                sums[mine] = saved[mine].to(sums)
            elif self._world.is_first:  # another number of ranks has summed
                sums[0] = saved.sum().to(sums)

    @property
    def _names(self) -> list[str]:
        return sorted(self._sums.keys() - {_COUNT})

    def _add(self, name: str, shard: int, value: Tensor) -> None:
        if name not in self._sums:
            self._zeros(name)
        self._cells[name][shard].add_(value)

    def _zeros(self, name: str) -> Tensor:
        sums = torch.zeros(self._shards, dtype=self._dtype, device=self._world.device)
        self._sums[name], self._cells[name] = sums, sums.unbind()
        return sums

    def _packed(self) -> Tensor:
        """(names and the count, shards)"""
        names = self._names
        if names != self._agreed:  # seldom: the first time, and when a task logs a new name
            if from_first_rank(self._world, names) != names:
                raise RuntimeError(f"Task.loss logs other names on rank {self._world.rank}: {names}")
            self._agreed = names
        count = torch.zeros(self._shards, dtype=self._dtype, device=self._world.device)
        count[self._own.start] = self._count
        if _COUNT in self._sums:
            count += self._sums[_COUNT]
        return torch.stack([*(self._sums[name] for name in names), count])
