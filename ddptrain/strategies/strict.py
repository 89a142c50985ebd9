"""strategy=strict (elastic=strict): the same bits on any number of ranks.

The global batch is always cut into the same shards. Each has its own backward pass, and the shards' gradients
are added in a fixed tree, independent of the rank that computed them. Every shard starts from the same
buffers; those of the first shard (BatchNorm's running statistics) are kept.

The cost, compared with DDP: a rank holds a gradient for each of its shards, all of them are sent to all ranks
(shards / 2 times DDP's bytes) after the backward pass instead of during it, and a shard is smaller than a
rank's share.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddptrain.api.strategy import Flags, Strategy
from ddptrain.api.world import World, shards_of
from ddptrain.distributed.comm import broadcast_buffers, saved_buffers
from ddptrain.distributed.foreach import copy_all
from ddptrain.errors import UserError
from ddptrain.strategies.flag_bucket import FlagBucket

_CHUNK = 1 << 22
"""Gradient values of a shard per all-gather: limits the memory."""


@final
class Strict(Strategy):
    """shards: their number, at least one per rank; the sampler assigns them."""

    def __init__(self, world: World, shards: int = 8) -> None:
        super().__init__(world)
        if shards < 1:
            raise UserError(f"strategy.shards={shards}: must be at least 1.")
        self.shards = shards
        self._counts = [len(shards_of(rank, world.size, shards)) for rank in range(world.size)]
        self._parameters: list[nn.Parameter] = []
        self._rows: list[list[Tensor]] = []
        """The gradients of this rank's shards so far, by shard and parameter."""
        self._saved_buffers: Collection[str] = ()
        self._before: list[Tensor] = []
        self._first: list[Tensor] = []

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = FlagBucket(model, divisor=self._count)
        self._flags = Flags(wrapped.rank_flags)
        self._parameters = [p for p in wrapped.parameters() if p.requires_grad]
        self._saved_buffers = saved_buffers(wrapped)
        return wrapped.hidden()

    def accumulate(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        """``last``: of its shard. After a rank's last shard, the sum over all shards is its gradient."""
        return self._shard(wrapped, last)

    def send_flags(
        self, wrapped: nn.Module, step: int, stop: bool, loss: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        assert isinstance(wrapped, FlagBucket)
        return wrapped.send(self.flags.row(step, stop, loss))

    def receive_flags(self, wrapped: nn.Module) -> Tensor | None:
        assert isinstance(wrapped, FlagBucket)
        return wrapped.take()

    def time_waits(self, wrapped: nn.Module, mark: Callable[[str], None]) -> None:
        assert isinstance(wrapped, FlagBucket)
        wrapped.mark_own_end(mark)

    def memory(self, model: nn.Module, alone: Mapping[str, int]) -> dict[str, int]:
        """Gradients of each of its shards; they are added up when there are no activations any more."""
        shards, whole = self._counts[self.world.rank], alone["gradients"]
        adding = 3 * shards * whole // 4  # the sums of two and of four shards
        if self.world.size > 1:
            largest = max(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
            bucket = max(min(4 * _CHUNK, whole), largest)
            adding = whole + bucket * (shards + 2 * self._count)  # its own, all, and their sums
        more = max(0, adding - alone["activations"])
        return {**alone, "gradients": shards * whole, "communication": more}

    def describe(self) -> str:
        return f"strict, {self._count} shards (equal bits on 1 to {self._count} ranks)"

    @property
    def _count(self) -> int:
        assert self.shards is not None
        return self.shards

    @contextmanager
    def _shard(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        # looked up each time: a layer may replace a buffer by another tensor
        if not self._rows and not self._before:
            self._before = [buffer.clone() for buffer in wrapped.buffers()]
        yield
        if not last:
            return
        if self.world.is_first and not self._rows:
            self._first = [buffer.clone() for buffer in wrapped.buffers()]
        copy_all(wrapped.buffers(), self._before)
        self._rows.append([_taken(parameter) for parameter in self._parameters])
        if len(self._rows) == self._counts[self.world.rank]:
            if self.world.is_first:
                copy_all(wrapped.buffers(), self._first)
            broadcast_buffers(self.world, wrapped, self._saved_buffers)
            self._add_up()
            self._rows, self._before, self._first = [], [], []

    @torch.no_grad()
    def _add_up(self) -> None:
        """Give every parameter the sum of all shards' gradients. Collectives."""
        if self.world.size == 1:
            for parameter, gradient in zip(self._parameters, _tree_sum(self._rows), strict=True):
                parameter.grad = gradient
            return
        for bucket in _buckets(self._parameters):
            own = torch.stack([torch.cat([row[i].flatten() for i in bucket]) for row in self._rows])
            (total,) = _tree_sum([[row] for row in self._gathered(own)])
            at = 0
            for i in bucket:
                parameter = self._parameters[i]
                mine = total[at : at + parameter.numel()].view_as(parameter)
                parameter.grad = torch.empty_like(parameter).copy_(mine)  # in the parameter's memory format
                at += parameter.numel()

    def _gathered(self, own: Tensor) -> list[Tensor]:
        """All shards' rows, in their order, from this rank's: (its shards, n)."""
        most = max(self._counts)
        padded = own if len(own) == most else torch.cat([own, own.new_zeros(most - len(own), own.shape[1])])
        ranks = [torch.empty_like(padded) for _ in self._counts]
        dist.all_gather(ranks, padded)
        return [row for rows, count in zip(ranks, self._counts, strict=True) for row in rows[:count]]


def _tree_sum(rows: Iterable[Iterable[Tensor]]) -> tuple[Tensor, ...]:
    """The sum over rows of the tensors at each position, pairwise, in an order that depends only on the
    number of rows."""
    level = [tuple(row) for row in rows]
    while len(level) > 1:
        pairs = [torch._foreach_add(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[int]]:
    """Consecutive parameters of one dtype that are sent together, by their indices."""
    bucket: list[int] = []
    size = 0
    for i, parameter in enumerate(parameters):
        if bucket and (size + parameter.numel() > _CHUNK or parameter.dtype != parameters[bucket[0]].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(i)
        size += parameter.numel()
    yield bucket


def _taken(parameter: nn.Parameter) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    parameter.grad = None
    return gradient.to_dense() if gradient.is_sparse else gradient
