"""Parts of a model that are trained from a step on (freeze, thaw)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from torch import nn
from toy import Classify, Fit, Vectors, auto, lr_schedule, newest_state, run_killed_at, strict, with_noise

from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.observe.jsonl import Jsonl

PLAN = Plan(
    steps=14, train_size=100, batch_size=30, micro_batch=8, eval_every=7, save_every=3, log_every=2,
    clip_norm=1.0, seed=5,
)  # fmt: skip
ADAMW: dict[str, Any] = {"_target_": "torch.optim.AdamW", "lr": 0.01}
FROZEN = ("0.*", "1.*")
THAW_AT = 6
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": auto(bucket_cap_mb=0.001)},
    "strict": {"strategy": strict(4)},
    "static graph": {"strategy": auto(static_graph=True)},
}


def train(folder: Path, ranks: int, how: str, stop_at: int | None = None) -> dict[str, Any]:
    """The last saved state."""
    plan = replace(PLAN, shards=4) if how == "strict" else PLAN

    def rank(world: World) -> None:
        fit = Fit(
            plan, make_model=with_noise, optim=ADAMW, sched=lr_schedule(name="cosine", warmup=0.2), ema=0.9,
            freeze=FROZEN, thaw_at=THAW_AT, observers=[Jsonl()] if world.is_first else [], **STRATEGIES[how],
        )  # fmt: skip
        fit.run(world, folder, stop_at if world.is_first else None)

    run_killed_at(stop_at, rank, ranks, folder)
    return newest_state(folder)


def test_the_weights_are_those_of_a_loop_that_thaws(tmp_path: Path) -> None:
    """AdamW over all parameters, of which the first layers have no gradient and keep their statistics for six
    steps."""
    plan = Plan(steps=12, train_size=60, batch_size=20, seed=3)
    data = Vectors(60)
    fit = Fit(
        plan, make_model=_with_norm, optim=ADAMW, sched=lr_schedule("constant"), freeze=FROZEN, thaw_at=6
    )
    state, _ = fit.train(Classify(_with_norm), data, World(), tmp_path)
    torch.manual_seed(plan.seed)
    model = _with_norm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    head = [parameter for name, parameter in model.named_parameters() if name.startswith("3.")]
    for step, ids in enumerate(data.asked[:12]):
        model.train()
        if step < 6:
            model[1].eval()
        loss = nn.functional.cross_entropy(model(data.features[ids]), data.labels[ids])
        model.zero_grad()
        trained = head if step < 6 else list(model.parameters())
        for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
            parameter.grad = gradient
        optimizer.step()
    for (name, ours), theirs in zip(
        state.model.state_dict().items(), model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


def test_what_the_model_holds_fixed_is_not_thawed(tmp_path: Path) -> None:
    def fixed() -> nn.Module:
        model = _with_norm()
        model[1].weight.requires_grad_(False)
        return model

    plan = Plan(steps=8, train_size=60, batch_size=20, seed=3)
    fit = Fit(plan, make_model=fixed, optim=ADAMW, sched=lr_schedule("constant"), freeze=FROZEN, thaw_at=3)
    state, _, _ = fit.run(World(), tmp_path)
    assert torch.equal(state.model.get_parameter("1.weight"), torch.ones(16))
    assert not torch.equal(state.model.get_parameter("1.bias"), torch.zeros(16))
    assert len([p for group in state.optimizer.param_groups for p in group["params"]]) == 4


def _with_norm() -> nn.Sequential:
    # a bias before BatchNorm has a gradient of rounding errors, which AdamW makes large
    return nn.Sequential(nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))


@pytest.mark.parametrize("how", STRATEGIES)
def test_frozen_to_the_bit_until_then_and_killed_around_it_the_same_run(tmp_path: Path, how: str) -> None:
    """Saved before, at, and after the step of the thaw."""
    whole = train(tmp_path / "whole", 2, how)
    first = train(tmp_path / "killed", 2, how, stop_at=3)
    at = train(tmp_path / "killed", 2, how, stop_at=6)
    for name in ("0.weight", "0.bias", "1.weight", "1.running_mean", "1.num_batches_tracked"):
        assert torch.equal(first["model"][name], at["model"][name])
        assert not torch.equal(at["model"][name], whole["model"][name]), name
    assert not torch.equal(first["model"]["4.weight"], at["model"]["4.weight"])
    train(tmp_path / "killed", 2, how, stop_at=9)
    assert_same(whole, train(tmp_path / "killed", 2, how))
    lines = [(tmp_path / folder / "metrics.jsonl").read_bytes() for folder in ("whole", "killed")]
    assert lines[0] == lines[1]


def test_strict_thaws_with_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    one, *others = [train(tmp_path / str(ranks), ranks, "strict")["model"] for ranks in (1, 2, 3)]
    for other in others:
        assert_same(one, other)
