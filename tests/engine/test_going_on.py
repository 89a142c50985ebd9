"""A run that goes on under a changed config: what changes, what is refused, what is kept."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rates import Rates
from shell import ddptrain
from torch import Tensor, nn
from toy import CLASSES, FEATURES, SGD, Classify, Fit, auto, lr_schedule, with_noise

from ddptrain.api.recipe import Report
from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.errors import UserError
from ddptrain.observe.rundir import name_run
from ddptrain.testing import run_ranks


class Filters(nn.Module):
    """A convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(FEATURES, 8, 3)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        pictures = x[:, :, None, None] * torch.linspace(-1, 1, 9).view(3, 3)
        logits: Tensor = self.last(torch.tanh(self.first(pictures)).flatten(1))
        return logits


def turned() -> nn.Module:
    return Filters().to(memory_format=torch.channels_last)


def plan(steps: int, **changes: Any) -> Plan:
    return Plan(**{"steps": steps, "train_size": 100, "batch_size": 20, "log_every": 1, **changes})


def rates(folder: Path, steps: int, sched: str, **changes: Any) -> list[float]:
    keep = Rates()
    Fit(plan(steps), sched=lr_schedule(sched, warmup=0.2), observers=[keep], **changes).run(World(), folder)
    return keep.seen


@pytest.mark.parametrize("sched", ["constant", "cosine", "step", "onecycle", "wsd"])
def test_more_steps_follow_the_longer_schedule_from_where_it_stands(tmp_path: Path, sched: str) -> None:
    whole = rates(tmp_path / "whole", 40, sched)
    rates(tmp_path / "grown", 10, sched)
    assert rates(tmp_path / "grown", 40, sched) == whole[10:]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "optim",
    [
        {**SGD, "momentum": 0.9},
        {"_target_": "torch.optim.AdamW", "lr": 0.05},
        {"_target_": "ddptrain.recipes.muon_with_adamw.MuonWithAdamW", "lr": 0.05},
    ],
    ids=lambda optim: optim["_target_"].rpartition(".")[2],
)
def test_momentum_is_the_same_in_another_layout(tmp_path: Path, optim: dict[str, Any], strategy: str) -> None:
    after = {"_target_": "ddptrain.strategies.fsdp.Fsdp"} if strategy == "fsdp" else auto()

    def rank(world: World) -> Tensor:
        weights = []
        for first in (Filters, turned):
            folder = tmp_path / first.__name__
            changes = {"optim": optim, "sched": lr_schedule("constant")}
            Fit(plan(4), make_model=first, strategy=auto(), **changes).run(world, folder)
            state, _, _ = Fit(plan(8), make_model=Filters, strategy=after, **changes).run(world, folder)
            weight = state.model.get_parameter("first.weight").detach()
            weights.append(weight.full_tensor() if strategy == "fsdp" else weight.clone())
        return torch.stack(weights)

    for same, turned_before in run_ranks(rank, 2 if strategy == "fsdp" else 1):
        torch.testing.assert_close(turned_before, same, rtol=0, atol=1e-5)


def test_a_new_rate_is_used(tmp_path: Path) -> None:
    rates(tmp_path, 10, "constant")
    assert rates(tmp_path, 20, "constant", optim={**SGD, "lr": 0.003}) == [0.003] * 10


def test_another_optimizer_or_precision_is_refused(tmp_path: Path) -> None:
    Fit(plan(3)).run(World(), tmp_path)
    with pytest.raises(UserError, match="was saved with SGD, and this is AdamW"):
        Fit(plan(6), optim={"_target_": "torch.optim.AdamW"}).run(World(), tmp_path)
    with pytest.raises(UserError, match="without fp16's gradient scaler"):
        Fit(plan(6), precision="fp16").run(World(), tmp_path)


@pytest.mark.parametrize(
    ("optimizer", "name", "before", "after"),
    [
        ("Adam", "amsgrad", False, True),
        ("AdamW", "amsgrad", False, True),
        ("RMSprop", "centered", False, True),
        ("RMSprop", "momentum", 0.0, 0.9),
        ("SGD", "momentum", 0.0, 0.9),
    ],
)
def test_settings_that_need_more_state_are_refused(
    tmp_path: Path, optimizer: str, name: str, before: Any, after: Any
) -> None:
    def optim(value: Any) -> dict[str, Any]:
        return {"_target_": f"torch.optim.{optimizer}", "lr": 0.01, name: value}

    Fit(plan(3), optim=optim(before)).run(World(), tmp_path)
    with pytest.raises(UserError, match=rf"^optim\.{name}={after}: .* was saved with {before}, so without"):
        Fit(plan(6), optim=optim(after)).run(World(), tmp_path)


@pytest.mark.parametrize(
    ("change", "key"),
    [("seed", "seed"), ("batch_size", r"train\.batch_size"), ("train_size", "data"), ("valid_size", "data")],
)
def test_another_place_in_the_data_is_refused(change: str, key: str) -> None:
    before = plan(3)
    after = plan(3, **{change: 33})
    after.check_continues(after.position_facts, "there")
    with pytest.raises(UserError, match=f"^{key}.*=33: there was saved with"):
        after.check_continues(before.position_facts, "there")


def test_a_run_folder_belongs_to_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = []
    for job in ("my-experiment-1", "my-experiment-2", "a_b", "a.b"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        folder = name_run(None, "toy")
        folder.mkdir(parents=True)
        assert name_run(None, "toy") == folder  # a restart finds it
        folders.append(folder)
    assert len(set(folders)) == 4
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert name_run(None, "toy") not in folders


def test_other_data_of_the_same_size_is_refused() -> None:
    before, after = plan(3, data="a hash"), plan(3, data="another")
    with pytest.raises(UserError, match=r"^data: there was saved while training on other samples"):
        after.check_continues(before.position_facts, "there")


def test_weight_decay_on_other_parameters_is_refused(tmp_path: Path) -> None:
    Fit(plan(3)).run(World(), tmp_path)
    with pytest.raises(
        UserError, match=r"^freeze, thaw, optim\.groups, optim\.layer_decay or train\.weight_decay_on"
    ):
        Fit(plan(6), weight_decay_on="matrices").run(World(), tmp_path)


def test_other_frozen_layers_of_the_same_size_are_refused(tmp_path: Path) -> None:
    """Their optimizer would go on with the state of other parameters."""

    def blocks() -> nn.Module:
        layers = [layer for _ in range(3) for layer in (nn.Linear(FEATURES, FEATURES), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))

    Fit(plan(3), make_model=blocks, freeze=["2.*"]).run(World(), tmp_path)
    with pytest.raises(UserError, match=r"\(4\.weight, 4\.bias only there, 2\.weight, 2\.bias only here\)"):
        Fit(plan(6), make_model=blocks, freeze=["4.*"]).run(World(), tmp_path)
    Fit(plan(6), make_model=blocks, freeze=["2.*"]).run(World(), tmp_path)


def test_fewer_steps_find_the_run_at_its_end(tmp_path: Path) -> None:
    for steps in (12, 5):
        state, _, _ = Fit(plan(steps), sched=lr_schedule("onecycle", warmup=0.2)).run(World(), tmp_path)
        assert state.step == 12


class Known(Classify):
    """Its accuracy is known beforehand, by the number of steps: the best is that after step 10."""

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        return {"steps": model.get_buffer("1.num_batches_tracked"), "batches": torch.tensor(1)}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        steps = int(sums["steps"]) // int(sums["batches"])
        return Report({"accuracy": steps / 10 if steps <= 10 else 0.5})


def test_the_best_of_a_finished_run_is_known_to_the_longer_one(tmp_path: Path) -> None:
    """The last checkpoint is written before the last evaluation, which comes again."""
    changes: dict[str, Any] = {"make_model": with_noise, "task": Known, "sched": lr_schedule("constant")}
    state, _, _ = Fit(plan(10, eval_every=4), **changes).run(World(), tmp_path)
    assert (state.best, state.best_step) == (1.0, 10)
    again, _, _ = Fit(plan(11, eval_every=100), **changes).run(World(), tmp_path)
    assert again.step == 11
    assert (again.best, again.best_step) == (1.0, 10)


@pytest.mark.parametrize(("before", "after"), [(4, None), (None, 4)])
def test_another_strategy_than_strict_is_refused_by_its_name(before: int | None, after: int | None) -> None:
    saved, now = plan(3, shards=before), plan(3, shards=after)
    with pytest.raises(UserError, match=r"^strategy: there was saved .*strict in 4 shards.*strategy=strict"):
        now.check_continues(saved.position_facts, "there")


def test_a_run_that_is_shortened_to_where_it_was_saved_is_evaluated(tmp_path: Path) -> None:
    words = ["recipe=cnn_digits", "device=cpu", "checkpoint.every=6", "train.eval_every=100"]
    whole = ddptrain(tmp_path, [*words, "train.steps=12", "run.dir=whole"])
    assert whole.code == 0, whole.err
    branch = ["run.dir=branch", "run.resume=whole/checkpoints/step-6", "train.steps=6"]
    assert ddptrain(tmp_path, [*words, *branch]).code == 0
    summary = json.loads((tmp_path / "branch/summary.json").read_text())
    assert (summary["outcome"], summary["step"]) == ("done", 6)
    assert {"accuracy", "loss"} <= summary["metrics"].keys()
    assert (tmp_path / "branch/checkpoints/best/manifest.json").exists()
