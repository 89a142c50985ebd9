"""MobileNetV3-small (Howard et al., arXiv 1905.02244) for small pictures, from torchvision's."""

from typing import cast

from torch import nn
from torchvision.models import mobilenet_v3_small

from ddptrain.api import UserError

_STRIDED_BLOCKS = (1, 2, 4, 9)
"""Blocks of torchvision's ``features`` with stride 2, after the stem's own (index 0)."""


def mobilenet_v3_small_32(num_classes: int, in_channels: int, dropout: float = 0.2) -> nn.Module:
    """MobileNetV3-small for images of about 32x32: logits (n, num_classes) for (n, 3, H, W).

    The stock network divides the sides by 32, which leaves a 1x1 map of a CIFAR image. Here the stem
    and the first block keep the resolution: the maps are 32, 32, 16, 16, 8, ... 4 pixels wide.
    BatchNorm forgets at PyTorch's rate of 0.1: torchvision's 0.01 suits ImageNet's long epochs.
    """
    _three(in_channels)
    model = mobilenet_v3_small(num_classes=num_classes, dropout=dropout, norm_layer=nn.BatchNorm2d)
    for block in (0, _STRIDED_BLOCKS[0]):
        for layer in model.features[block].modules():
            if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2):
                layer.stride = (1, 1)
    return cast(nn.Module, model)


def _three(in_channels: int) -> None:
    if in_channels != 3:
        raise UserError(
            f"model: MobileNetV3 takes colour images, but the data has {in_channels} channel(s)."
            " Use model=torchvision model.name=mobilenet_v3_small, which takes any, or model=cnn."
        )
