"""A file that computes something else than the model is not kept."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stateful import Guess
from toy import auto, lr_schedule
from verbs import train_on

from ddptrain.api.recipe import Deployed
from ddptrain.config.check import checked
from ddptrain.errors import UserError
from ddptrain.run import export


def test_it_is_said_with_how_far_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    config = checked(
        {
            "recipe": "stateful", "run": {"dir": str(run)}, "device": "cpu", "strategy": auto(),
            "task": {"_target_": "stateful.Guess"}, "data": {"_target_": "stateful.Points"},
            "optim": {"_target_": "torch.optim.SGD", "lr": 0.4}, "sched": lr_schedule("constant"),
            "observers": {}, "train": {"steps": 2, "batch_size": 6},
        }
    )  # fmt: skip
    train_on(1, config)
    deploy = Guess.deploy

    def apart(task: Guess, model: torch.nn.Module) -> Deployed:
        return replace(deploy(task, model), difference=lambda ours, theirs: 0.02)

    monkeypatch.setattr(Guess, "deploy", apart)
    with pytest.raises(UserError, match=r"file's logits are 2\.0e-02 from the model's, where 0\.001 is"):
        export.run(config, run, "last", {"format": "pt2"})
    assert not list(run.glob("*.pt2"))
