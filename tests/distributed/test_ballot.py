"""The votes that travel with the gradients."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddptrain.api.world import World
from ddptrain.config.schema import Strategy
from ddptrain.strategies.make_strategy import make_strategy
from ddptrain.testing import run_ranks


def voted(
    world: World, stop: bool, step: int, bad: bool, compression: str = "none"
) -> tuple[list[float], bool]:
    """The mean vote, and whether this rank takes all to be at its step."""
    strategy = make_strategy(Strategy(compression=compression), world)
    model = nn.Sequential(nn.Linear(3, 20), nn.Linear(20, 20), nn.Linear(20, 2))
    wrapped = strategy.wrap(model)
    flag_bucket = strategy.flag_bucket(wrapped)
    assert flag_bucket is not None
    loss = wrapped(torch.ones(2, 3)).sum() * (float("nan") if bad else 1.0)
    votes, vote = flag_bucket.vote(step, stop, loss)
    torch.autograd.backward([loss, votes], [torch.ones(()), vote])
    mean = flag_bucket.take().tolist()
    assert votes.grad is None
    return mean, flag_bucket.same_step(mean[1], step, world.size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("compression", ["none", "bf16", "powersgd"])
def test_one_ranks_wish_to_stop_reaches_all(size: int, compression: str) -> None:
    for mean, aligned in run_ranks(lambda w: voted(w, w.rank == 1, 70, False, compression), size):
        assert mean[0] == pytest.approx(1 / size, rel=0.01)
        assert aligned
    for mean, aligned in run_ranks(lambda w: voted(w, False, 70, False, compression), size):
        assert mean[0] == 0
        assert aligned


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("compression", ["none", "bf16", "powersgd"])
def test_one_ranks_nan_reaches_all(size: int, compression: str) -> None:
    for mean, _ in run_ranks(lambda w: voted(w, False, 3, w.rank == size - 1, compression), size):
        assert mean[0] != mean[0]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("compression", ["none", "powersgd"])
def test_a_rank_at_another_step_is_noticed_by_all(size: int, compression: str) -> None:
    for behind in (1, 2, 63):
        for _, aligned in run_ranks(
            lambda w, b=behind: voted(w, False, 130 - b * (w.rank == 0), False, compression),  # type: ignore[misc]
            size,
        ):
            assert not aligned


@pytest.mark.parametrize("as_view", [True, False])
def test_what_ranks_have_voted_before_changes_no_vote(as_view: bool) -> None:
    """Each rank hands the same few tensors over and over; sums over ranks are never written into them."""

    def rank(world: World) -> list[list[float]]:
        strategy = make_strategy(Strategy(gradient_as_bucket_view=as_view), world)
        wrapped = strategy.wrap(nn.Linear(3, 4))
        flag_bucket = strategy.flag_bucket(wrapped)
        assert flag_bucket is not None
        means = []
        for step in range(12):
            loss = wrapped(torch.ones(2, 3)).sum()
            votes, vote = flag_bucket.vote(step, step % 4 == 1 and world.rank == 1, loss)
            torch.autograd.backward([loss, votes], [torch.ones(()), vote])
            means.append(flag_bucket.take().tolist())
            wrapped.zero_grad(set_to_none=True)
        return means

    expected = [[0.5 if step % 4 == 1 else 0.0, step % 4] for step in range(12)]
    assert run_ranks(rank, 2) == [expected, expected]


def test_votes_cost_no_collective_of_their_own() -> None:
    def buckets(world: World) -> int:
        sent = 0

        def hook(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            nonlocal sent
            sent += 1
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        strategy = make_strategy(Strategy(), world)
        wrapped = strategy.wrap(nn.Linear(3, 4))
        assert isinstance(wrapped, DistributedDataParallel)
        wrapped.register_comm_hook(None, hook)
        flag_bucket = strategy.flag_bucket(wrapped)
        assert flag_bucket is not None
        loss = wrapped(torch.ones(2, 3)).sum()
        votes, vote = flag_bucket.vote(0, False, loss)
        torch.autograd.backward([loss, votes], [torch.ones(()), vote])
        return sent

    assert run_ranks(buckets, 2) == [1, 1]
