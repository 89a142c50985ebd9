"""Each sample once an epoch, in an order that no world size, accumulation or restart changes."""

import random
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.api.order import Weighted
from ddptrain.api.sampler import Sampler
from ddptrain.errors import UserError

CPU = torch.device("cpu")


def ids_of(sampler: Sampler, step: int) -> list[int]:
    parts = chain(*sampler.slices(step))
    return [i for part in parts for i in sampler.order(part.epoch)[part.start : part.stop].tolist()]


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 60), batch=st.integers(1, 40), seed=st.integers(0, 2**62))
def test_the_stream_of_global_batches_is_the_epochs_one_after_the_other(
    size: int, batch: int, seed: int
) -> None:
    sampler = Sampler(size, batch, seed)
    steps = -(-3 * size // batch)
    stream = [i for step in range(steps) for i in ids_of(sampler, step)]
    for epoch in range(3):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), size=st.integers(1, 50), batch=st.integers(4, 40), seed=st.integers(0, 99))
def test_ranks_and_micro_batches_cut_a_global_batch_without_changing_it(
    data: st.DataObject, size: int, batch: int, seed: int
) -> None:
    world_size = data.draw(st.integers(1, 4))
    micro_batch = data.draw(st.none() | st.integers(1, batch))
    step = data.draw(st.integers(0, 50))
    together: list[int] = []
    for rank in range(world_size):
        sampler = Sampler(size, batch, seed, rank, world_size, micro_batch)
        micro_batches = sampler.slices(step)
        lengths = [sum(part.stop - part.start for part in parts) for parts in micro_batches]
        assert tuple(lengths) == sampler.micro_sizes
        assert all(0 < length <= (micro_batch or batch) for length in lengths)
        for ids, _ in sampler.samples(range(step, step + 1), CPU):
            together += ids.tolist()
    alone = Sampler(size, batch, seed)
    assert together == ids_of(alone, step)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(Sampler(100, 10, seed).order(epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4


def test_the_epoch_of_each_sample_is_told_where_a_batch_reaches_over_an_epochs_end() -> None:
    sampler = Sampler(size=5, batch_size=4, seed=0)
    [(ids, epochs)] = sampler.samples(range(1, 2), CPU)
    assert epochs.tolist() == [0, 1, 1, 1]
    assert ids.tolist() == [*sampler.order(0)[4:].tolist(), *sampler.order(1)[:3].tolist()]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), size=st.integers(1, 50), batch=st.integers(4, 40), seed=st.integers(0, 99))
def test_shards_are_the_same_on_any_number_of_ranks(
    data: st.DataObject, size: int, batch: int, seed: int
) -> None:
    """Their samples, and the numbers that their dropout follows from."""
    shards = data.draw(st.integers(1, batch))
    micro_batch = data.draw(st.none() | st.integers(1, batch))

    def dealt(world_size: int) -> list[tuple[int, int, bool, list[int]]]:
        found = []
        for rank in range(world_size):
            sampler = Sampler(size, batch, seed, rank, world_size, micro_batch, shards)
            for own, (ids, _) in zip(sampler.micro_batches, sampler.samples(range(3, 4), CPU), strict=True):
                assert len(ids) == own.size
                found.append((own.shard, own.stream, own.ends_shard, ids.tolist()))
        return found

    alone = dealt(1)
    assert len({stream for _, stream, _, _ in alone}) == len(alone)
    assert [shard for shard, _, ends, _ in alone if ends] == list(range(shards))
    assert dealt(data.draw(st.integers(1, shards))) == alone


@pytest.mark.parametrize("schedule", range(100))
def test_no_sample_is_missed_or_repeated_while_the_world_changes(schedule: int) -> None:
    """Stopped anywhere and gone on with on another number of ranks, at an epoch's end too."""
    dice = random.Random(schedule)
    size, batch = dice.randint(5, 200), dice.randint(4, 60)
    shards = dice.choice([None, None, 4])
    steps = -(-4 * size // batch)
    stops = sorted({*dice.sample(range(1, steps + 1), min(steps, dice.randint(0, 6))), steps})
    if dice.random() < 0.5:
        stops = sorted({*stops, min(steps, -(-size // batch))})  # exactly where an epoch ends
    seen: list[int] = []
    start = 0
    for stop in stops:
        world_size = dice.randint(1, 4)
        samplers = [Sampler(size, batch, 11, rank, world_size, None, shards) for rank in range(world_size)]
        streams = [sampler.samples(range(start, stop), CPU) for sampler in samplers]
        for _ in range(start, stop):
            for sampler, stream in zip(samplers, streams, strict=True):
                for _ in sampler.micro_batches:
                    seen += next(stream)[0].tolist()
        start = stop
    alone = Sampler(size, batch, 11)
    assert seen == [i for step in range(steps) for i in ids_of(alone, step)]
    for epoch in range(len(seen) // size):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(deadline=None, max_examples=100)
@given(
    weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=60),
    epoch=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_an_epoch_holds_a_sample_as_often_as_its_weight_says(
    weights: list[float], epoch: int, seed: int
) -> None:
    size, shares = len(weights), torch.tensor(weights, dtype=torch.float64)
    order = Sampler(size, 1, seed, epoch_order=Weighted(shares)).order(epoch)
    counts, wanted = order.bincount(minlength=size), shares / shares.sum() * size
    assert len(order) == size
    assert ((counts - wanted).abs() < 1 + 1e-9).all()


def test_rounding_is_by_chance_and_equal_weights_are_a_permutation() -> None:
    shares = torch.tensor([0.5] * 50 + [1.5] * 50, dtype=torch.float64)
    sampler = Sampler(100, 10, seed=3, epoch_order=Weighted(shares))
    epochs = torch.stack([sampler.order(epoch) for epoch in range(2000)])
    found = epochs.flatten().bincount(minlength=100) / 2000
    # 2,000 draws of a half: a standard deviation of 0.011
    assert (found - shares).abs().max() < 0.06
    places = epochs.double().mean(dim=1)  # ids follow each other in no order
    first, second = epochs[:, :-1].flatten().double(), epochs[:, 1:].flatten().double()
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.02
    assert places.std() > 0
    equal = Sampler(100, 10, seed=3, epoch_order=Weighted(torch.ones(100, dtype=torch.float64)))
    assert sorted(equal.order(0).tolist()) == list(range(100))


@pytest.mark.parametrize("weights", [[1.0, 2.0], [1.0, 0.0, 1.0], [1.0, float("inf"), 1.0]])
def test_weights_that_make_no_sense_are_refused(weights: list[float]) -> None:
    with pytest.raises(UserError, match=r"^Data\.epoch_order: weights must be 3 positive numbers"):
        Sampler(3, 1, 0, epoch_order=Weighted(torch.tensor(weights, dtype=torch.float64)))


@settings(deadline=None, max_examples=50)
@given(
    weights=st.lists(st.floats(0.01, 10), min_size=3, max_size=40),
    batch=st.integers(3, 50),
    ranks=st.integers(1, 3),
)
def test_a_sample_drawn_again_in_an_epoch_has_a_number_of_its_own(
    weights: list[float], batch: int, ranks: int
) -> None:
    """The first time the epoch's own; never one of another epoch; the same for any number of ranks."""
    size, shares = len(weights), torch.tensor(weights, dtype=torch.float64)

    def draws(rank: int, of: int) -> list[list[tuple[int, int]]]:
        sampler = Sampler(size, batch, 7, rank, of, epoch_order=Weighted(shares))
        return [
            list(zip(ids.tolist(), epochs.tolist(), strict=True))
            for ids, epochs in sampler.samples(range(6), CPU)
        ]

    whole = [draw for step in draws(0, 1) for draw in step]
    by_rank = [draws(rank, ranks) for rank in range(ranks)]
    assert [draw for step in zip(*by_rank, strict=True) for share in step for draw in share] == whole
    assert len(set(whole)) == len(whole)
    seen = set[tuple[int, int]]()
    for at, (sample, epoch) in enumerate(whole):
        own = at // size
        assert epoch == own or (epoch > 2**30 and (sample, own) in seen)
        seen.add((sample, own))
