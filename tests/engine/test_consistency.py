"""Ranks that do not do the same: noticed at the start, and while they train."""

import os
import random
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_same
from toy import Classify, Fit, Vectors, plain, run_killed_at, weights, with_noise

from ddptrain.api.recipe import Loss, Progress
from ddptrain.api.world import World
from ddptrain.config.schema import Config, Train
from ddptrain.engine.consistency import (
    check_replicas,
    check_same_command,
    check_same_model,
    check_same_weights,
)
from ddptrain.engine.plan import Plan
from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.errors import OutOfStep, UserError
from ddptrain.run.setup import make_model
from ddptrain.testing import run_ranks


@pytest.mark.parametrize("bit", [0, 12, 22, 31])
@pytest.mark.parametrize("size", [2, 3])
def test_one_flipped_bit_on_one_rank_is_found(tmp_path: Path, size: int, bit: int) -> None:
    class Flips(Classify):
        def loss(self, model: torch.nn.Module, batch: object, progress: Progress) -> Loss:
            if progress.step == 7 and torch.distributed.get_rank() == size - 1:
                weight = model.module.model[2].weight  # type: ignore[union-attr,index]
                weight.data.view(torch.int32)[1, 3] ^= torch.tensor(1 << bit, dtype=torch.int64).to(
                    torch.int32
                )
            return super().loss(model, batch, progress)  # type: ignore[arg-type]

    def rank(world: World) -> str:
        plan = Plan(steps=20, train_size=100, batch_size=20, verify_every=5)
        with pytest.raises(OutOfStep) as caught:
            Fit(plan, task=Flips).run(world, tmp_path / str(world.rank))
        return str(caught.value)

    found = run_ranks(rank, size)
    assert len(set(found)) == 1
    assert found[0].startswith("after step 10 ")
    if size == 3:
        assert "rank 2 has other weights than the rest, first in " in found[0]
    else:
        assert "the two ranks have other weights, first in " in found[0]


def test_equal_weights_in_any_layout_pass(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(2, 2, dtype=torch.bfloat16))
        if world.rank == 1:
            model = model.to(memory_format=torch.channels_last)
        check_replicas(world, model, 1)

    run_ranks(rank, 2)


def test_ranks_that_start_with_other_weights_are_refused() -> None:
    def rank(world: World) -> str:
        torch.manual_seed(0)
        model = plain()
        check_same_weights(world, model)
        torch.manual_seed(world.rank)
        model[2].reset_parameters()
        with pytest.raises(UserError) as caught:
            check_same_weights(world, model)
        return str(caught.value)

    first, second = run_ranks(rank, 2)
    assert first == second
    assert first.startswith("model: at the start the two ranks have other weights, first in 2.weight. Draw")


def test_what_differs_at_the_start_is_listed() -> None:
    def rank(world: World) -> str:
        config = Config(recipe="toy", task={"a": 1}, data={}, optim={"lr": 0.1})
        model = plain()
        if world.rank == 1:
            config = replace(config, optim={"lr": 0.2}, train=Train(batch_size=64))
            model = with_noise()
        with pytest.raises(UserError) as caught:
            check_same_command(world, asdict(config))
        with pytest.raises(UserError) as other:
            check_same_model(world, model)
        return f"{caught.value}\n{other.value}"

    first, second = run_ranks(rank, 2)
    assert first == second
    assert "optim.lr: 0.2 on rank 1, 0.1 on rank 0." in first
    assert "train.batch_size: 64 on rank 1, 128 on rank 0." in first
    assert "parameter 1.weight: (32,) torch.float32 on rank 1, absent on rank 0." in first
    config = Config(recipe="x", task={}, data={}, optim={})
    run_ranks(lambda world: check_same_command(world, asdict(config)), 3)
    run_ranks(lambda world: check_same_model(world, plain()), 3)


def test_what_draws_from_numpy_or_python_is_seeded(tmp_path: Path) -> None:
    """Weights on all ranks alike, and each step by itself: a repeated run, and a resumed one, is the same."""

    class Drawing(Classify):
        def build(self) -> torch.nn.Module:
            model = super().build()
            with torch.no_grad():
                model[0].weight.copy_(torch.from_numpy(np.random.randn(*model[0].weight.shape)))
                model[2].bias.fill_(random.random())
            return model

        def loss(self, model: torch.nn.Module, batch: Any, progress: Progress) -> Loss:
            features, labels = batch
            return super().loss(
                model, (features * (1 + random.random() + np.random.rand()), labels), progress
            )

    plan = Plan(steps=6, train_size=60, batch_size=20, save_every=2, seed=3)

    def rank(world: World, folder: Path, stop_at: int | None) -> torch.Tensor:
        config = Config(recipe="toy", task={}, data={}, optim={}, seed=3)
        model = make_model(config, Drawing(plain), world.device)
        check_same_weights(world, model)
        fit = Fit(plan, make_model=lambda: model, task=Drawing)
        random.seed(os.urandom(8))
        task = Drawing(lambda: model)
        task.build = lambda: model  # type: ignore[method-assign]
        return weights(fit.train(task, Vectors(60), world, folder, stop_at if world.is_first else None)[0])

    found = []
    for name, kills in (("one", (None,)), ("again", (None,)), ("killed", (2, 4, None))):
        for stop_at in kills:
            run_killed_at(stop_at, partial(rank, folder=tmp_path / name, stop_at=stop_at), 2, tmp_path / name)
        found.append(unpack(read(tmp_path / name / "step-6"))["model"])
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])
