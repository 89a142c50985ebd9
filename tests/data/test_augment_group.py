"""The config group ``augment``: presets and one's own, for image classification alone."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from compare import assert_same
from composed import made
from shell import ddptrain

from ddptrain.config.check import checked
from ddptrain.config.compose import composed_tree
from ddptrain.config.instantiate import check_node
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.transforms import Transforms
from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.errors import UserError
from ddptrain.verbs.argv import parse

ROOT = Path(__file__).parents[2]
PRESETS = sorted(path.stem for path in (ROOT / "conf/augment").glob("*.yaml"))
IMAGES = ("cnn_cifar10", "cnn_digits", "mobilenet_cifar10", "resnet18_cifar10", "speedrun_cifar10")


def tree(*words: str) -> dict[str, Any]:
    before = sys.argv
    try:
        found = composed_tree(parse(words))
    finally:
        sys.argv = before
    assert found is not None
    return found[0]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "recipe",
    [IMAGES[0], *(pytest.param(recipe, marks=pytest.mark.long) for recipe in (*IMAGES[1:], "mobilenet_v3"))],
)
def test_a_preset_replaces_what_data_and_recipe_say(recipe: str, preset: str) -> None:
    plain, chosen = tree(f"recipe={recipe}"), tree(f"recipe={recipe}", f"augment={preset}")
    written = yaml.safe_load((ROOT / f"conf/augment/{preset}.yaml").read_text())
    assert chosen["data"]["augment"] == written
    assert {**chosen["data"], "augment": plain["data"]["augment"]} == plain["data"]
    assert {**chosen, "data": plain["data"]} == plain
    assert plain["data"]["augment"]["_target_"] == "ddptrain.data.images.augment.Augment"
    checked(chosen)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_presets_batches_train_a_model(preset: str, tmp_path: Path) -> None:
    _, task, data = made("cnn_cifar10", tmp_path, f"augment={preset}", "task.label_smoothing=0.1")
    assert isinstance(data, ImageData)
    assert isinstance(data._augment, Augment if preset == "none" else Transforms)
    preview = data.preview()
    assert preview.shape == (8, 3, 32, 32)
    batch = data._ready.train.first(8, epoch=0)
    model = task.build()
    task.loss(model, (data.normalised(batch[0]), batch[1]), None).sum.backward()  # type: ignore[arg-type]
    gradients = [weight.grad for weight in model.parameters()]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)


def test_what_a_recipe_sets_of_it_is_left_out_for_data_without_one() -> None:
    words = ("recipe=resnet18_cifar10", "data=dataset", "data.dataset._target_=torchvision.datasets.FakeData")
    chosen = tree(*words)
    assert "augment" not in chosen["data"]
    checked(chosen)
    asked = tree(*words, "+data.augment.crop=4")
    assert asked["data"]["augment"]["crop"] == 4, "what was asked for is refused, not left out"


def test_its_keys_are_those_of_augment() -> None:
    words = ("recipe=cnn_digits", "augment=strong", "augment.mix=null", "augment.resized_crop.scale=[0.5,1]")
    policy = "augment.transforms.policy"
    found = tree(
        *words, f"{policy}._target_=torchvision.transforms.v2.RandAugment", f"+{policy}.num_ops=3",
        "augment.transforms.erasing=null",
    )  # fmt: skip
    assert found["data"]["augment"]["mix"] is None
    assert found["data"]["augment"]["resized_crop"]["scale"] == [0.5, 1]
    chosen = found["data"]["augment"]["transforms"]
    assert chosen["erasing"] is None
    assert chosen["policy"]["_target_"] == "torchvision.transforms.v2.RandAugment"
    assert chosen["policy"]["num_ops"] == 3
    checked(found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("recipe=lstm_text augment=light", r"^augment: is for image classification .*TextData\. Leave"),
        ("recipe=yolo_shapes augment=none", r"^augment: is for image classification .*DetectionData\. Leave"),
        ("recipe=transformer_translate augment=strong", r"^augment: is for image classification"),
        (
            "recipe=cnn_digits augment=light data.augment.horizontal_flip=true",
            r"^data\.augment\.horizontal_flip=true: augment=\.\.\. takes the place .* write augment\.hor",
        ),
        ("recipe=cnn_digits +augment.size=4", r"^augment: has keys and no augment\._target_"),
        ("recipe=cnn_digits augment=ligth", r"^augment=ligth: .* Did you mean light\?"),
    ],
)
def test_what_it_is_not_for_is_refused_with_one_message(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        tree(*words.split())
    assert "\n" not in str(refused.value)


OWN = """
import torch
from torch import Tensor, nn

class Noise(nn.Module):
    def __init__(self, most: int = 9) -> None:
        super().__init__()
        self.most = most

    def forward(self, picture: Tensor) -> Tensor:
        noise = torch.randint(-self.most, self.most + 1, picture.shape)
        return (picture.int() + noise).clamp(0, 255).to(torch.uint8)
"""


@pytest.mark.long
@pytest.mark.parametrize("choice", ["augment=noise", "augment=strong"])
def test_a_run_killed_and_resumed_has_the_same_bits(choice: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "augment").mkdir(parents=True)
    (folder / "own_noise.py").write_text(OWN)
    (folder / "augment/noise.yaml").write_text("_target_: own_noise.Noise\nmost: 20\n")
    run = (
        f"--config-dir mine recipe=cnn_digits {choice} device=cpu observers=[console] model.width=8"
        " checkpoint.every=4 train.steps=8 run.dir="
    )
    one_thread = {
        "OMP_NUM_THREADS": "1"
    }  # else workers would leave the trainer fewer, and sums another order
    straight = ddptrain(tmp_path, f"{run}straight data.workers=2", **one_thread)
    assert straight.code == 0, straight.err
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step-8")  # as if killed before the last step was saved
    resumed = ddptrain(tmp_path, f"{run}resumed data.workers=0 data.resident=true", **one_thread)
    assert "steps 4 to 8" in resumed.err
    whole, parts = (read(tmp_path / of / "checkpoints/step-8") for of in ("straight", "resumed"))
    assert_same(unpack(whole)["model"], unpack(parts)["model"])


def test_torchvisions_classes_are_taken_by_name(tmp_path: Path) -> None:
    found = "+augment._target_=torchvision.transforms.v2.AugMix"
    _, _, data = made("cnn_cifar10", tmp_path, found, "+augment.severity=2")
    assert data.preview() is not None
    for name in ("functional.resize", "InterpolationMode"):
        node = {"_target_": f"torchvision.transforms.v2.{name}"}
        assert check_node(node, "data.augment")
