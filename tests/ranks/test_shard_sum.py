"""The sum over shards: its tree, what is sent for it, what it holds, and how it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint
from toy import auto, strict

from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World, shards_of
from ddptrain.run.setup import make_strategy
from ddptrain.strategies.shard_sum import merge_siblings
from ddptrain.testing import RankFailed, run_ranks

SHARDS = 8


def pairwise_sum(rows: list[Any]) -> Any:
    """Level by level, as strategy=strict has added since its first version."""
    while len(rows) > 1:
        pairs = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)]
        rows = pairs + rows[2 * len(pairs) :]
    return rows[0]


@pytest.mark.parametrize("shards", range(1, 17))
def test_partial_sums_make_up_the_same_tree_in_every_world(shards: int) -> None:
    """Numbers whose sum depends on the order of additions, and every run is within a part of the shards."""
    values = [(i * 2654435761 % 1000) * 10.0 ** (i % 7 - 3) + 0.1 for i in range(shards)]
    for ranks in range(1, shards + 1):
        runs = [shards_of(rank, ranks, shards) for rank in range(ranks)]
        assert [i for run in runs for i in run] == list(range(shards))
        assert max(map(len, runs)) - min(map(len, runs)) <= 1
        spans, sums = [], []
        for run in runs:
            own, additions = merge_siblings([(i, i + 1) for i in run], shards)
            spans += own
            sums += added([values[i] for i in run], additions)
        (whole,), additions = merge_siblings(spans, shards)
        assert whole == (0, shards)
        assert added(sums, additions) == [pairwise_sum(values)], ranks


def added(values: list[float], additions: list[int]) -> list[float]:
    stack: list[float] = []
    for value, count in zip(values, additions, strict=True):
        stack.append(value)
        for _ in range(count):
            right = stack.pop()
            stack[-1] += right
    return stack


class Given(nn.Module):
    """Layers that get a given gradient each, some of them not in the first shard, and one that gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Linear(1100, 1000) for _ in range(3))

    def forward(self, shard: int) -> Tensor:
        self.norm(torch.full((2, 4), float(shard + 1)))
        used = [p for i, p in enumerate(self.layers.parameters()) if shard or i % 3]
        return torch.stack([(p * given(p, i, shard)).sum() for i, p in enumerate(used)]).sum()


def given(parameter: Tensor, i: int, shard: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * shard + i)
    return torch.randn(parameter.shape, generator=generator)


def step(strategy: Strategy, wrapped: nn.Module, world: World, number: int) -> list[float]:
    """One step without an optimizer; the mean flags."""
    for shard in world.shards(SHARDS):
        with strategy.accumulate(wrapped, last=True):
            loss = wrapped(shard)
            sent = strategy.send_flags(wrapped, number, world.rank == 1, loss)
            assert sent is not None
            torch.autograd.backward([loss, sent[0]], [torch.ones(()), sent[1]])
    flags = strategy.receive_flags(wrapped)
    assert flags is not None
    return flags.tolist()  # type: ignore[no-any-return]


def made(world: World, model: nn.Module | None = None) -> tuple[Strategy, nn.Module, nn.Module]:
    torch.manual_seed(1)
    model = model or Given()
    strategy = make_strategy(strict(SHARDS), world)
    return strategy, model, strategy.wrap(model)


def taken(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("sizes", [(2, 3), pytest.param((4, 5, 8), marks=pytest.mark.long)])
def test_gradients_statistics_and_flags_on_any_number_of_ranks(sizes: tuple[int, ...]) -> None:
    """Several buckets, parameters without a gradient in a shard or at all; more than one step, for the
    memory is used again; and wrapped again, as for thawing."""

    def rank(world: World) -> tuple[list[list[Tensor]], list[float], Tensor]:
        strategy, model, wrapped = made(world)
        found = []
        for number in range(3):
            flags = step(strategy, wrapped, world, number)
            found.append(taken(model))
        wrapped = strategy.wrap(model)
        flags = step(strategy, wrapped, world, 3)
        assert strategy.same_step(flags[1], 3)
        return [*found, taken(model)], flags, model.norm.running_mean.clone()  # type: ignore[union-attr, operator]

    (alone, flags, statistics) = run_ranks(rank, 1)[0]
    assert flags[0] == 0
    assert len(alone[0]) == 8, "a parameter without a gradient has one of zero"
    assert_same(alone[0], alone[1])
    for size in sizes:
        for gradients, flags, means in run_ranks(rank, size):
            assert_same(alone, gradients)
            assert flags[0] > 0
            assert torch.equal(means, statistics)


class Sent:
    """Counts the bytes that the collectives of the gradients send from this rank, and their calls."""

    def __init__(self, world: World) -> None:
        self.calls: list[str] = []
        self.sizes: list[int] = []
        """Bytes, of each call."""
        others = world.size - 1
        self._watch("all_to_all_single", lambda out, own, theirs, mine: sum(mine) - mine[world.rank])
        self._watch("all_gather_into_tensor", lambda out, own: own.numel() * others)
        self._watch("all_reduce", lambda whole: 2 * others * whole.numel() // world.size)

    def _watch(self, name: str, numbers: Callable[..., int]) -> None:
        call = getattr(dist, name)

        def watched(tensor: Tensor, *more: Any, **named: Any) -> Any:
            self.calls.append(name)
            self.sizes.append(numbers(tensor, *more) * tensor.element_size())
            return call(tensor, *more, **named)

        setattr(dist, name, watched)


PARTIAL_SUMS = {2: [1, 1], 3: [2, 2, 1], 4: [1] * 4, 5: [1] * 5, 8: [1] * 8}
"""Of each rank, for 8 shards."""
BUCKETS = [[1000, 1_100_000]] * 3 + [[4, 4, 2]]
"""The parameters' sizes, from the last one to the first and the flags."""


@pytest.mark.parametrize("size", PARTIAL_SUMS)
def test_what_is_sent_for_each_bucket(size: int) -> None:
    """By (partial sums + 1) / 2 times the bytes of a ring all-reduce; on 2, 4, 5 and 8 ranks just these."""

    def rank(world: World) -> tuple[list[str], list[int]]:
        strategy, model, wrapped = made(world)
        step(strategy, wrapped, world, 0)
        model.zero_grad(set_to_none=True)
        sent = Sent(world)
        step(strategy, wrapped, world, 1)
        return sent.calls, sent.sizes

    ranks = run_ranks(rank, size)
    for (calls, sizes), sums in zip(ranks, PARTIAL_SUMS[size], strict=True):
        assert calls == ranks[0][0], "all ranks start them in one order"
        kinds = ["all_reduce"] if size == 2 else ["all_to_all_single", "all_gather_into_tensor"]
        assert sorted(calls) == sorted(kinds * len(BUCKETS))
        by_kind = [[n for call, n in zip(calls, sizes, strict=True) if call == kind] for kind in kinds]
        chunks = [-(-sum(-(-n // 16) * 16 for n in bucket) // size) for bucket in BUCKETS]
        expected = [(sums + 1) * (size - 1) * 4 * chunk for chunk in chunks]
        assert [sum(one) for one in zip(*by_kind, strict=True)] == expected
        ring = 2 * (size - 1) / size * 4 * sum(map(sum, BUCKETS))
        assert sum(sizes) == pytest.approx(ring * (sums + 1) / 2, rel=1e-4), "the padding is next to nothing"


def test_buckets_are_sent_while_the_backward_pass_still_runs() -> None:
    def rank(world: World) -> list[int]:
        strategy, model, wrapped = made(world)
        sent, before_the_last = Sent(world), []
        first: nn.Linear = model.layers[0]  # type: ignore[index, assignment]
        first.weight.register_hook(lambda _: before_the_last.append(len(sent.calls)))
        for number in range(2):
            step(strategy, wrapped, world, number)
            model.zero_grad(set_to_none=True)
        return before_the_last

    a_step = 4 * 2  # calls
    for counts in run_ranks(rank, 8)[1:]:  # shard 0 has none for it
        assert counts == [3, a_step + 3]


def highest(world: World, shards: int | None) -> tuple[int, int]:
    """The bytes that torch holds at most in the third step beyond the weights; those of the gradient."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    strategy = make_strategy(auto() if shards is None else strict(shards), world)
    parts = 1 if shards is None else shards // world.size
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        wrapped = strategy.wrap(model)
        for number in range(3):
            model.zero_grad(set_to_none=True)
            with record_function("a step"):
                for _ in range(parts):
                    with strategy.accumulate(wrapped, last=True):
                        loss = wrapped(torch.ones(8 // parts, 1024)).sum()
                        sent = strategy.send_flags(wrapped, number, False, loss)
                        assert sent is not None
                        torch.autograd.backward([loss, sent[0]], [torch.ones(()), sent[1]])
            strategy.receive_flags(wrapped)
    assert seen.profiler is not None
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held = most = steps = 0
    for event in events:
        steps += event.name() == "a step"
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held) if steps == 3 else 0
    return most, sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(
    ("size", "shards"),
    [(2, 4), (2, 2), *(pytest.param(4, shards, marks=pytest.mark.long) for shards in (4, 8))],
)
def test_memory_is_that_of_ddp_and_a_bucket(size: int, shards: int) -> None:
    """With one partial sum at a time: up to two shards a rank."""
    fast = run_ranks(lambda world: highest(world, None), size)
    strict = run_ranks(lambda world: highest(world, shards), size)
    for (ours, gradient), (theirs, _) in zip(strict, fast, strict=True):
        assert theirs >= gradient  # its buckets
        assert ours <= gradient + 25 * 2**20, (ours / gradient, theirs / gradient)


class Twice(nn.Module):
    """One layer in two checkpoints of the old kind, whose backward passes are separate."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x.sum()


def test_a_gradient_in_parts_is_refused() -> None:
    """The first part would have been sent."""

    def rank(world: World) -> None:
        strategy, _, wrapped = made(world, Twice())
        with strategy.accumulate(wrapped, last=True):
            wrapped(torch.ones(2, 3, requires_grad=True)).backward()

    with pytest.raises(RankFailed, match=r"UserError: strategy=strict: model.layer.* got its gradient in"):
        run_ranks(rank, 1)
