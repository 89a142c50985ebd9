"""Classifiers of torchvision and timm by their names: for any classes, channels and size of pictures."""

from pathlib import Path

import pytest
import torch
from shell import refusal
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ddptrain.api import UserError
from ddptrain.recipes.classifiers import (
    TimmName,
    TorchvisionName,
    timm_classifier,
    torchvision_classifier,
)

TORCHVISION = [
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet",
    "inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small",
    "regnet_y_400mf", "resnet34",
    "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_1", "swin_t", "vgg11_bn",
    "vit_b_16", "wide_resnet50_2",
]  # fmt: skip
TIMM = [
    "beit_base_patch16_224", "convnext_atto", "efficientnet_lite0", "ghostnet_050", "mobilenetv3_small_050",
    "regnetx_002", "resnet10t", "resnetv2_50", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224",
]  # fmt: skip


def takes_two_steps(model: nn.Module, channels: int, side: int) -> None:
    """Most of it learns; in the first step a head of zeros (of a ViT) does alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        logits = model(torch.randn(2, channels, side, side))
        assert logits.shape == (2, 7)
        functional.cross_entropy(logits, torch.tensor([0, 6])).backward()
        optimizer.step()
    moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert sum(moved) > 0.5 * len(moved)


@pytest.mark.parametrize(
    "name", ["resnet18", *[pytest.param(name, marks=pytest.mark.long) for name in TORCHVISION]]
)
@pytest.mark.parametrize("channels", [3, 1])
def test_torchvisions_take_a_step(name: str, channels: int) -> None:
    side = 224 if name == "maxvit_t" else 96
    model = torchvision_classifier(TorchvisionName(name), 7, channels, (side, side), norm_momentum=0.2)
    assert all(module.momentum == 0.2 for module in model.modules() if isinstance(module, _BatchNorm))
    takes_two_steps(model, channels, side)


@pytest.mark.long
@pytest.mark.parametrize("name", TIMM)
@pytest.mark.parametrize("channels", [3, 1])
def test_timms_take_a_step(name: str, channels: int) -> None:
    pytest.importorskip("timm")
    side = 224 if "swin" in name else 96
    takes_two_steps(timm_classifier(TimmName(name), 7, channels, (side, side)), channels, side)


def test_an_argument_of_the_models_own_is_passed_on() -> None:
    model = torchvision_classifier(TorchvisionName("mobilenet_v3_small"), 7, 3, (64, 64), dropout=0.7)
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.7]


@pytest.mark.parametrize(
    ("name", "size", "arguments", "said"),
    [
        ("resnet18", (64, 64), {"drop": 1}, "can't be built so"),
        ("vit_b_16", (64, 96), {}, "takes square pictures, not 64x96"),
        ("vit_b_16", (50, 50), {}, "can't be built so"),
        ("alexnet", (20, 20), {}, "can't take pictures of 20x20 pixels and 3 channel"),
        ("resnet18", (64, 64), {"norm_momentum": 0.0}, "norm_momentum=0.0: must be above 0"),
    ],
)
def test_what_a_model_can_not_take_is_refused(
    name: str, size: tuple[int, int], arguments: dict[str, float], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        torchvision_classifier(TorchvisionName(name), 7, 3, size, **arguments)


def test_names_are_listed_and_suggested_before_the_data_is_read() -> None:
    assert TorchvisionName.problem("resnet18") is None
    assert "Did you mean resnet50?" in (TorchvisionName.problem("resnet5") or "")
    assert "which of these" in (TorchvisionName.problem("") or "")
    listed = (TorchvisionName.problem("*resnet18") or "").splitlines()
    assert listed[1].split() == ["resnet18", "11.7", "M", "parameters"]


def test_a_wrong_name_is_refused_before_the_data_is_looked_for(tmp_path: Path) -> None:
    message = refusal(tmp_path, "recipe=finetune data.root=nowhere model.name=resnet5")
    assert message.startswith("model.name=resnet5: there is no such model. Did you mean resnet50?")
