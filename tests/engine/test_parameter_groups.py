"""Frozen parameters, groups with rates of their own, and rates that fall towards the input."""

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models
from toy import lr_schedule

from ddptrain.engine.freeze import freeze
from ddptrain.engine.parameter_groups import layer_depths, parameter_groups
from ddptrain.errors import UserError
from ddptrain.run.initial_weights import match
from ddptrain.run.optimizer import build_optimizer, check_optimizer
from ddptrain.run.schedule import build_schedule

SGD = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def small() -> nn.Sequential:
    """0: convolution, 1: BatchNorm, 2: flatten, 3: classifier."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))


@pytest.mark.parametrize(
    ("name", "blocks", "first", "last"),
    [
        ("resnet18", 8, "conv1.weight", "layer4.1.conv1.weight"),
        ("vit_b_16", 12, "class_token", "encoder.layers.encoder_layer_11.ln_1.weight"),
        ("convnext_tiny", 18, "features.0.0.weight", "features.7.2.block.0.weight"),
        ("mobilenet_v3_small", 11, "features.0.0.weight", None),
    ],
)
def test_depths_follow_the_blocks(name: str, blocks: int, first: str, last: str | None) -> None:
    """Blocks as in the papers: [2, 2, 2, 2]; 12; [3, 3, 9, 3]; 11 bottlenecks and a last convolution."""
    with torch.device("meta"):
        depths = layer_depths(models.get_model(name, weights=None))
    extra = last is None  # a last convolution, as large as a block
    assert depths[first] == blocks + 1 + extra == max(depths.values())
    assert last is None or depths[last] == 1
    head = [key for key, depth in depths.items() if depth == 0]
    assert any(key.startswith(("fc", "heads", "classifier")) for key in head)
    assert list(depths.values()) == sorted(depths.values(), reverse=True)


def test_each_group_has_its_rate_at_every_step_of_a_schedule() -> None:
    node = {**SGD, "layer_decay": 0.5, "groups": [{"params": "3.*", "lr": 10, "weight_decay": 0}]}
    shapes = [lr_schedule(name) for name in ("onecycle", "step", "linear")]
    for sched in (
        *shapes,
        lr_schedule("cosine", warmup=0.2, final=0.1),
        lr_schedule("wsd", warmup=0.2, cooldown=0.5),
    ):
        one, several = (build_optimizer(options, small()) for options in (SGD, node))
        plain, scaled = build_schedule(sched, one, 20), build_schedule(sched, several, 20)
        for step in range(20):
            plain.at(step)
            scaled.at(step)
            rate = one.param_groups[0]["lr"]
            for group in several.param_groups:
                assert group["lr"] == pytest.approx(rate * group["lr_scale"], rel=1e-9)
    scales = {group["lr_scale"]: group["weight_decay"] for group in several.param_groups}
    assert scales == {10.0: 0, 0.5: 0.01, 0.25: 0.01}


def test_the_last_pattern_that_matches_decides_for_each_setting() -> None:
    groups = [{"params": "*", "lr": 0.5}, {"params": "*.bias", "weight_decay": 0}, {"params": "3.*", "lr": 2}]
    model = small()
    found = {
        id(parameter): (group.lr_scale, group.weight_decay)
        for group in parameter_groups(model, {**SGD, "groups": groups})
        for parameter in group.parameters
    }
    named = {name: found[id(parameter)] for name, parameter in model.named_parameters()}
    assert named["0.weight"] == (0.5, None)
    assert named["0.bias"] == (0.5, 0)
    assert named["3.weight"] == (2, None)
    assert named["3.bias"] == (2, 0)


def test_frozen_parameters_and_their_statistics_stay() -> None:
    model = small()
    frozen = freeze(model, SGD, ["0.*", "1.*"])
    assert frozen is not None
    assert frozen.parameters == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert frozen.norms == ("1",)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = build_optimizer(SGD, model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 8, 8)).square().sum().backward()
        optimizer.step()
    still = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert still == {name for name in before if not name.startswith("3.")}


@pytest.mark.parametrize(
    ("groups", "frozen"),
    [
        ([("0.*", True), ("*.bias", False)], {"0.weight"}),
        ([("*.bias", False), ("0.*", True)], {"0.weight", "0.bias"}),
        ([("0.*", True), ("0.bias", False), ("0.b*", True)], {"0.weight", "0.bias"}),
    ],
)
def test_the_last_pattern_decides_what_is_frozen(groups: list[tuple[str, bool]], frozen: set[str]) -> None:
    model = small()
    optim = {**SGD, "groups": [{"params": name, "freeze": on} for name, on in groups]}
    found = freeze(model, optim, [])
    assert found is not None
    assert set(found.parameters) == frozen
    trained = {id(p) for group in parameter_groups(model, optim) for p in group.parameters}
    assert {n for n, p in model.named_parameters() if id(p) not in trained} == frozen


def test_a_norm_of_which_a_part_is_trained_goes_on_counting() -> None:
    model = small()
    freeze(model, {**SGD, "groups": [{"params": "1.bias", "freeze": True}]}, [])
    assert model[1].training
    assert not model[1].bias.requires_grad


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"layer_decay": 0}, "optim.layer_decay=0: must be"),
        ({"layer_decay": "x"}, "optim.layer_decay=x: must be"),
        ({"groups": {"a": 1}}, "optim.groups="),
        ({"groups": [{"params": "*"}]}, r"optim.groups\[0\]="),
        ({"groups": [{"lr": 1}]}, r"optim.groups\[0\]="),
        ({"groups": [{"params": "*", "rate": 1}]}, r"optim.groups\[0\].rate=1: there is no such setting"),
        ({"groups": [{"params": "*", "lr": -1}]}, r"optim.groups\[0\].lr=-1: must be"),
        ({"groups": [{"params": "*", "lr": 0}]}, r"optim.groups\[0\].lr=0: use freeze"),
        ({"groups": [{"params": "*", "freeze": 1}]}, r"optim.groups\[0\].freeze=1: must be"),
    ],
)
def test_wrong_groups_are_refused_before_there_is_a_model(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"^{named}"):
        check_optimizer({**SGD, **wrong})


@pytest.mark.parametrize("shares", [{"layer_decay": 0.5}, {"groups": [{"params": "*", "lr": 2}]}])
def test_shares_of_a_rate_need_one(shares: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^optim\.lr: is missing"):
        check_optimizer({"_target_": "torch.optim.AdamW", **shares})
    check_optimizer({"_target_": "torch.optim.AdamW", "lr": 0.1, **shares})


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"^freeze=layer9\.\*: matches the name of no parameter"):
        freeze(small(), SGD, ["layer9.*"])
    with pytest.raises(UserError, match=r"^optim\.groups, params: head\.\*: matches"):
        build_optimizer({**SGD, "groups": [{"params": "head.*", "lr": 2}]}, small())
    with pytest.raises(UserError, match=r"^freeze: matches every parameter"):
        freeze(small(), SGD, ["*"])


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(6, 6)
        self.decoder.weight = self.encoder.weight


@pytest.mark.parametrize("pattern", ["decoder.*", "encoder.*", "*coder.*t"])
def test_a_parameter_is_found_by_each_of_its_names(pattern: str) -> None:
    model = Tied()
    named = dict(model.named_parameters(remove_duplicate=False))
    meant = {named[name] for name in named if fnmatchcase(name, pattern)}
    frozen = freeze(model, SGD, [pattern])
    assert frozen is not None
    assert {p for p in model.parameters() if not p.requires_grad} == meant
    model.requires_grad_(True)
    groups = parameter_groups(model, {**SGD, "groups": [{"params": pattern, "lr": 0.5}]})
    assert {p for group in groups if group.lr_scale == 0.5 for p in group.parameters} == meant
    found = match(model, Tied().state_dict(), "w", [pattern])
    assert {named[name] for name in found.skipped} == meant
    assert not {named[name] for name in found.loaded} & meant


@pytest.mark.parametrize("name", ["Rprop", "SGD"])
def test_a_weight_decay_that_the_optimizer_has_not_is_refused(name: str) -> None:
    node = {"_target_": f"torch.optim.{name}", "lr": 0.1, "groups": [{"params": "3.*", "weight_decay": 0.5}]}
    if name == "SGD":
        build_optimizer(node, small())
        return
    with pytest.raises(UserError, match=r"optim.groups: weight_decay: torch.optim.Rprop has no weight decay"):
        build_optimizer(node, small())
