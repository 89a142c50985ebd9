"""What a run has cost: the sum over all its processes, of whatever kind their ends were."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Classify, Fit, plain, run_killed_at

from ddptrain.api.recipe import Loss, Progress
from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.observe.summary import Summary

STEPS, BATCH, STEP_S = 12, 10, 0.03


class Slow(Classify):
    def loss(self, model: torch.nn.Module, batch: Any, progress: Progress) -> Loss:
        time.sleep(STEP_S)
        return super().loss(model, batch, progress)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(
    "kills", [(), (4, 8), *(pytest.param(kills, marks=pytest.mark.long) for kills in ((4,), (4, 4)))]
)
@pytest.mark.parametrize("save_every", [4, 3])
def test_a_summary_counts_what_all_processes_have_done(
    tmp_path: Path, ranks: int, kills: tuple[int, ...], save_every: int
) -> None:
    """Killed right after the first save at a step or beyond it."""
    began = time.perf_counter()
    for kill in (*kills, None):
        plan = Plan(
            steps=STEPS, train_size=100, batch_size=BATCH, log_every=1, eval_every=6, save_every=save_every
        )

        def rank(world: World, plan: Plan = plan, kill: int | None = kill) -> None:
            observers = [Summary()] if world.is_first else []
            fit = Fit(plan, task=Slow, make_model=plain, observers=observers)
            fit.run(world, tmp_path, kill if world.is_first else None)

        run_killed_at(kill, rank, ranks, tmp_path)
    seconds = time.perf_counter() - began

    summary = json.loads((tmp_path / "summary.json").read_text())
    times = json.loads((tmp_path / "times.json").read_text())
    assert summary["processes"] == len(kills) + 1
    assert times["samples"] == STEPS * BATCH
    assert STEP_S * STEPS <= summary["time"]["forward"] <= sum(summary["time"].values())
    assert sum(summary["time"].values()) <= summary["seconds"] <= seconds
    training = sum(summary["time"][phase] for phase in ("data", "copy", "forward", "backward"))
    training += sum(summary["time"][phase] for phase in ("all_reduce", "optimizer", "logging"))
    assert summary["samples_per_s"] == pytest.approx(times["samples"] / training)
    assert summary["peak_memory_mib"] > 0
