"""strategy=strict: the same bits on any number of ranks.

The global batch is always cut into the same shards. Each has its own backward pass, and the shards' gradients
are added in a fixed tree, independent of the rank that computed them (see `ddptrain.strategies.shard_sum`).
Every shard starts from the same buffers and extra state; those of the first shard (BatchNorm's running
statistics) are kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from torch import Tensor, nn

from ddptrain.api.strategy import Flags, Strategy
from ddptrain.api.world import World
from ddptrain.distributed.comm import broadcast, from_first_rank
from ddptrain.distributed.snapshot import Snapshot, saved_buffers, with_extra_state
from ddptrain.errors import UserError
from ddptrain.strategies.flag_bucket import FlagBucket
from ddptrain.strategies.shard_sum import ShardSum


@final
class Strict(Strategy):
    """shards: their number, at least one per rank; the sampler assigns them."""

    def __init__(self, world: World, shards: int) -> None:
        super().__init__(world)
        if shards < 1:
            raise UserError(f"strategy.shards={shards}: must be at least 1.")
        self.shards = shards
        self._sum: ShardSum | None = None
        self._layers: list[nn.Module] = []
        self._before: Snapshot | None = None
        """Buffers and extra state at the start of this step."""
        self._first: Snapshot | None = None
        """On rank 0: those after the first shard."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = FlagBucket(model, divisor=self._count)
        self._flags = Flags(wrapped.rank_flags)
        if self._sum is not None:
            self._sum.remove()
        trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
        self._sum = ShardSum(self.world, trained, self._count)
        self._layers = list(wrapped.modules())
        return wrapped.hidden()

    @contextmanager
    def accumulate(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """``last``: of its shard. After a rank's last shard, the sum over all shards is its gradient."""
        assert self._sum is not None
        if self._before is None:
            self._before = Snapshot(self._layers)
        if last:
            self._sum.begin()
        yield
        if not last:
            return
        if self.world.is_first and self._sum.is_first_shard:
            self._first = Snapshot(self._layers)
        if not self._sum.end():
            self._before.restore()
            return
        if self._first is not None:
            self._first.restore()
        self._take_from_first_rank()
        self._sum.finish()
        self._before = self._first = None

    def send_flags(
        self, wrapped: nn.Module, step: int, stop: bool, loss: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        assert isinstance(wrapped, FlagBucket)
        return wrapped.send(self.flags.row(step, stop, loss))

    def receive_flags(self, wrapped: nn.Module) -> Tensor | None:
        assert isinstance(wrapped, FlagBucket)
        return wrapped.take()

    def describe(self) -> str:
        return f"strict, {self._count} shards (equal bits on 1 to {self._count} ranks)"

    @property
    def _count(self) -> int:
        assert self.shards is not None
        return self.shards

    def _take_from_first_rank(self) -> None:
        """Its buffers and extra state. Collectives, the second only of a model that has such state."""
        broadcast(self.world, [buffer for *_, buffer in saved_buffers(self._layers)])
        if stateful := with_extra_state(self._layers):
            states = from_first_rank(self.world, [layer.get_extra_state() for layer in stateful])
            for layer, state in zip(stateful, states, strict=True):
                layer.set_extra_state(state)
