"""Running sums of the loss and the other logged values, on the loss's device until they are read."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ddptrain.api.recipe import Loss
from ddptrain.api.world import World
from ddptrain.distributed.comm import add_up, from_all_ranks
from ddptrain.distributed.device import summing_dtype

Rows = Tensor | list[list[float]]
"""Sum and count of each name in turn, (2 * names, shards)."""


class Meter:
    """Sums since the last reading, one for each shard of the global batch.

    The numbers of a step wait for its outcome: of a step that was left out, none is added. A name has a count
    of its own, of the micro-batches that log it. The rank that computes a shard keeps its sum, so the sum
    over ranks only fills slots, and a resume restores every sum.
    """

    def __init__(self, world: World, shards: int | None = None) -> None:
        self._world = world
        self._shards = shards or world.size
        self._own = world.shards(self._shards)
        self._sums: _Sums = (
            _HostSums(self._shards) if world.device.type == "cpu" else _DeviceSums(self._shards, world.device)
        )
        self._step: list[Addend] = []
        """The micro-batches of the step that began last."""
        self._steps: deque[Sequence[Addend]] = deque()
        """Those of each step whose outcome is not known yet."""
        self._agreed: list[str] = []
        self._gathered: dict[str, Tensor] = {}

    def begin_step(self) -> None:
        self._step = []

    def add(self, loss: Loss, shard: int) -> None:
        """Add one micro-batch to the step that began last. Never waits for the device."""
        if "loss" in loss.logs or "count" in loss.logs:
            raise RuntimeError("Task.loss: loss and count are the engine's own names; log under another one")
        self._step.append(self._sums.addend(loss, shard))

    def end_step(self, nonfinite: Tensor) -> "Sequence[Addend]":
        """On a device, add the step's numbers, unless ``nonfinite`` (0-d) is not 0. `expect` is to follow."""
        self._sums.add_where(self._step, nonfinite)
        return self._step

    def expect(self, addends: "Sequence[Addend]") -> None:
        """Keep a step's addends until `count` is told its outcome."""
        self._steps.append(addends)

    def count(self, applied: bool) -> None:
        """The earliest step without an outcome has this one: add what of it is on the host."""
        for addend in self._steps.popleft():
            if applied:
                self._sums.add(addend)

    @property
    def tensor(self) -> Tensor | None:
        """Where sums are on a device; another one once a name is new."""
        return self._sums.tensor

    def forget_names_since(self, tensor: Tensor) -> None:
        """Sums are in this tensor again, as before names that were new."""
        self._sums.forget_names_since(tensor)

    def gather(self) -> None:
        """Gather all ranks' sums for `state_dict`. A collective."""
        names, rows = self._rows()
        table = add_up(self._world, torch.as_tensor(rows, dtype=summing_dtype(self._world.device)))
        self._gathered = dict(zip(names, table.view(len(names), 2, -1).unbind(), strict=True))

    def read(self) -> dict[str, float]:
        """Means over all ranks since the last reading, of what there is; then the sums are zero. A collective
        and a sync point."""
        names, rows = self._rows()
        if self._world.size > 1:
            rows = add_up(self._world, torch.as_tensor(rows, dtype=summing_dtype(self._world.device)))
        by_shard = rows.tolist() if isinstance(rows, Tensor) else rows
        totals = [sums[0] if self._shards == 1 else _added(sums) for sums in by_shard]
        self._sums.clear()
        named = zip(names, totals[::2], totals[1::2], strict=True)
        return {name: total / (count or 1) for name, total, count in named if total or count}

    def state_dict(self) -> dict[str, Any]:
        """As of the last `gather`: of all ranks, by name, sum and count, (2, shards) each."""
        return {"sums": dict(self._gathered)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, saved in state["sums"].items():
            sums = torch.zeros(2, self._shards, dtype=torch.float64)
            if saved.shape == sums.shape:
                mine = slice(self._own.start, self._own.stop)
                sums[:, mine] = saved[:, mine].to(sums)
            elif self._world.is_first:  # another number of ranks has summed
                sums[:, 0] = saved.sum(dim=1)
            self._sums.put(name, sums)

    def _rows(self) -> tuple[list[str], Rows]:
        """With the names that any rank logs, the same on all. A small collective."""
        assert not self._steps, "a step's outcome is not known"
        names, rows = self._sums.rows()
        if self._world.size > 1:
            new = torch.tensor(float(names != self._agreed), device=self._world.device)
            if add_up(self._world, new):  # rare: the first time, and when a task logs a new name
                self._agreed = sorted(set().union(*from_all_ranks(self._world, names)))
                self._sums.open(self._agreed)
                names, rows = self._sums.rows()
        return names, rows


def _added(sums: list[float]) -> float:
    """The exact sum if all are finite, which does not depend on their order."""
    try:
        return math.fsum(sums)
    except (ValueError, OverflowError):  # of infinities with both signs, or nearly
        return sum(sums)


class Addend(NamedTuple):
    """What a micro-batch adds."""

    shard: int
    names: tuple[str, ...]
    """That it logs, the loss among them."""
    values: Any
    """Their sums."""
    known: float
    """The count, or 0 where that is on the device, among the values."""


class _Sums(ABC):
    """One rank's sums and counts by name."""

    tensor: Tensor | None
    """As `Meter.tensor` has it."""

    @abstractmethod
    def addend(self, loss: Loss, shard: int) -> Addend: ...

    @abstractmethod
    def add_where(self, addends: Sequence[Addend], nonfinite: Tensor) -> None:
        """Add what is on a device, unless ``nonfinite`` (0-d) is not 0."""

    @abstractmethod
    def add(self, addend: Addend) -> None:
        """Add what is on the host."""

    @abstractmethod
    def open(self, names: Iterable[str]) -> None:
        """Begin to sum what has these names, where it is not yet so."""

    @abstractmethod
    def put(self, name: str, sums: Tensor) -> None:
        """Set those of a name: float64 (2, shards), on the CPU."""

    @abstractmethod
    def rows(self) -> tuple[list[str], Rows]:
        """Names in order, and sum and count of each."""

    def forget_names_since(self, tensor: Tensor) -> None:
        """As `Meter.forget_names_since`."""
        raise NotImplementedError

    @abstractmethod
    def clear(self) -> None:
        """Set all to zero; the names stay."""


@final
class _HostSums(_Sums):
    """For CPUs. Python's floats are float64, and adding to one costs a tenth of a tensor operation."""

    tensor = None

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._rows = {"loss": self._zeros()}

    def addend(self, loss: Loss, shard: int) -> Addend:
        values = (loss.sum.item(), *(value.item() for value in loss.logs.values()))
        return Addend(shard, ("loss", *loss.logs), values, float(loss.count))

    def add_where(self, addends: Sequence[Addend], nonfinite: Tensor) -> None:
        pass

    def add(self, addend: Addend) -> None:
        shard, names, values, count = addend  # here it is always known
        self.open(names)
        for name, value in zip(names, values, strict=True):
            sums, counts = self._rows[name]
            sums[shard] += value
            counts[shard] += count

    def open(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._rows:
                self._rows[name] = self._zeros()

    def put(self, name: str, sums: Tensor) -> None:
        self._rows[name] = sums.tolist()

    def rows(self) -> tuple[list[str], Rows]:
        names = sorted(self._rows)
        return names, [row for name in names for row in self._rows[name]]

    def clear(self) -> None:
        self._rows = {name: self._zeros() for name in self._rows}

    def _zeros(self) -> list[list[float]]:
        return [[0.0] * self._shards, [0.0] * self._shards]


@final
class _DeviceSums(_Sums):
    """Adding launches three small kernels, for all values together."""

    def __init__(self, shards: int, device: torch.device) -> None:
        self._shards = shards
        self._names = ["loss"]
        self.tensor: Tensor = torch.zeros(2, 1, shards, device=device, dtype=summing_dtype(device))
        """Sums, and the counts that are known on the device alone."""
        self._nothing = torch.zeros((), device=device)
        """Added for a name that a micro-batch does not log."""
        self._counts = {"loss": [0] * shards}
        """The counts that are known on the host."""

    def addend(self, loss: Loss, shard: int) -> Addend:
        logged = {"loss": loss.sum.detach(), **{name: value.detach() for name, value in loss.logs.items()}}
        self.open(logged)
        values = [logged.get(name, self._nothing) for name in self._names]
        if isinstance(loss.count, int):
            return Addend(shard, tuple(logged), torch.stack(values)[None], loss.count)
        # float32 can't represent every large integer
        count = loss.count if loss.count.is_floating_point() else loss.count.to(self.tensor)
        counts = [count if name in logged else self._nothing for name in self._names]
        return Addend(shard, tuple(logged), torch.stack(values + counts).view(2, -1), 0)

    def add_where(self, addends: Sequence[Addend], nonfinite: Tensor) -> None:
        finite = nonfinite == 0
        for addend in addends:
            rows, names = addend.values.shape  # names that were new since then are last
            self.tensor[:rows, :names, addend.shard] += torch.where(finite, addend.values, self._nothing)

    def add(self, addend: Addend) -> None:
        for name in addend.names:
            self._counts[name][addend.shard] += int(addend.known)

    def put(self, name: str, sums: Tensor) -> None:
        self.open([name])
        self.tensor[:, self._names.index(name)] = sums.to(self.tensor)

    def rows(self) -> tuple[list[str], Rows]:
        names = sorted(self._names)
        table = torch.cat([self.tensor[:, self._names.index(name)] for name in names])
        table[1::2] += torch.tensor([self._counts[name] for name in names]).to(table)
        return names, table

    def clear(self) -> None:
        self.tensor.zero_()
        self._counts = {name: [0] * self._shards for name in self._names}

    def forget_names_since(self, tensor: Tensor) -> None:
        known = tensor.shape[1]
        for name in self._names[known:]:
            del self._counts[name]
        self._names, self.tensor = self._names[:known], tensor

    def open(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._counts:
                self._names.append(name)
                self._counts[name] = [0] * self._shards
                self.tensor = torch.cat([self.tensor, self.tensor.new_zeros(2, 1, self._shards)], dim=1)
