"""strategy=strict: the same bits on any number of ranks, and over any change of it."""

import os
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from scenes import detector
from texts import language_model, write_text
from torch import nn
from toy import (
    CLASSES,
    DIED,
    FEATURES,
    Classify,
    CountPositives,
    Fit,
    Vectors,
    lr_schedule,
    newest_state,
    run_killed_at,
    strict,
    with_noise,
)

from ddptrain.api.recipe import Data, Task
from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.errors import UserError
from ddptrain.observe.jsonl import Jsonl
from ddptrain.testing import RankFailed, run_ranks

SHARDS = 4
ADAMW: dict[str, Any] = {"_target_": "torch.optim.AdamW", "lr": 0.01}
Pair = Callable[[], tuple[Task, Data]]


def plan(**changes: Any) -> Plan:
    return Plan(
        **{"steps": 12, "train_size": 100, "batch_size": 26, "log_every": 3, "eval_every": 5, "save_every": 3,
           "clip_norm": 1.0, "seed": 5, "shards": SHARDS, **changes}
    )  # fmt: skip


def train(
    folder: Path, sizes: list[tuple[int, int | None]], pair: Pair, calendar: Plan, **changes: Any
) -> tuple[dict[str, Any], bytes]:
    """The last checkpoint and the metrics after stretches of (ranks, killed after which save)."""
    folder.mkdir()
    for size, stop_at in sizes:

        def rank(world: World, stop_at: int | None = stop_at) -> None:
            fit = fitting(world, calendar, **changes)
            fit.train(*pair(), world, folder, stop_at if world.is_first else None)

        run_killed_at(stop_at, rank, size, folder)
    return outcome(folder)


def fitting(world: World, calendar: Plan, **changes: Any) -> Fit:
    torch.use_deterministic_algorithms(True)
    return Fit(
        calendar, optim=ADAMW, sched=lr_schedule(warmup=0.2), ema=0.9, strategy=strict(calendar.shards or 8),
        observers=[Jsonl()] if world.is_first else [], **changes,
    )  # fmt: skip


def outcome(folder: Path) -> tuple[dict[str, Any], bytes]:
    return newest_state(folder), (folder / "metrics.jsonl").read_bytes()


def points(task: type[Classify] = Classify) -> Pair:
    return lambda: (task(with_noise), Vectors(100))


@pytest.mark.parametrize("micro_batch", [pytest.param(None, marks=pytest.mark.long), 4])
@pytest.mark.parametrize(
    ("task", "precision"),
    [
        (Classify, "fp32"),
        pytest.param(Classify, "bf16", marks=pytest.mark.long),
        pytest.param(Classify, "fp16", marks=pytest.mark.long),
        pytest.param(CountPositives, "fp32", marks=pytest.mark.long),
    ],
)
def test_any_number_of_ranks_and_any_change_of_it(
    tmp_path: Path, micro_batch: int | None, task: type[Classify], precision: str
) -> None:
    """BatchNorm, dropout, an average, clipping, accumulation: state and metrics, to the bit."""

    def run(name: str, sizes: list[tuple[int, int | None]]) -> tuple[dict[str, Any], bytes]:
        calendar = plan(micro_batch=micro_batch)
        return train(tmp_path / name, sizes, points(task), calendar, precision=precision)

    alone, metrics = run("1", [(1, None)])
    for size in (2, 3, 4):
        state, lines = run(str(size), [(size, None)])
        assert_same(alone, state)
        assert metrics == lines
    state, lines = run("changing", [(3, 3), (4, 6), (1, 9), (2, None)])
    assert_same(alone, state)
    assert metrics == lines


def of_two_buckets() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 1100), nn.BatchNorm1d(1100), nn.ReLU(), nn.Dropout(0.3), nn.Linear(1100, 1000),
        nn.BatchNorm1d(1000), nn.ReLU(), nn.Dropout(0.2), nn.Linear(1000, CLASSES),
    )  # fmt: skip


def two_buckets() -> tuple[Task, Data]:
    return Classify(of_two_buckets), Vectors(100)


EIGHT: dict[str, Any] = {"shards": 8, "batch_size": 36}


@pytest.mark.long
def test_eight_shards_on_as_many_ranks(tmp_path: Path) -> None:
    """On three, two of the ranks have two partial sums."""
    alone, *others = [
        train(tmp_path / str(size), [(size, None)], two_buckets, plan(**EIGHT)) for size in (1, 3, 5, 8)
    ]
    for other in others:
        assert_same(alone, other)


@pytest.mark.long
@pytest.mark.parametrize("trial", range(20))
def test_killed_at_any_step_and_continued_on_any_number_of_ranks(tmp_path: Path, trial: int) -> None:
    calendar = plan(**EIGHT, steps=15)
    alone, metrics = train(tmp_path / "alone", [(1, None)], two_buckets, calendar)
    (tmp_path / "killed").mkdir()
    dice = random.Random(trial)
    sizes = dice.sample((1, 2, 3, 4, 5, 8), 4)
    for size, dies_at in zip(sizes, [*sorted(dice.sample(range(1, 15), 3)), None], strict=True):

        def rank(world: World, size: int = size, dies_at: int | None = dies_at) -> None:
            victim = random.Random(trial).randrange(size)

            def until_killed(steps: Iterable[int]) -> Iterator[int]:
                for step in steps:
                    if step == dies_at and world.rank == victim:
                        os._exit(137)
                    yield step

            fit = fitting(world, calendar, step_iterator=until_killed)
            fit.train(*two_buckets(), world, tmp_path / "killed")

        if dies_at is None:
            run_ranks(rank, size)
        else:
            with pytest.raises(RankFailed, match=DIED):
                run_ranks(rank, size)
    state, lines = outcome(tmp_path / "killed")
    assert_same(alone, state)
    assert metrics == lines


def test_a_recurrent_model_with_its_states(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")

    def pair() -> tuple[Task, Data]:
        return language_model(text, "lstm", dropout=0.2)

    _, data = pair()
    data.prepare(World(), 0)
    calendar = plan(train_size=data.train_size, batch_size=12, save_every=3, eval_every=6)
    alone, metrics = train(tmp_path / "1", [(1, None)], pair, calendar)
    state, lines = train(tmp_path / "changing", [(3, 3), (4, 6), (1, 9), (2, None)], pair, calendar)
    assert alone["carried"]
    assert_same(alone, state)
    assert metrics == lines


@pytest.mark.long
def test_the_detector_with_its_mosaics(tmp_path: Path) -> None:
    def pair() -> tuple[Task, Data]:
        return detector(multi_scale=0.5)

    _, data = pair()
    data.prepare(World(), 0)
    calendar = plan(
        train_size=data.train_size, batch_size=8, steps=6, save_every=2, eval_every=6, log_every=2
    )
    alone, metrics = train(tmp_path / "1", [(1, None)], pair, calendar)
    state, lines = train(tmp_path / "changing", [(3, 2), (2, None)], pair, calendar)
    assert_same(alone, state)
    assert metrics == lines


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"strategy.shards=4: .* 5 ranks"):
        plan().sampler(World(rank=0, size=5, local_size=5))
    with pytest.raises(UserError, match=r"strategy.shards=4: .* global batch of 3"):
        plan(batch_size=3).sampler(World())
    with pytest.raises(UserError, match=r"strategy.shards=8: .* saved with 4"):
        plan(shards=8).check_continues({**plan().position_facts}, "step-1")
