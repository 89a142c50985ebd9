"""Which samples belong to which step, rank and micro-batch: a pure function of the seed.

The epochs' orders form one endless stream, and global batch s is its slice [s * batch_size, (s + 1) *
batch_size). So every batch is full, even if the size of the set is not divisible by it: nothing is dropped or
repeated, and shapes never change. World size and micro-batch only decide which rank computes which part of a
global batch: it is cut into shards, as many as ranks or a fixed number, each rank takes consecutive shards,
and a shard is computed in micro-batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ddptrain.api.order import EpochOrder, Shuffled
from ddptrain.api.world import shards_of
from ddptrain.errors import UserError


class EpochSlice(NamedTuple):
    """``order(epoch)[start:stop]``: consecutive samples of one epoch."""

    epoch: int
    start: int
    stop: int


_AGAIN = 2**31 - 1
"""What drawing a sample again within an epoch adds to its epoch: odd, for what alternates by epochs."""


class MicroBatch(NamedTuple):
    """The place of a micro-batch in each global batch."""

    size: int
    """Samples."""
    shard: int
    """The index of its shard, among all ranks' shards."""
    stream: int
    """A unique number among all micro-batches of a step, for randomness in the forward pass."""
    ends_shard: bool


@dataclass(frozen=True, slots=True)
class Sampler:
    """The training samples of one rank.

    size: samples in the training set. batch_size: the GLOBAL batch. micro_batch: most samples in one forward
    pass, or None for a whole shard. shards: parts of a global batch, or None for one per rank. epoch_order:
    `Data.epoch_order`.
    """

    size: int
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    micro_batch: int | None = None
    shards: int | None = None
    epoch_order: EpochOrder = field(default=Shuffled(), compare=False)  # has no state

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError("data: the training set is empty.")
        self.epoch_order.check(self.size)
        if self.shards is not None and not self.world_size <= self.shards <= self.batch_size:
            raise UserError(
                f"strategy.shards={self.shards}: strategy=strict cuts the global batch of"
                f" {self.batch_size} into so many parts for {self.world_size} ranks: at least one part a"
                " rank, and one sample a part."
            )
        if self.batch_size < self.world_size:
            raise UserError(
                f"train.batch_size={self.batch_size}: the global batch must give each of the"
                f" {self.world_size} ranks a sample; make it {self.world_size} or more."
            )

    @property
    def own_shards(self) -> range:
        """The indices of this rank's shards."""
        return shards_of(self.rank, self.world_size, self.shards or self.world_size)

    @property
    def share(self) -> tuple[int, int]:
        """This rank's samples of a global batch, as [start, stop) in it."""
        return self._shard(self.own_shards[0])[0], self._shard(self.own_shards[-1])[1]

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches in every step; those of a shard are nearly equal. All shards have equally
        many, unless one has too few samples."""
        count = self.shards or self.world_size
        largest = -(-self.batch_size // count)
        most = 1 if self.micro_batch is None else -(-largest // self.micro_batch)
        micro_batches = []
        for shard in self.own_shards:
            start, stop = self._shard(shard)
            parts = min(most, stop - start)
            cuts = [i * (stop - start) // parts for i in range(parts + 1)]
            for i, (a, b) in enumerate(pairwise(cuts)):
                last = i == parts - 1
                micro_batches.append(MicroBatch(b - a, shard, i * count + shard, last))
        return tuple(micro_batches)

    @property
    def micro_sizes(self) -> tuple[int, ...]:
        """Sizes of this rank's micro-batches in every step."""
        return tuple(micro_batch.size for micro_batch in self.micro_batches)

    def order(self, epoch: int) -> Tensor:
        """int64 (size,): the sample indices of an epoch."""
        return self.epoch_order.indices(self.size, self.seed, epoch)

    def slices(self, step: int) -> list[list[EpochSlice]]:
        """This rank's samples of a step, for each micro-batch: one slice, more if it crosses an epoch's
        end."""
        return self._cut(step, self.micro_sizes)

    def samples(self, steps: range, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of many steps: int64 (n,) sample indices, int64 (n,) the epoch of
        each, on the device. An epoch's order is copied there once; a step only slices it.

        A sample that is drawn again within an epoch has a large number of its own in place of
        the epoch, so that what follows from (seed, epoch, sample index) is drawn anew.
        """
        orders, sizes = _Orders(self, device), self.micro_sizes
        for step in steps:
            for slices in self._cut(step, sizes):
                yield orders.ids(slices)

    def _cut(self, step: int, sizes: tuple[int, ...]) -> list[list[EpochSlice]]:
        at = step * self.batch_size + self.share[0]
        batches = []
        for size in sizes:
            batches.append(self._slices(at, at + size))
            at += size
        return batches

    def _shard(self, shard: int) -> tuple[int, int]:
        """A shard's samples of a global batch, as [start, stop) in it. Shards differ by one at most."""
        count = self.shards or self.world_size
        return shard * self.batch_size // count, (shard + 1) * self.batch_size // count

    def _slices(self, start: int, stop: int) -> list[EpochSlice]:
        slices = []
        while start < stop:
            epoch, offset = divmod(start, self.size)
            length = min(stop - start, self.size - offset)
            slices.append(EpochSlice(epoch, offset, offset + length))
            start += length
        return slices


class _Orders:
    """A cache of the epochs' orders; only the newest two are kept."""

    def __init__(self, sampler: Sampler, device: torch.device) -> None:
        self._sampler = sampler
        self._device = device
        self._orders: dict[int, tuple[Tensor, Tensor | None]] = {}

    def ids(self, slices: list[EpochSlice]) -> tuple[Tensor, Tensor]:
        pairs = [self._pair(each) for each in slices]
        if len(pairs) == 1:
            return pairs[0]
        ids, epochs = zip(*pairs, strict=True)
        return torch.cat(ids), torch.cat(epochs)

    def _pair(self, of: EpochSlice) -> tuple[Tensor, Tensor]:
        """Its samples, and the epoch of each."""
        order, epochs = self._order(of.epoch)
        ids = order[of.start : of.stop]
        return ids, torch.full_like(ids, of.epoch) if epochs is None else epochs[of.start : of.stop]

    def _order(self, epoch: int) -> tuple[Tensor, Tensor | None]:
        """The samples in order, and the epoch of each where it is not the same."""
        if epoch not in self._orders:
            order, epochs = self._sampler.order(epoch), None
            if self._sampler.epoch_order.repeats:
                epochs = self._on_device(epoch + _AGAIN * _times_before(order))
            self._orders[epoch] = self._on_device(order), epochs
            for old in sorted(self._orders)[:-2]:
                del self._orders[old]
        return self._orders[epoch]

    def _on_device(self, values: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return values.to(self._device)
        # from pageable memory the copy would wait for the device
        return values.pin_memory().to(self._device, non_blocking=True)


def _times_before(order: Tensor) -> Tensor:
    """int64 (n,): how often each value has been there before."""
    values, places = order.sort(stable=True)
    times = torch.arange(len(order)) - torch.searchsorted(values, values)
    return torch.empty_like(times).scatter_(0, places, times)
