"""Muon and AdamW in one optimizer, against torch's AdamW and slow arithmetic with decompositions."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from steps import HostReads, gradients, network, take
from torch import Tensor, nn
from toy import lr_schedule

from ddptrain.errors import UserError
from ddptrain.recipes.muon_with_adamw import MuonWithAdamW
from ddptrain.run.optimizer import build_optimizer
from ddptrain.run.schedule import build_schedule

# powers of two, which float32 holds without rounding
SETTINGS = {"lr": 0.125, "betas": (0.9, 0.99), "weight_decay": 0.25, "momentum": 0.75, "iterations": 5}


def slow_muon(weight: Tensor, momentum: Tensor, gradient: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """One layer's step as it is written down, its direction by a singular value decomposition."""
    momentum = 0.75 * momentum + gradient
    matrix = (gradient + 0.75 * momentum).reshape(len(weight), -1)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    direction = (left @ torch.diag(values) @ right).view_as(weight) * 0.2 * max(matrix.shape) ** 0.5
    return weight - lr * (0.25 * weight + direction), momentum


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_filters_move_as_the_slow_formulas_say_and_the_rest_as_by_adamw(layout: torch.memory_format) -> None:
    model, other = (network().to(memory_format=layout) for _ in range(2))
    optimizer = MuonWithAdamW(model.parameters(), **SETTINGS)
    schedule = build_schedule(lr_schedule("linear"), optimizer, steps=4)
    rest = [p for p in other.parameters() if p.ndim < 3]
    adamw = torch.optim.AdamW(rest, lr=0.125, betas=(0.9, 0.99), weight_decay=0.25)
    filters = {i: (p.detach(), torch.zeros_like(p)) for i, p in enumerate(model.parameters()) if p.ndim > 2}
    assert len(filters) == 3
    filters = {i: (weight.clone(), momentum) for i, (weight, momentum) in filters.items()}
    for at, step in enumerate(gradients(model, 4)):
        share = 1 - at / 4
        filters = {i: slow_muon(*state, step[i], share * 0.125) for i, state in filters.items()}
        adamw.param_groups[0]["lr"] = share * 0.125
        take(adamw, other, step)
        take(optimizer, model, step)
        schedule.at(at + 1)
    for i, (moved, by_adamw) in enumerate(zip(model.parameters(), other.parameters(), strict=True)):
        expected = filters[i][0] if i in filters else by_adamw.detach()
        # the gain is rounded to float32, as the rate is
        torch.testing.assert_close(moved.detach(), expected, rtol=1e-6, atol=1e-7)


def test_depthwise_filters_are_of_adamw() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.Conv2d(4, 8, 1, bias=False))
    optimizer = MuonWithAdamW(model.parameters())
    by_muon = {group["by_muon"]: group["params"] for group in optimizer.param_groups}
    assert by_muon[False][0] is model[0].weight
    assert by_muon[True][0] is model[1].weight


@pytest.mark.parametrize("bad", [0, 2])
def test_a_step_that_is_not_finite_moves_nothing_and_reads_nothing_on_the_host(bad: int) -> None:
    model, other = network().float(), network().float()
    optimizer, skipped = (MuonWithAdamW(m.parameters(), **SETTINGS) for m in (model, other))
    assert skipped._step_supports_amp_scaling
    for at, step in enumerate(gradients(model, 4)):
        skipped.found_inf = torch.zeros(())
        if at == bad:
            before = [p.detach().clone() for p in other.parameters()]
            kept = deepcopy([skipped.state[p] for p in other.parameters()])
            skipped.found_inf = torch.ones(())
            with HostReads() as reads:
                take(skipped, other, [gradient * torch.nan for gradient in step])
            assert reads.count == 0
            assert all(torch.equal(p, b) for p, b in zip(other.parameters(), before, strict=True))
            for parameter, states in zip(other.parameters(), kept, strict=True):
                for name, value in skipped.state[parameter].items():
                    assert torch.equal(value, states.get(name, torch.zeros_like(value)))
            skipped.found_inf = torch.zeros(())
        take(optimizer, model, step)
        take(skipped, other, step)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_filter_without_gradient_only_decays_however_long() -> None:
    """Its momentum becomes so small that its squares are 0, and then 0 itself."""
    model = network().float()
    optimizer = MuonWithAdamW(model.parameters(), **{**SETTINGS, "lr": 2**-10})
    [first, *others] = gradients(model, 2)
    take(optimizer, model, first)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(600):
        take(optimizer, model, [gradient * 0 for gradient in first])
    filters = [(now, then) for now, then in zip(model.parameters(), before, strict=True) if now.ndim > 2]
    for now, then in filters:
        torch.testing.assert_close(now.detach(), then * (1 - 2**-12) ** 600, rtol=1e-4, atol=1e-6)
    before = [now.detach().clone() for now, _ in filters]
    take(optimizer, model, [gradient * 1e-15 for gradient in others[0]])
    for (now, _), then in zip(filters, before, strict=True):
        size = float((now - then).square().mean().sqrt()) / 2**-10
        assert 0.1 < size < 0.3  # 0.2 of the rate


def test_a_rate_on_the_device_gives_the_same_bits() -> None:
    model, other = network().float(), network().float()
    optimizer, captured = (MuonWithAdamW(m.parameters(), **{**SETTINGS, "lr": 0.1}) for m in (model, other))
    for at, step in enumerate(gradients(model, 3)):
        for group, twin in zip(optimizer.param_groups, captured.param_groups, strict=True):
            group["lr"] = 0.1 / (at + 1)
            twin["lr"] = torch.tensor(0.1 / (at + 1))
        take(optimizer, model, step)
        take(captured, other, step)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_its_state_goes_through_a_checkpoint_bit_for_bit() -> None:
    model, other = network(), network()
    optimizer, again = (MuonWithAdamW(m.parameters(), **SETTINGS) for m in (model, other))
    steps = gradients(model, 4)
    for step in steps[:2]:
        take(optimizer, model, step)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(deepcopy(optimizer.state_dict()))
    for step in steps[2:]:
        take(optimizer, model, step)
        take(again, other, step)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_weight_decay_can_be_kept_off_what_is_no_matrix() -> None:
    node = {"_target_": "ddptrain.recipes.muon_with_adamw.MuonWithAdamW", **SETTINGS}
    groups = build_optimizer(node, network(), "matrices").param_groups
    assert {group["weight_decay"] for group in groups if group["by_muon"]} == {0.25}
    for group in groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.25 if parameter.ndim > 1 else 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": 0.0}, "optim.lr=0.0: must be above 0."),
        ({"betas": (0.9, 1.0)}, "optim.betas=[0.9, 1.0]: must be two numbers from 0 to below 1."),
        ({"eps": 0.0}, "optim.eps=0.0: must be above 0."),
        ({"weight_decay": -0.1}, "optim.weight_decay=-0.1: must be 0 or more."),
        ({"momentum": 1.0}, "optim.momentum=1.0: must be between 0 and 1."),
        ({"iterations": 21}, "optim.iterations=21: must be from 1 to 20."),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        MuonWithAdamW(network().parameters(), **{**SETTINGS, **change})
    assert str(caught.value) == said


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(UserError, match="MuonWithAdamW moves no complex parameters"):
        MuonWithAdamW([nn.Parameter(torch.zeros(8, 8, dtype=torch.complex64))])


def test_parameters_with_gaps_are_refused() -> None:
    """torch's fused kernels would move other numbers."""
    with pytest.raises(UserError, match="MuonWithAdamW moves no parameters with gaps in memory"):
        MuonWithAdamW([nn.Parameter(torch.zeros(8, 8)[:, :4])])
