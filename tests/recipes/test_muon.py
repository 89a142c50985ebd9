"""Muon and SGD in one optimizer, against slow arithmetic with singular value decompositions."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from steps import HostReads, gradients, network, take
from torch import Tensor
from toy import lr_schedule

from ddptrain.errors import UserError
from ddptrain.recipes.muon import MuonWithSgd, orthogonalised
from ddptrain.run.optimizer import build_optimizer
from ddptrain.run.schedule import build_schedule

RATES = {"lr": 0.2, "head_lr": 3.0, "bias_lr": 0.5}
SETTINGS = {**RATES, "momentum": 0.6, "sgd_momentum": 0.85, "weight_decay": 0.01, "iterations": 5}


@pytest.mark.parametrize("shape", [(64, 24 * 9), (256, 16 * 9), (40, 40)])
def test_the_iteration_keeps_singular_vectors_and_brings_singular_values_near_one(
    shape: tuple[int, int],
) -> None:
    draw = torch.Generator().manual_seed(2)
    matrices = torch.randn(3, *shape, generator=draw, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    for iterations, least in ((3, 0.02), (5, 0.005)):
        found = left.mT @ torch.stack(orthogonalised(list(matrices), iterations)) @ right.mT
        on_diagonal = found.diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(found, torch.diag_embed(on_diagonal), rtol=0, atol=1e-9)
        large = on_diagonal[values > least * torch.linalg.matrix_norm(matrices)[:, None]]
        assert large.numel() > 0.8 * on_diagonal.numel()
        assert float(large.min()) > 0.68
        assert float(large.max()) < 1.21
    [in_float], [in_double] = (orthogonalised([matrices[0].to(of)], 5) for of in (torch.float, torch.double))
    torch.testing.assert_close(in_float.double(), in_double, rtol=0, atol=1e-3)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_matrices_of_any_shapes_are_taken_together_as_if_each_were_alone(layout: torch.memory_format) -> None:
    draw = torch.Generator().manual_seed(3)
    shapes = [(6, 2, 3, 3), (64, 1, 3, 1), (5, 7, 1, 1), (6, 2, 3, 3), (1, 4, 2, 2)]
    filters = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    filters = [each.to(memory_format=layout) for each in [*filters, torch.zeros(4, 6, 1, 1).double()]]
    for each, found in zip(filters, orthogonalised(filters, 4), strict=True):
        [alone] = orthogonalised([each.flatten(1)], 4)
        torch.testing.assert_close(found, alone.view(each.shape), rtol=0, atol=1e-12)
    assert not found.any()  # a matrix of nothing stays nothing


def slow_muon(
    weight: Tensor, momentum: Tensor, gradient: Tensor, lr: float, normalise: bool
) -> tuple[Tensor, Tensor]:
    """One layer's step as it is written down, its direction by a singular value decomposition."""
    momentum = 0.6 * momentum + gradient
    left, values, right = torch.linalg.svd(
        (gradient + 0.6 * momentum).reshape(len(weight), -1), full_matrices=False
    )
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    if normalise:
        weight = weight * len(weight) ** 0.5 / weight.square().sum().sqrt()
    return weight - lr * (left @ torch.diag(values) @ right).view_as(weight), momentum


@pytest.mark.parametrize(("layout", "every"), [(torch.contiguous_format, 3), (torch.channels_last, 1)])
def test_a_few_steps_are_what_the_slow_formulas_say(layout: torch.memory_format, every: int) -> None:
    model = network().to(memory_format=layout)
    optimizer = MuonWithSgd(model.parameters(), **SETTINGS, normalise_every=every)
    schedule = build_schedule(lr_schedule("linear"), optimizer, steps=4)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    buffers = [torch.zeros_like(parameter) for parameter in expected]
    for at, step in enumerate(gradients(model, 4)):
        share = 1 - at / 4
        for i, gradient in enumerate(step):
            if expected[i].ndim == 4:
                expected[i], buffers[i] = slow_muon(
                    expected[i], buffers[i], gradient, share * 0.2, normalise=at % every == 0
                )
                continue
            rate = 3.0 if expected[i].ndim == 2 else 0.5
            gradient = gradient + 0.01 / rate * expected[i]
            buffers[i] = 0.85 * buffers[i] + gradient
            expected[i] = expected[i] - share * rate * (gradient + 0.85 * buffers[i])
        take(optimizer, model, step)
        schedule.at(at + 1)
    for found, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bad", [0, 2])
def test_a_step_that_is_not_finite_moves_nothing_and_is_not_asked_about_on_the_host(bad: int) -> None:
    model, other = network().float(), network().float()
    optimizer = MuonWithSgd(model.parameters(), **SETTINGS)
    skipped = MuonWithSgd(other.parameters(), **SETTINGS)
    assert skipped._step_supports_amp_scaling
    steps = gradients(model, 4)
    for at, step in enumerate(steps):
        skipped.found_inf = torch.zeros(())
        if at == bad:
            before = [p.detach().clone() for p in other.parameters()]
            kept = {p: s["momentum_buffer"].clone() for p, s in skipped.state.items()}
            skipped.found_inf = torch.ones(())
            with HostReads() as reads:
                take(skipped, other, [gradient * torch.nan for gradient in step])
            assert reads.count == 0
            assert all(torch.equal(p, b) for p, b in zip(other.parameters(), before, strict=True))
            for parameter, state in skipped.state.items():
                had = kept.get(parameter, torch.zeros_like(parameter))
                assert torch.equal(state["momentum_buffer"], had)
            skipped.found_inf = torch.zeros(())
        take(optimizer, model, step)
        take(skipped, other, step)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_its_state_goes_through_a_checkpoint_bit_for_bit() -> None:
    model, other = network(), network()
    optimizer, again = (MuonWithSgd(m.parameters(), **SETTINGS, normalise_every=3) for m in (model, other))
    steps = gradients(model, 4)
    for step in steps[:2]:
        take(optimizer, model, step)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(deepcopy(optimizer.state_dict()))
    for step in steps[2:]:
        take(optimizer, model, step)
        take(again, other, step)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "onecycle", "step"])
def test_all_groups_follow_the_schedule(schedule: str) -> None:
    optimizer = MuonWithSgd(network().parameters(), **SETTINGS)
    turned = build_schedule(lr_schedule(schedule, warmup=0.2), optimizer, steps=10)
    for step in range(10):
        turned.at(step)
        assert len({group["lr"] for group in optimizer.param_groups}) == 1


def test_weight_decay_can_be_kept_off_the_biases() -> None:
    node = {"_target_": "ddptrain.recipes.muon.MuonWithSgd", **SETTINGS}
    decays = {
        on: {g["kind"]: g["weight_decay"] for g in build_optimizer(node, network(), on).param_groups}
        for on in ("all", "matrices")
    }
    assert decays["all"]["head"] == decays["matrices"]["head"] == pytest.approx(0.01 / 3)
    assert decays["all"]["biases"] == pytest.approx(0.01 / 0.5)
    assert decays["matrices"]["biases"] == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": 0.0}, "optim.lr=0.0: must be above 0."),
        ({"head_lr": -1.0}, "optim.head_lr=-1.0: must be above 0."),
        ({"momentum": 1.0}, "optim.momentum=1.0: must be between 0 and 1."),
        ({"weight_decay": -0.1}, "optim.weight_decay=-0.1: must be 0 or more."),
        ({"iterations": 0}, "optim.iterations=0: must be from 1 to 20."),
        ({"normalise_every": 0}, "optim.normalise_every=0: must be 1 step or more."),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        MuonWithSgd(network().parameters(), **{**SETTINGS, **change})
    assert str(caught.value) == said
