"""Schedules, averages, the plan and the meter, against what they are said to be."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from toy import lr_schedule, plain, with_noise

from ddptrain.api.recipe import Loss
from ddptrain.api.world import World
from ddptrain.engine import ema
from ddptrain.engine.ema import ExponentialAverage
from ddptrain.engine.meter import Meter
from ddptrain.engine.plan import Plan, steps_of
from ddptrain.run.optimizer import build_optimizer
from ddptrain.run.schedule import build_schedule
from ddptrain.strategies.single import Single
from ddptrain.testing import run_ranks

PEAK = 0.5


def rates(sched: dict[str, Any], steps: int) -> list[float]:
    """The learning rate of each step."""
    optimizer = torch.optim.SGD(plain().parameters(), lr=PEAK, momentum=0.9)
    schedule = build_schedule(sched, optimizer, steps)
    found = []
    for step in range(steps):
        optimizer.step()
        schedule.at(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_cosine_after_a_linear_warmup() -> None:
    found = rates(lr_schedule("cosine", warmup=0.1, final=0.2), 100)
    assert found[:3] == pytest.approx([PEAK * (0.01 + 0.99 * i / 10) for i in range(3)])
    low = 0.2 * PEAK
    expected = [low + (PEAK - low) * (1 + math.cos(math.pi * i / 90)) / 2 for i in range(90)]
    assert found[10:] == pytest.approx(expected, rel=1e-9)


def test_step_and_constant() -> None:
    found = rates(lr_schedule("step", warmup=0.1, milestones=[0.5, 0.75], gamma=0.1), 100)
    assert found[10:50] == pytest.approx([PEAK] * 40)
    assert found[50:75] == pytest.approx([PEAK / 10] * 25)
    assert found[75:] == pytest.approx([PEAK / 100] * 25)
    assert rates(lr_schedule("constant"), 5) == [PEAK] * 5


def test_onecycle_peaks_after_its_warmup_and_ends_low() -> None:
    """By cosines from 1/25 of the peak to the peak, and from there to the last rate, which would be that of a
    step after the last one (torch's OneCycleLR; Smith and Topin, arXiv 1708.07120)."""
    found = rates(lr_schedule("onecycle", warmup=0.25, final=0.01), 100)
    top = 0.25 * 101 - 1

    def between(begin: float, end: float, share: float) -> float:
        return end + (begin - end) / 2 * (1 + math.cos(math.pi * share))

    expected = [
        between(PEAK / 25, PEAK, i / top) if i <= top else between(PEAK, 0.01 * PEAK, (i - top) / (100 - top))
        for i in range(100)
    ]
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("warmup", [0.0, 0.1])
def test_wsd_is_constant_to_the_bit_between_warmup_and_cooldown(warmup: float) -> None:
    found = rates(lr_schedule("wsd", warmup=warmup, cooldown=0.2, final=0.1), 100)
    rise = round(100 * warmup)
    assert found[:rise] == pytest.approx([PEAK * (0.01 + 0.99 * i / 10) for i in range(rise)])
    assert found[rise:80] == [PEAK] * (80 - rise)
    assert found[80:] == pytest.approx([PEAK * (1 - 0.9 * i / 20) for i in range(20)], rel=1e-9)
    assert rates(lr_schedule("wsd", cooldown=0.0), 5) == rates(lr_schedule("constant"), 5)
    assert rates(lr_schedule("wsd", cooldown=1.0), 5) == pytest.approx(rates(lr_schedule("linear"), 5))
    assert rates(lr_schedule("wsd", warmup=0.4, cooldown=0.6), 5)[2:] == pytest.approx(
        [PEAK, PEAK * 2 / 3, PEAK / 3]
    )


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adam", "RMSprop"])
def test_optimizers_are_fused_where_torch_can(name: str) -> None:
    optimizer = build_optimizer({"_target_": f"torch.optim.{name}", "lr": 0.1}, plain())
    assert bool(optimizer.param_groups[0].get("fused")) == (name != "RMSprop")


@pytest.mark.parametrize("on_device", [False, True])
def test_average_follows_its_formula_for_weights_and_buffers(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:
        monkeypatch.setattr(ema, "_move_on_host", ema._move_on_device)
    torch.manual_seed(0)
    model, decay = with_noise(), 0.75
    average = ExponentialAverage(model, decay, Single(World()))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    finite = torch.zeros(())
    for update in range(1, 41):
        model(torch.randn(8, 12)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        average.update(average.weight(update - 1), finite)
        average.update(average.weight(update - 1), finite + 1)  # left out
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                now = min(decay, (1 + update) / (10 + update))
                expected[name] = now * expected[name] + (1 - now) * value
            else:
                expected[name] = value.clone()
    own = {name: value.clone() for name, value in model.state_dict().items()}
    with average.in_use():
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[name])
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


def test_weights_that_share_memory_come_back_from_the_average() -> None:
    model = nn.ParameterList([nn.Parameter(torch.full((3,), 5.0))])
    model.append(nn.Parameter(model[0].data))
    average = ExponentialAverage(model, 0.5, Single(World()))
    with torch.no_grad():
        model[0].mul_(2.0)
    with average.in_use():
        assert model[0].tolist() == [5.0] * 3
    assert model[0].tolist() == model[1].tolist() == [10.0] * 3


def test_epochs_end_at_the_step_that_has_seen_all_samples() -> None:
    plan = Plan(steps=steps_of(3, 100, 30), train_size=100, batch_size=30)
    assert plan.steps == 10
    assert [done for done in range(1, 11) if plan.evaluates(done)] == [4, 7, 10]
    assert steps_of(1, 10, 64) == 1
    assert steps_of(0.5, 100, 10) == 5


def test_a_batch_larger_than_the_set_ends_an_epoch_every_step() -> None:
    plan = Plan(steps=3, train_size=10, batch_size=25)
    assert [plan.evaluates(done) for done in (1, 2, 3)] == [True, True, True]


def end_step(meter: Meter) -> None:
    meter.expect(meter.end_step(torch.zeros(())))
    meter.count(applied=True)


def test_meter_means_over_ranks_and_survives_a_gather() -> None:
    def rank(world: World) -> list[dict[str, float]]:
        meter = Meter(world)
        found = []
        for gathers in (False, True):
            for i in range(3):
                value = torch.tensor(float(world.rank * 10 + i))
                meter.begin_step()
                meter.add(Loss(value, 2, {"half": value / 2}), world.rank)
                end_step(meter)
                if gathers:
                    meter.gather()
            found.append(meter.read())
        meter.begin_step()
        meter.add(Loss(torch.tensor(6.0), torch.tensor(1 + world.rank)), world.rank)
        end_step(meter)
        found.append(meter.read())
        return found

    for found in run_ranks(rank, 2):
        assert found[0] == found[1] == {"loss": 36 / 12, "half": 18 / 12}
        assert found[2]["loss"] == 12 / 3


def test_weight_decay_on_matrices_leaves_vectors_alone() -> None:
    """With gradients of zero, decay is all that moves a weight."""
    for decay_on, shrunk in (("all", 0.9), ("matrices", 1.0)):
        model = with_noise()
        torch.nn.init.ones_(model[1].bias)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        node = {"_target_": "torch.optim.SGD", "lr": 1.0, "weight_decay": 0.1}
        optimizer = build_optimizer(node, model, decay_on)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for name, parameter in model.named_parameters():
            factor = 0.9 if parameter.ndim >= 2 else shrunk
            torch.testing.assert_close(parameter.detach(), factor * before[name])


def test_a_logged_infinity_is_told_and_does_not_end_the_run() -> None:
    def rank(world: World) -> dict[str, float]:
        meter = Meter(world)
        endless = torch.tensor(float("inf") if world.is_first else float("-inf"))
        meter.begin_step()
        meter.add(
            Loss(torch.tensor(1.0), 1, {"ratio": endless, "huge": torch.tensor(1e308).double()}), world.rank
        )
        end_step(meter)
        return meter.read()

    for found in run_ranks(rank, 2):
        assert found["loss"] == 1.0
        assert math.isnan(found["ratio"])
        assert math.isinf(found["huge"])
