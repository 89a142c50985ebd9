"""Pictures are normalised as those were that a library's weights were trained on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from named_sets import TRAINED, in_folders
from shell import ddptrain
from torchvision import models

from ddptrain.data.images.folder import IMAGENET_MEAN, IMAGENET_STD
from ddptrain.run.initial_weights import normalisation_of

TORCHVISION = "ddptrain.recipes.classifiers.torchvision_classifier"
TIMM = "ddptrain.recipes.classifiers.timm_classifier"


def known(
    weights: str | None, target: str = TORCHVISION, **model: Any
) -> tuple[list[float], list[float]] | None:
    return normalisation_of(weights or "", {"_target_": target, **model})


def test_of_every_classifier_of_torchvision() -> None:
    for name in models.list_models(module=models):
        for weights in models.get_model_weights(name):
            found = known(f"torchvision:{weights.name}", name=name)
            assert found is not None
            if name in ("googlenet", "inception_v3"):
                continue
            used = weights.transforms()
            levels = torch.rand(3, dtype=torch.float64) * 255
            mean, std = (torch.tensor(of, dtype=torch.float64) for of in found)
            theirs = (levels / 255 - torch.tensor(used.mean).double()) / torch.tensor(used.std).double()
            torch.testing.assert_close(
                (levels - mean) / std, theirs, atol=0.06 / min(found[1]), rtol=2e-3, check_dtype=False
            )


@pytest.mark.parametrize("make", [models.googlenet, models.inception_v3])
def test_of_those_that_torchvision_builds_otherwise_with_weights(make: Any) -> None:
    """By ``transform_input``, which is no part of a state_dict."""
    for transforms in (True, False):
        model = make(init_weights=False, aux_logits=False, transform_input=True)
        found = known("default", name=make.__name__, transform_input=transforms)
        assert found is not None
        mean, std = (torch.tensor(of)[:, None, None] for of in found)
        levels = torch.rand(1, 3, 4, 4) * 255
        imagenet = [
            torch.tensor(of)[:, None, None] * 255 for of in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        ]
        wanted = (levels - imagenet[0]) / imagenet[1]
        if not transforms:
            wanted = model._transform_input(wanted)
        torch.testing.assert_close((levels - mean) / std, wanted, atol=2e-3, rtol=2e-3)


def test_of_timm() -> None:
    pytest.importorskip("timm")
    half = [127.5] * 3
    assert known("default", TIMM, name="vit_tiny_patch16_224") == (half, half)
    assert known("timm:augreg_in21k_ft_in1k", TIMM, name="vit_tiny_patch16_224") == (half, half)
    found = known("timm:default", TIMM, name="resnet18")
    assert found is not None
    assert found[0] == pytest.approx(IMAGENET_MEAN, abs=0.1)
    assert known("timm:none", TIMM, name="resnet18") is None


@pytest.mark.parametrize("weights", [None, "w.pth", "runs/a", "hub:a/b", "timm:default", "torchvision:none"])
def test_of_others_nothing_is_known(weights: str | None) -> None:
    assert known(weights, name="resnet18") is None


@pytest.mark.long
@pytest.mark.parametrize("name", ["googlenet", "resnet18"])
def test_a_run_keeps_it(name: str, tmp_path: Path) -> None:
    """In its checkpoints, when it goes on, and when it is evaluated."""
    in_folders(tmp_path / "set", TRAINED, TRAINED)
    weights = models.get_model_weights(name).DEFAULT  # type: ignore[attr-defined]
    file = tmp_path / "hub" / "checkpoints" / Path(weights.url).name
    file.parent.mkdir(parents=True)
    more = {"init_weights": False} if name == "googlenet" else {}
    torch.save(models.get_model(name, weights=None, **more).state_dict(), file)
    words = (
        f"recipe=finetune data.root={tmp_path}/set model.name={name} data.source.size=64 device=cpu"
        f" observers=[] train.batch_size=3 train.steps=1 data.workers=0 run.dir=run init.weights=default"
    )
    environment = {"TORCH_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    began = ddptrain(tmp_path, words, **environment)
    assert began.code == 0, began.err
    assert ("model's mean 127.5, 127.5, 127.5 and deviation 127.5" in began.err) == (name == "googlenet")
    file.unlink()
    ddptrain(tmp_path, f"{words} train.steps=2", **environment)
    without = words.replace("init.weights=default", "init.weights=null")
    ddptrain(tmp_path, f"{without} train.steps=3", **environment)
    [manifest] = (tmp_path / "run" / "checkpoints").glob("step-3/manifest.json")
    recall = json.loads(manifest.read_text())["recall"]
    half = [127.5] * 3
    wanted = (half, half) if name == "googlenet" else (list(IMAGENET_MEAN), list(IMAGENET_STD))
    assert (recall["mean"], recall["std"]) == wanted
    assert known("run", name=name) is None, "there is no such folder here"
    assert known(str(tmp_path / "run"), name="another") == wanted
    assert known(str(tmp_path / "run/checkpoints/step-3"), name="another") == wanted
    evaluated = ddptrain(tmp_path, "evaluate run=run", **environment)
    assert json.loads(evaluated.out)["step"] in (1, 2, 3), evaluated.err
