"""A file that computes something else than the model is not kept, unless rounding alone explains it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stateful import Guess
from torch import Tensor, nn
from toy import auto, lr_schedule
from verbs import train_on

from ddptrain.api.recipe import Deployed
from ddptrain.api.world import World
from ddptrain.config.check import checked
from ddptrain.errors import UserError
from ddptrain.run import export
from ddptrain.run.file_formats import FORMATS
from ddptrain.testing import run_ranks


def changed(logits: Tensor, how: str) -> Tensor:
    """What a wrong file says."""
    match how:
        case "scaled":
            return logits * 1.02
        case "far":
            return logits * 100
        case "shape":
            return logits[:, :2]
        case "nan":
            return logits * torch.nan
        case "infinite":
            return logits / 0.0
    return logits


class Traced(nn.Module):
    """Says something else in a file than in Python. sharp: its outputs jump where what its layers give
    changes by 1e-6; in the file the inputs do. last: the example's last row."""

    def __init__(self, model: nn.Module, how: str, sharp: bool, last: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("last", last)
        self.last: Tensor
        self._how = how
        self._sharp = sharp

    def forward(self, features: Tensor) -> Tensor:
        in_file = torch.compiler.is_compiling()
        logits: Tensor = self.model(features + 1e-6 * (in_file and self._sharp))
        if self._sharp:
            logits = logits + 0.1 * (logits.sum(1, keepdim=True) * 1e7).sin().sign()
        if in_file and self._how == "on one example":  # on the one that is turned upside down
            return torch.where((features[0] == self.last).all(), torch.nan, logits)
        return changed(logits, self._how) if in_file else logits


def exported(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str, sharp: bool) -> str:
    """Why the run in ``folder/run`` could not be exported as such a file, or ''."""
    run = folder / "run"
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

    def traced(task: Guess, model: nn.Module) -> Deployed:
        whole = deploy(task, model)
        return replace(whole, module=Traced(whole.module, how, sharp, whole.inputs[0][-1]).eval())

    monkeypatch.setattr(Guess, "deploy", traced)
    try:
        export.run(config, run, "last", {"format": "pt2"})
    except UserError as error:
        return str(error)
    return ""


def test_a_file_that_differs_is_refused_with_how_far_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = exported(tmp_path, monkeypatch, "scaled", sharp=False)
    assert "file's logits are 2.0e-02 from the model's, where 0.001 is" in said
    assert not list(tmp_path.rglob("*.pt2"))


def test_where_rounding_decides_in_the_model_itself_the_file_is_kept_and_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exported(tmp_path, monkeypatch, "", sharp=True) == ""
    said = "".join(capfd.readouterr())
    assert "UNCHECKED  the file's logits are" in said
    assert "checked    against eager" not in said
    assert (tmp_path / "run/model.pt2").exists()


@pytest.mark.parametrize("how", ["far", "shape", "nan", "infinite", "on one example"])
def test_what_rounding_does_not_explain_is_refused_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    said = exported(tmp_path, monkeypatch, how, sharp=True)
    assert re.search(r"file's logits are (nan|\d\.\de\+\d\d) from the model's", said)
    assert not list(tmp_path.rglob("*.pt2"))


class Deciding(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if float(inputs.max()) > 0 else -inputs


@pytest.mark.parametrize("form", ["pt2", "onnx"])
@pytest.mark.parametrize("any_batch", [False, True])
def test_a_model_that_decides_by_its_values_is_told_in_one_message(
    form: str, any_batch: bool, tmp_path: Path
) -> None:
    deployed = Deployed(Deciding(), (torch.ones(2, 3),), ("x",), ("y",), any_batch=any_batch)

    def refusal(_: World) -> str:
        with pytest.raises(UserError) as error:
            FORMATS[form].write(deployed, tmp_path / f"model.{form}", "fp32", ())
        return str(error.value)

    [said] = run_ranks(refusal, 1)
    assert re.match(r"export: torch can't trace Deciding: .*load\(<run>\)\.module\.$", said)
    assert len(said) < 600
