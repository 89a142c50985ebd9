"""Running sums of the loss and the other logged values, on the loss's device until they are read."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from ddptrain.api.recipe import Loss
from ddptrain.api.world import World
from ddptrain.distributed.comm import add_up, from_first_rank
from ddptrain.distributed.device import summing_dtype

_COUNT = "count"
Rows = Tensor | list[list[float]]
"""Sums, (names, shards)."""


class Meter:
    """Sums since the last reading, one for each shard of the global batch.

    The rank that computes a shard keeps its sum, so the sum over ranks only fills slots, and a resume
    restores every sum. finite_only: skip losses that are not finite.
    """

    def __init__(self, world: World, shards: int | None = None, finite_only: bool = False) -> None:
        self._world = world
        self._shards = shards or world.size
        self._own = world.shards(self._shards)
        self._sums: _Sums = (
            _HostSums(self._shards, finite_only)
            if world.device.type == "cpu"
            else _DeviceSums(self._shards, finite_only, world.device)
        )
        self._agreed: list[str] = []
        self._gathered: dict[str, Tensor] = {}

    def add(self, loss: Loss, shard: int) -> None:
        """Add one micro-batch's sums. Never waits for the device."""
        if "loss" in loss.logs or _COUNT in loss.logs:
            raise RuntimeError("Task.loss: loss and count are the engine's own names; log under another one")
        self._sums.add(loss, shard)

    def gather(self) -> None:
        """Gather all ranks' sums for `state_dict`. A collective."""
        names, rows = self._rows()
        table = torch.as_tensor(rows, dtype=summing_dtype(self._world.device))
        self._gathered = dict(zip(names, add_up(self._world, table).unbind(), strict=True))

    def read(self) -> dict[str, float]:
        """Means over all ranks since the last reading; then the sums are zero. A collective and a sync
        point."""
        names, rows = self._rows()
        if self._world.size > 1:
            rows = add_up(self._world, torch.as_tensor(rows, dtype=summing_dtype(self._world.device)))
        by_shard = rows.tolist() if isinstance(rows, Tensor) else rows
        totals = [sums[0] if self._shards == 1 else _added(sums) for sums in by_shard]
        self._sums.clear()
        count = max(totals[names.index(_COUNT)], 1)
        return {name: total / count for name, total in zip(names, totals, strict=True) if name != _COUNT}

    def state_dict(self) -> dict[str, Any]:
        """As of the last `gather`: of all ranks, by name, (shards,) each."""
        return {"sums": dict(self._gathered)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, saved in state["sums"].items():
            sums = torch.zeros(self._shards, dtype=torch.float64)
            if len(saved) == self._shards:
                mine = slice(self._own.start, self._own.stop)
                sums[mine] = saved[mine].to(sums)
            elif self._world.is_first:  # another number of ranks has summed
                sums[0] = saved.sum()
            self._sums.put(name, sums)

    def _rows(self) -> tuple[list[str], Rows]:
        names, rows = self._sums.rows()
        if names != self._agreed:  # rare: the first time, and when a task logs a new name
            if from_first_rank(self._world, names) != names:
                raise RuntimeError(f"Task.loss logs other names on rank {self._world.rank}: {names}")
            self._agreed = names
        return names, rows


def _added(sums: list[float]) -> float:
    """The exact sum if all are finite, which does not depend on their order."""
    try:
        return math.fsum(sums)
    except (ValueError, OverflowError):  # of infinities with both signs, or nearly
        return sum(sums)


class _Sums(ABC):
    """One rank's sums by name, the count's among them."""

    @abstractmethod
    def add(self, loss: Loss, shard: int) -> None: ...

    @abstractmethod
    def put(self, name: str, sums: Tensor) -> None:
        """Set the sums of a name: float64 (shards,), on the CPU."""

    @abstractmethod
    def rows(self) -> tuple[list[str], Rows]:
        """Names in order, and the sums of each."""

    @abstractmethod
    def clear(self) -> None:
        """Set all to zero; the names stay."""


@final
class _HostSums(_Sums):
    """For CPUs. Python's floats are float64, and adding to one costs a tenth of a tensor operation."""

    def __init__(self, shards: int, finite_only: bool) -> None:
        self._zeros = [0.0] * shards
        self._finite_only = finite_only
        self._sums: dict[str, list[float]] = {}
        for name in ("loss", _COUNT):
            self._open(name)

    def add(self, loss: Loss, shard: int) -> None:
        total, count = loss.sum.item(), float(loss.count)
        if self._finite_only and not math.isfinite(total):
            total = count = 0.0
        self._sums["loss"][shard] += total
        self._sums[_COUNT][shard] += count
        for name, tensor in loss.logs.items():
            if name not in self._sums:
                self._open(name)
            value = tensor.item()
            self._sums[name][shard] += 0.0 if self._finite_only and not math.isfinite(value) else value

    def put(self, name: str, sums: Tensor) -> None:
        self._open(name)
        self._sums[name][:] = sums.tolist()

    def rows(self) -> tuple[list[str], Rows]:
        return list(self._sums), list(self._sums.values())

    def clear(self) -> None:
        for sums in self._sums.values():
            sums[:] = self._zeros

    def _open(self, name: str) -> None:
        self._sums = dict(sorted({**self._sums, name: list(self._zeros)}.items()))


@final
class _DeviceSums(_Sums):
    """Adding launches two small kernels, for all values together."""

    def __init__(self, shards: int, finite_only: bool, device: torch.device) -> None:
        self._shards = shards
        self._finite_only = finite_only
        self._names: list[str] = []
        self._table = torch.zeros(0, shards, device=device, dtype=summing_dtype(device))
        self._nothing = torch.zeros((), device=device)
        """Added for a name that a micro-batch does not log."""
        self._count = [0] * shards
        """The part that is known on the host."""

    def add(self, loss: Loss, shard: int) -> None:
        total, count = loss.sum.detach(), loss.count
        logs = {name: value.detach() for name, value in loss.logs.items()}
        if self._finite_only:
            finite = torch.isfinite(total)
            total, count = torch.where(finite, total, 0), finite * count
            logs = {name: value.nan_to_num(0, 0, 0) for name, value in logs.items()}
        if isinstance(count, int):
            self._count[shard] += count
        else:
            # float32 can't represent every large integer
            logs[_COUNT] = count if count.is_floating_point() else count.to(self._table)
        values = {"loss": total, **logs}
        for name in values:
            if name not in self._names:
                self.put(name, torch.zeros(self._shards))
        self._table[:, shard] += torch.stack([values.get(name, self._nothing) for name in self._names])

    def put(self, name: str, sums: Tensor) -> None:
        row = sums.to(self._table)
        if name in self._names:
            self._table[self._names.index(name)] = row
        else:
            self._names.append(name)
            self._table = torch.cat([self._table, row[None]])

    def rows(self) -> tuple[list[str], Rows]:
        if _COUNT not in self._names:
            self.put(_COUNT, torch.zeros(self._shards))
        names = sorted(self._names)
        table = torch.stack([self._table[self._names.index(name)] for name in names])
        table[names.index(_COUNT)] += torch.tensor(self._count).to(table)
        return names, table

    def clear(self) -> None:
        self._table.zero_()
        self._count = [0] * self._shards
