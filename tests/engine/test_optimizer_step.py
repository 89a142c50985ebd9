"""The lean step is torch's step, and steps aside for whatever is wrapped around that."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from ddptrain.engine.optimizer_step import OptimizerStep
from ddptrain.errors import UserError
from ddptrain.run.optimizer import build_optimizer

ZERO = torch.zeros(())


def updated(make: Callable[[Any], torch.optim.Optimizer], before: Callable[[Any], None] = id) -> nn.Module:
    """A layer after two updates by ones."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    update = OptimizerStep(optimizer, torch.amp.GradScaler("cpu", enabled=False))
    before(optimizer)
    for _ in range(2):
        update.forget_gradients()
        model(torch.ones(4, 3)).sum().backward()
        update(ZERO)
    return model


def plain(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=0.1, fused=True)


def test_it_is_the_optimizers_own_step_without_the_profilers_range(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = plain(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    wrapped: list[object] = []
    torchs = torch.autograd.profiler.record_function.__init__
    monkeypatch.setattr(
        torch.autograd.profiler.record_function, "__init__",
        lambda self, name, *more: (wrapped.append(name), torchs(self, name, *more))[1],
    )  # fmt: skip
    assert torch.equal(updated(plain).weight, model.weight)
    assert wrapped == []  # it is the lean one


def test_a_profile_shows_the_range() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        updated(plain)
    assert sum(event.name.startswith("Optimizer.step#") for event in profile.events()) == 2


def test_hooks_run_whenever_they_were_registered() -> None:
    seen: list[str] = []

    def register(optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(lambda *_: seen.append("post"))

    updated(plain, before=register)
    assert seen == ["post", "post"]


def test_a_subclass_that_wraps_torchs_step_keeps_its_own() -> None:
    seen: list[str] = []

    class Counted(AdamW):
        @functools.wraps(AdamW.step)
        def step(self, closure: Any = None) -> Any:
            seen.append("own")
            return super().step(closure)

    updated(lambda parameters: Counted(parameters, lr=0.1))
    assert seen == ["own", "own"]


def test_a_step_or_zero_grad_of_ones_own_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Own(AdamW):
        def zero_grad(self, set_to_none: bool = True) -> None:
            seen.append("zero")
            super().zero_grad(set_to_none)

    def patched(parameters: Any) -> AdamW:
        optimizer = Own(parameters, lr=0.1)
        step = optimizer.step
        monkeypatch.setattr(optimizer, "step", lambda *a: (seen.append("step"), step(*a))[1])
        return optimizer

    updated(patched)
    assert seen == ["zero", "step", "zero", "step"]


def test_a_schedule_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    schedules = []

    def scheduled(parameters: Any) -> AdamW:
        optimizer = plain(parameters)
        schedules.append(torch.optim.lr_scheduler.ConstantLR(optimizer))
        return optimizer

    updated(scheduled)
    schedules[0].step()
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


FILLED = {
    "contiguous": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(4, 6).t(),
    "channels last": lambda: torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last),
    "one": lambda: torch.randn(1, 1),
    "none": lambda: torch.randn(0, 3),
    "0-d": lambda: torch.randn(()),
}
WITH_GAPS = {
    "every second row": lambda: torch.randn(8, 6)[::2],
    "transposed, every second": lambda: torch.randn(6, 8).t()[::2],
    "first columns": lambda: torch.randn(4, 6)[:, :3],
    "expanded": lambda: torch.randn(6).expand(4, 6),
}


@pytest.mark.parametrize("kind", FILLED | WITH_GAPS)
def test_a_fused_optimizer_is_taken_where_it_is_right(kind: str) -> None:
    """Against torch's own, not fused."""
    made = (FILLED | WITH_GAPS)[kind]().requires_grad_(False)
    ours, theirs = nn.Parameter(made), nn.Parameter(made.clone(memory_format=torch.contiguous_format))
    node = {"_target_": "torch.optim.AdamW", "lr": 0.1}
    optimizers = build_optimizer(node, nn.ParameterList([ours])), AdamW([theirs], lr=0.1, fused=False)
    assert bool(optimizers[0].defaults["fused"]) == (kind in FILLED)
    if kind == "expanded":  # one number in many places: no optimizer can update it
        return
    factors = torch.arange(made.numel()).view(made.shape) + 1.0
    for _ in range(3):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = None
            ((parameter * factors).square()).sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_a_fused_optimizer_that_is_asked_for_is_checked_likewise() -> None:
    node = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "fused": True}
    weight = nn.Parameter(torch.ones(4, 6))
    optimizer = build_optimizer(node, nn.ParameterList([weight]))
    # a first step that is skipped writes to no buffer
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.zeros(4, 6))
    with pytest.raises(UserError, match=r"optim\.fused=true: can't be used with dampening"):
        build_optimizer(node | {"dampening": 0.5}, nn.ParameterList([weight]))
    with pytest.raises(UserError, match="or have gaps in memory"):
        build_optimizer(node, nn.ParameterList([nn.Parameter(torch.randn(8, 6)[::2])]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", ["torch.optim.SGD", "torch.optim.AdamW", "torch.optim.Adagrad"])
def test_each_number_is_moved_as_in_float64(target: str, dtype: torch.dtype) -> None:
    """By torch's fused SGD, on CPUs before 2.14, most bf16 and fp16 numbers are not (pytorch#191763)."""
    torch.manual_seed(0)
    node = {"_target_": target, "lr": 0.1} | ({"momentum": 0.9} if target.endswith("SGD") else {})
    model = nn.Linear(16, 9).to(dtype)
    exact = nn.Linear(16, 9).double()
    exact.load_state_dict(model.state_dict())
    optimizers = [build_optimizer(node, model), build_optimizer({**node, "foreach": False}, exact)]
    for _ in range(3):
        for parameter, other in zip(model.parameters(), exact.parameters(), strict=True):
            parameter.grad = torch.randn_like(parameter).clamp(min=0.1)
            other.grad = parameter.grad.double()
        for optimizer in optimizers:
            optimizer.step()
    within = {torch.float32: 1e-6, torch.bfloat16: 0.02, torch.float16: 0.003}[dtype]
    for parameter, other in zip(model.parameters(), exact.parameters(), strict=True):
        assert (parameter - other).abs().max() < within
