"""stop.patience, stop.metric and stop.target end a run: at the same step on any number of ranks, killed or
not, and as done."""

import json
from pathlib import Path
from typing import Any

import pytest
from compare import assert_same
from hypothesis import given
from hypothesis import strategies as st
from toy import Fit, lr_schedule, newest_state, run_killed_at, strict, with_noise

from ddptrain.api.observer import Evaluated
from ddptrain.api.timing import Timing
from ddptrain.api.world import World
from ddptrain.engine.early_stop import EarlyStop
from ddptrain.engine.plan import Plan
from ddptrain.observe.jsonl import Jsonl
from ddptrain.observe.summary import Summary

PLAN = Plan(steps=60, train_size=96, batch_size=24, micro_batch=8, eval_every=3, save_every=4, shards=4)


def at(step: int, value: float, higher_is_better: bool = True, **more: float) -> Evaluated:
    return Evaluated(
        step, 0.0, 0, {"accuracy": value, **more}, {}, 0.0, False, Timing(), "accuracy", higher_is_better, 99
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(1, 4), st.booleans())
def test_it_stops_at_the_first_evaluation_that_is_patience_behind_the_best(
    values: list[float], patience: int, higher: bool
) -> None:
    stop = EarlyStop(patience, None, None)
    for i, value in enumerate(values):
        seen = values[: i + 1]
        best = seen.index(max(seen) if higher else min(seen))
        goes_on = stop.goes_on(at(i + 1, value, higher))
        assert goes_on == (i - best < patience)
        assert stop.goes_on(at(i + 1, value, higher)) == goes_on  # an evaluation that is repeated
        if not goes_on:
            break


@pytest.mark.parametrize(
    ("metric", "target", "reached", "missed"),
    [(None, 0.9, 0.9, 0.89), ("loss", 0.5, 0.49, 0.51), ("valid_perplexity", 10.0, 10.0, 10.1)],
)
def test_a_target_is_reached_from_the_side_that_is_worse(
    metric: str | None, target: float, reached: float, missed: float
) -> None:
    stop = EarlyStop(None, metric, target)
    for step, value in ((1, missed), (2, float("nan")), (3, reached)):
        event = at(step, value) if metric is None else at(step, 0.0, **{metric: value})
        assert stop.goes_on(event) == (step < 3)
    assert f"has reached stop.target={target:g}" in stop.why


def train(folder: Path, ranks: int, stop_at: int | None = None) -> dict[str, Any]:
    """The last saved state."""

    def rank(world: World) -> None:
        fit = Fit(
            PLAN, make_model=with_noise, sched=lr_schedule("constant"), strategy=strict(4),
            observers=[Jsonl(), Summary()] if world.is_first else [],
            controllers={"stop": EarlyStop(3, "loss", None)},
        )  # fmt: skip
        fit.run(world, folder, stop_at if world.is_first else None)

    run_killed_at(stop_at, rank, ranks, folder)
    return newest_state(folder)


def test_any_number_of_ranks_stops_at_the_same_step_killed_or_not(tmp_path: Path) -> None:
    whole = train(tmp_path / "1", 1)
    stopped_at = whole["step"]
    assert 9 < stopped_at < PLAN.steps
    for ranks in (2, 3):
        assert_same(whole, train(tmp_path / str(ranks), ranks))
    killed = tmp_path / "killed"
    for save in (stopped_at - stopped_at % 4, stopped_at):
        train(killed, 2, stop_at=save)
    assert_same(whole, train(killed, 2))
    lines = [(folder / "metrics.jsonl").read_bytes() for folder in (tmp_path / "1", killed)]
    assert lines[0] == lines[1]
    assert json.loads((killed / "summary.json").read_text())["outcome"] == "stopped early"


def test_values_of_another_metric_do_not_count() -> None:
    """It was changed between two processes of a run."""
    before = EarlyStop(5, "loss", None)
    for step in range(3):
        before.goes_on(at(step, 0.5, loss=0.1))
    after = EarlyStop(2, None, None)
    after.load_state_dict(before.state_dict())
    assert after.goes_on(at(3, 0.2))
    assert after.goes_on(at(4, 0.1))
    assert not after.goes_on(at(5, 0.1))
