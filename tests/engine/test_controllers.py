"""Controllers that count: a run that is ended or paused by one, and started again, is the run of another
setting, or the same run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy import Classify, Fit, weights

from ddptrain.api.controller import Controller
from ddptrain.api.observer import Evaluated
from ddptrain.api.recipe import Report
from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.errors import Stopped
from ddptrain.observe.jsonl import Jsonl
from ddptrain.observe.metrics_file import read_lines
from ddptrain.testing import run_ranks

VALUES = [0.1, 0.5, 0.3, 0.2, 0.6, 0.4, 0.4, 0.3, 0.2, 0.1, 0.9, 0.1]
"""Of the evaluations in turn."""
EVERY = 2


class Known(Classify):
    """Its metric is known beforehand, by the number of steps that its weights have taken."""

    def evaluate(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        return {"steps": model.get_buffer("1.num_batches_tracked"), "batches": torch.tensor(1)}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        steps = int(sums["steps"]) // int(sums["batches"])
        return Report({"accuracy": VALUES[(steps - 1) // EVERY] if steps else 0.0})


def counting_steps() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5))


class Patient(Controller):
    """As docs/controllers.md has it: what it has seen is a number, in which an evaluation that is told twice
    counts twice."""

    completes = True

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._best: float | None = None
        self._since = 0

    def goes_on(self, event: Evaluated) -> bool:
        if self._best is None or event.value > self._best:
            self._best, self._since = event.value, 0
        else:
            self._since += 1
        return self._since < self._patience

    def state_dict(self) -> Mapping[str, Any]:
        return {"best": self._best, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._since = state.get("best"), state.get("since", 0)


class Pausing(Controller):
    """After each third evaluation."""

    def __init__(self) -> None:
        self._asked = 0

    def goes_on(self, event: Evaluated) -> bool:
        self._asked += 1
        return self._asked % 3 != 0

    def state_dict(self) -> Mapping[str, Any]:
        return {"asked": self._asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._asked = state.get("asked", 0)


def plan(saves: int | None) -> Plan:
    return Plan(
        steps=EVERY * len(VALUES), train_size=60, batch_size=20, eval_every=EVERY, save_every=saves, seed=5
    )


def ended_at(patience: int) -> int:
    """The step, by a loop over the values."""
    controller, best, since = patience, -1.0, 0
    for i, value in enumerate(VALUES, start=1):
        best, since = (value, 0) if value > best else (best, since + 1)
        if since == controller:
            return i * EVERY
    return EVERY * len(VALUES)


def trained(
    folder: Path, controllers: Mapping[str, Controller], saves: int | None, ranks: int
) -> tuple[int, bool, Tensor]:
    """The step that was reached, whether it was paused there, and the weights."""

    def rank(world: World) -> tuple[int, bool, Tensor]:
        fit = Fit(
            plan(saves), counting_steps, Known, controllers=dict(controllers),
            observers=[Jsonl()] if world.is_first else [],
        )  # fmt: skip
        try:
            state, *_ = fit.run(world, folder)
        except Stopped as stopped:
            return int(str(stopped).rpartition(" ")[2]), True, torch.empty(0)
        return state.step, False, weights(state)

    folder.mkdir(exist_ok=True)
    return run_ranks(rank, ranks)[0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("saves", [None, 1, EVERY, 5])
def test_more_patience_goes_on_as_if_it_had_been_so_from_the_start(
    saves: int | None, ranks: int, tmp_path: Path
) -> None:
    for i, patience in enumerate((2, 3, 3, 5, 20)):
        step, paused, _ = trained(tmp_path / "run", {"own": Patient(patience)}, saves, ranks)
        assert (step, paused) == (ended_at(patience), False), f"start {i}"
    lines = [line for line in read_lines(tmp_path / "run/metrics.jsonl") if line["split"] == "valid"]
    assert [line["accuracy"] for line in lines] == VALUES


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("saves", [None, 1, *(pytest.param(n, marks=pytest.mark.long) for n in (EVERY, 5))])
@pytest.mark.parametrize("patience", [3, 20])
def test_pauses_change_nothing(patience: int, saves: int | None, ranks: int, tmp_path: Path) -> None:
    """Also where another controller counts, which ends the run."""
    _, _, expected = trained(tmp_path / "whole", {"own": Patient(patience)}, saves, ranks)
    pauses = []
    for _ in range(len(VALUES)):
        controllers = {"pausing": Pausing(), "own": Patient(patience)}
        step, paused, found = trained(tmp_path / "run", controllers, saves, ranks)
        if not paused:
            break
        pauses.append(step)
    thirds = range(3 * EVERY, EVERY * len(VALUES) + 1, 3 * EVERY)
    assert pauses == [step for step in thirds if step < ended_at(patience) or patience == 20]
    assert torch.equal(found, expected)
    ours, theirs = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("run", "whole"))
    assert ours == theirs
