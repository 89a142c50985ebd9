"""Another optimizer than the recipe's comes with its own numbers."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from shell import ddptrain

from ddptrain.config.compose import composed_tree
from ddptrain.errors import UserError
from ddptrain.verbs.argv import parse

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.001, "betas": [0.9, 0.999], "weight_decay": 0.01}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": False}
FINETUNE = {"lr": 5e-4, "weight_decay": 0.05, "groups": [], "layer_decay": None}
GROUPS = {"groups": [], "layer_decay": None}


def optim(*words: str) -> Any:
    composed = composed_tree(parse(words))
    assert composed is not None
    return composed[0]["optim"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("recipe=resnet18_cifar10 optim=adamw", {**ADAMW, **GROUPS}),
        ("recipe=resnet18_cifar10", {**SGD, "nesterov": True, **GROUPS}),
        ("recipe=resnet18_cifar10 optim=sgd", {**SGD, "nesterov": True, **GROUPS}),
        ("recipe=finetune optim=sgd optim.layer_decay=0.8", {**SGD, "groups": [], "layer_decay": 0.8}),
        ("recipe=finetune optim.lr=0.02 optim=sgd", {**SGD, "lr": 0.02, "groups": [], "layer_decay": None}),
        (
            "recipe=finetune optim=sgd +optim.dampening=0.1 optim.layer_decay=null",
            {**SGD, **GROUPS, "dampening": 0.1},
        ),
        (
            "recipe=finetune optim=adamw",
            {**ADAMW, "lr": 5e-4, "weight_decay": 0.05, "groups": [], "layer_decay": None},
        ),
    ],
)
def test_its_arguments_are_its_own_but_for_those_that_are_typed(words: str, wanted: dict[str, Any]) -> None:
    assert optim(*words.split()) == wanted


def test_what_is_taken_out_stays_out() -> None:
    assert "nesterov" not in optim("recipe=cnn_digits", "optim=sgd", "~optim.nesterov")


def test_interpolations_of_a_choice_are_looked_up(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    node = {"_target_": "torch.optim.RMSprop", "lr": 0.5, "momentum": "${task.label_smoothing}"}
    (tmp_path / "optim/ours.yaml").write_text(yaml.safe_dump(node))
    given = optim(
        f"--config-dir={tmp_path}", "recipe=resnet18_cifar10", "optim=ours", "task.label_smoothing=0.25"
    )
    assert (given["lr"], given["momentum"]) == (0.5, 0.25)


def test_what_names_a_replaced_key_gets_the_choices_value() -> None:
    """AdamW's, not that of the recipe's SGD."""
    words = ["recipe=mobilenet_cifar10", "optim=adamw", "train.clip_norm=${optim.lr}"]
    known = composed_tree(parse([*words, "optim.lr=${optim.weight_decay}"]))
    assert known is not None
    assert known[0]["optim"]["lr"] == known[0]["optim"]["weight_decay"] == 0.01
    assert known[0]["train"]["clip_norm"] == 0.01
    assert known[1] == [*words, "optim.lr=${optim.weight_decay}"], "as typed: the command is repeated from it"


@pytest.mark.parametrize("group", ["recipe/cnn_digits", "optim/adam"])
def test_a_file_with_the_name_of_ours_is_refused(tmp_path: Path, group: str) -> None:
    file = tmp_path / f"{group}.yaml"
    file.parent.mkdir()
    file.write_text("lr: 7\n")
    with pytest.raises(UserError, match=f"{group}.yaml: has the name of ddptrain's own"):
        optim(f"--config-dir={tmp_path}", "recipe=cnn_digits")


def test_an_optimizer_of_ones_own_too(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim/slow.yaml").write_text("_target_: torch.optim.Rprop\nlr: 0.5\n")
    found = optim(f"--config-dir={tmp_path}", "recipe=cnn_digits", "optim=slow", "optim.groups=[]")
    assert found == {"_target_": "torch.optim.Rprop", "lr": 0.5, **GROUPS}


@pytest.mark.long
def test_a_run_says_which_and_a_report_what_changed_on_the_way(tmp_path: Path) -> None:
    words = "recipe=cnn_digits device=cpu train.batch_size=64 run.dir=run observers=[jsonl]"
    first = ddptrain(tmp_path, f"{words} optim=sgd train.steps=3")
    assert first.code == 0, first.err
    assert "optimizer  SGD, lr 0.1, momentum 0.9, weight_decay 0.0005, nesterov False" in first.err
    assert "changed    " not in first.err
    again = ddptrain(tmp_path, f"{words} optim=sgd train.steps=5 optim.lr=0.02")
    assert again.code == 0, again.err
    assert "changed    optim.lr=0.02 (up to step 3: 0.1)" in again.err
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["optim"]["lr"] == 0.02
    report = ddptrain(tmp_path, "report run")
    assert "optim.lr: 0.02 since step 3, 0.1 before" in report.out
    assert "optim.lr: 0.02 since step 3, 0.1 before" in (tmp_path / "run/report.html").read_text()
