"""The flags that travel with the gradients."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from toy import auto

from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World
from ddptrain.run.setup import make_strategy
from ddptrain.testing import run_ranks


def exchanged(strategy: Strategy, wrapped: nn.Module, step: int, stop: bool, loss: Tensor) -> list[float]:
    """The mean of all ranks' flags, after a backward pass with them."""
    sent = strategy.send_flags(wrapped, step, stop, loss)
    assert sent is not None
    torch.autograd.backward([loss, sent[0]], [torch.ones(()), sent[1]])
    received = strategy.receive_flags(wrapped)
    assert received is not None
    assert sent[0].grad is None
    mean: list[float] = received.tolist()
    return mean


class Spectral(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(11, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=20)


def told(
    world: World, stop: bool, step: int, bad: bool, compression: str = "none", *last: nn.Module
) -> tuple[list[float], bool]:
    """The mean flags, and whether this rank takes all to be at its step."""
    strategy = make_strategy(auto(compression=compression), world)
    model = nn.Sequential(nn.Linear(3, 20), nn.Linear(20, 20), *(last or (nn.Linear(20, 2),)))
    wrapped = strategy.wrap(model)
    loss = wrapped(torch.ones(2, 3)).sum() * (float("nan") if bad else 1.0)
    mean = exchanged(strategy, wrapped, step, stop, loss)
    return mean, strategy.same_step(mean[1], step)


@dataclass(frozen=True)
class Answer:
    notes: str
    logits: Tensor


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Answer:
        return Answer("seen", self.used(x))


def test_unused_parameters_are_looked_for_behind_a_dataclass() -> None:
    def received(world: World) -> tuple[float, bool]:
        strategy = make_strategy(auto(find_unused_parameters=True), world)
        wrapped = strategy.wrap(Answering())
        answer = wrapped(torch.ones(2, 3))
        loss = answer.logits.sum()
        assert strategy.send_flags(wrapped, 7, world.rank == 1, loss) is None
        loss.backward()
        mean = strategy.receive_flags(wrapped)
        assert mean is not None
        stop, at = mean.tolist()
        return stop, strategy.same_step(at, 7)

    assert run_ranks(received, 2) == [(0.5, True)] * 2


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_one_ranks_wish_to_stop_reaches_all(size: int, compression: str) -> None:
    for mean, aligned in run_ranks(lambda w: told(w, w.rank == 1, 70, False, compression), size):
        assert mean[0] == pytest.approx(1 / size, rel=0.01)
        assert aligned
    for mean, aligned in run_ranks(lambda w: told(w, False, 70, False, compression), size):
        assert mean[0] == 0
        assert aligned


def test_flags_are_real_where_the_last_parameter_is_not() -> None:
    for mean, aligned in run_ranks(lambda w: told(w, w.rank == 1, 70, False, "none", Spectral()), 2):
        assert (mean[0], aligned) == (0.5, True)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_one_ranks_nan_reaches_all(size: int, compression: str) -> None:
    for mean, _ in run_ranks(lambda w: told(w, False, 3, w.rank == size - 1, compression), size):
        assert mean[0] != mean[0]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_at_another_step_is_noticed_by_all(size: int) -> None:
    for behind in (1, 2, 63):
        for _, aligned in run_ranks(
            lambda w, b=behind: told(w, False, 130 - b * (w.rank == 0), False),  # type: ignore[misc]
            size,
        ):
            assert not aligned


@pytest.mark.parametrize("as_view", [True, False])
def test_what_ranks_have_told_before_changes_nothing(as_view: bool) -> None:
    """Each rank hands the same few tensors over and over; sums over ranks are never written into them."""

    def rank(world: World) -> list[list[float]]:
        strategy = make_strategy(auto(gradient_as_bucket_view=as_view), world)
        wrapped = strategy.wrap(nn.Linear(3, 4))
        means = []
        for step in range(12):
            loss = wrapped(torch.ones(2, 3)).sum()
            means.append(exchanged(strategy, wrapped, step, step % 4 == 1 and world.rank == 1, loss))
            wrapped.zero_grad(set_to_none=True)
        return means

    expected = [[0.5 if step % 4 == 1 else 0.0, step % 4] for step in range(12)]
    assert run_ranks(rank, 2) == [expected, expected]


def test_flags_cost_no_collective_of_their_own() -> None:
    def buckets(world: World) -> int:
        sent = 0

        def hook(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            nonlocal sent
            sent += 1
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        strategy = make_strategy(auto(), world)
        wrapped = strategy.wrap(nn.Linear(3, 4))
        assert isinstance(wrapped, DistributedDataParallel)
        wrapped.register_comm_hook(None, hook)
        loss = wrapped(torch.ones(2, 3)).sum()
        exchanged(strategy, wrapped, 0, False, loss)
        return sent

    assert run_ranks(buckets, 2) == [1, 1]
