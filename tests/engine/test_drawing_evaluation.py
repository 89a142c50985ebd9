"""An evaluation that draws (the samples of a VAE, the noise of a diffusion model): the same numbers each
time, on any number of ranks, killed or not; and nothing after it is drawn otherwise."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy import Classify, Fit, run_killed_at, strict, with_noise

from ddptrain.api.recipe import Figure, Report, TextSample
from ddptrain.api.rng import state_of_generators
from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.observe.jsonl import Jsonl
from ddptrain.testing import run_ranks

PLAN = Plan(
    steps=12, train_size=60, batch_size=20, eval_batch_size=16, eval_every=4, save_every=4, log_every=4,
    seed=5, shards=4,
)  # fmt: skip


def drawn() -> float:
    return float(torch.rand(())) + random.random() + float(np.random.rand())


class Drawing(Classify):
    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        noise = torch.rand(len(batch[1]), dtype=torch.float64).sum() + drawn()
        return {**super().evaluate(model, batch), "noise": noise}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        report = super().report(sums)
        return Report({**report.metrics, "noise": float(sums["noise"]), "again": drawn()})

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        return {"text": TextSample(str(drawn()))}


def lines(folder: Path) -> list[dict[str, Any]]:
    every = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in every if line["split"] == "valid"]


def train(folder: Path, ranks: int, stop_at: int | None = None) -> list[dict[str, Any]]:
    def rank(world: World) -> None:
        observers = [Jsonl()] if world.is_first else []
        fit = Fit(PLAN, make_model=with_noise, task=Drawing, strategy=strict(4), observers=observers)
        fit.run(world, folder, stop_at if world.is_first else None)

    run_killed_at(stop_at, rank, ranks, folder)
    return lines(folder) if stop_at is None else []


def test_any_number_of_ranks_draws_the_same(tmp_path: Path) -> None:
    alone = train(tmp_path / "1", 1)
    assert len(alone) == 3
    assert len({line["noise"] for line in alone}) == 1
    assert len({line["again"] for line in alone}) == 1
    for ranks in (2, 3):
        assert train(tmp_path / str(ranks), ranks) == alone


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_that_is_repeated_draws_the_same(tmp_path: Path, ranks: int) -> None:
    """A checkpoint is written before the evaluation at its step: a resume evaluates first."""
    train(tmp_path / "killed", ranks, stop_at=4)
    assert train(tmp_path / "killed", ranks) == train(tmp_path / "whole", ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_after_it_is_drawn_otherwise(tmp_path: Path, ranks: int) -> None:
    def states(world: World, eval_every: int) -> list[tuple[object, ...]]:
        found = []

        def noted(steps: Iterable[int]) -> Iterator[int]:
            for step in steps:
                found.append(state_of_generators())
                yield step

        random.seed(1)  # a fork seeds it anew
        folder = tmp_path / f"{eval_every}"
        plan = replace(PLAN, eval_every=eval_every, save_every=100)
        Fit(plan, make_model=with_noise, task=Drawing, strategy=strict(4), step_iterator=noted).run(
            world, folder
        )
        return found[1:]  # the first is before any step

    for name in ("1", "100"):
        (tmp_path / name).mkdir()
    often, never = (run_ranks(lambda world, every=every: states(world, every), ranks) for every in (1, 100))
    assert often == never
