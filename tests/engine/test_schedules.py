"""The section ``sched``: ours, torch's or one's own; what is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Fit, lr_schedule, plain

from ddptrain.api.world import World
from ddptrain.config.instantiate import check_node
from ddptrain.config.targets import open_package
from ddptrain.engine.plan import Plan
from ddptrain.errors import UserError
from ddptrain.run.schedule import build_schedule, check_schedule

TORCHS = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 3, "gamma": 0.5}
OWN = """
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

def halving(optimizer: Optimizer, steps: int, times: int = 2) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 0.5 ** (step * times // steps))
"""


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (lr_schedule("linear", warmup=-0.1), "sched.warmup=-0.1: must be at least 0 and below 1"),
        (lr_schedule("constant", warmup=1), "sched.warmup=1: must be at least 0 and below 1"),
        (lr_schedule("cosine", final=2.0), "sched.final=2: must be at least 0 and at most 1"),
        (lr_schedule("step", gamma=0), "sched.gamma=0: must be above 0"),
        (lr_schedule("step", milestones=[0.5, 0.2]), r"sched.milestones=\[0.5, 0.2\]: must rise"),
        ({"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}, "must be .* follows from the step"),
    ],
)
def test_a_wrong_value_is_told_by_its_key(node: dict[str, Any], said: str) -> None:
    assert check_node(node, "sched", offered=("optimizer", "steps")) == []
    with pytest.raises(UserError, match=f"^{said}" if said.startswith("sched.") else said):
        check_schedule(node)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (lr_schedule("cosine", gamma=0.1), "sched.gamma: .* takes no such argument"),
        (lr_schedule("linear", warmup="long"), "sched.warmup=long: must be "),
        (lr_schedule("onecycle", warmup=float("nan")), "sched.warmup=nan: must be "),
        ({"_target_": "torch.optim.SGD"}, "of this package only LRSchedulers"),
        ({"_target_": "ddptrain.engine.lr_schedules.UserError"}, "not allowed"),
    ],
)
def test_a_wrong_node_is_told_before_it_is_built(node: dict[str, Any], said: str) -> None:
    problems = check_node(node, "sched", offered=("optimizer", "steps"))
    with pytest.raises(UserError, match=said):
        raise UserError("\n".join(problems))


def rates(node: dict[str, Any], steps: int) -> list[float]:
    optimizer = torch.optim.SGD(plain().parameters(), lr=1.0)
    schedule = build_schedule(node, optimizer, steps)
    seen = []
    for step in range(steps):
        schedule.at(step)
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


def test_one_of_torchs_and_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_schedules.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_schedules", raising=False)
    open_package("my_schedules")
    assert rates(TORCHS, 7) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]
    own = {"_target_": "my_schedules.halving", "times": 3}
    assert rates(own, 6) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    check_schedule(own)


def test_a_step_may_be_asked_for_again_and_be_skipped_to() -> None:
    optimizer = torch.optim.SGD(plain().parameters(), lr=1.0)
    schedule = build_schedule(TORCHS, optimizer, 9)
    for step in (0, 0, 4, 4, 3):
        schedule.at(step)
        assert optimizer.param_groups[0]["lr"] == (0.5 if step >= 3 else 1.0)


def test_a_run_that_was_killed_has_torchs_rates(tmp_path: Path) -> None:
    plan = Plan(steps=9, train_size=60, batch_size=20, save_every=4)
    fit = Fit(plan, sched=TORCHS)
    whole, _, _ = fit.run(World(), tmp_path / "whole")
    Fit(Plan(steps=4, train_size=60, batch_size=20, save_every=4), sched=TORCHS).run(
        World(), tmp_path / "part"
    )
    resumed, _, _ = fit.run(World(), tmp_path / "part")
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] == 0.1 * 0.25
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("warmup", "steps"), [(0.1, 9), (0.05, 19), (0.01, 99), (0.2, 4), (0.5, 1), (1 / 3, 2), (1 / 6, 5)]
)
def test_onecycle_may_warm_up_for_no_step(warmup: float, steps: int) -> None:
    """torch divides by the steps of the warm-up but one."""
    found = rates({"_target_": "ddptrain.engine.lr_schedules.onecycle", "warmup": warmup}, steps)
    near = rates({"_target_": "ddptrain.engine.lr_schedules.onecycle", "warmup": warmup * 1.0001}, steps)
    assert found == pytest.approx(near, rel=1e-3)
