"""MobileNetV3-small (Howard et al., arXiv 1905.02244) for small pictures, from torchvision's."""

from typing import cast

from torch import nn
from torchvision.models import mobilenet_v3_small

from ddptrain.api import UserError


def mobilenet_v3_small_32(num_classes: int, in_channels: int, dropout: float = 0.2) -> nn.Module:
    """MobileNetV3-small for images of about 32x32: logits (n, num_classes) for (n, 3, H, W).

    The stock network divides the sides by 32, which leaves a 1x1 map of a CIFAR image. Here the stem
    and the first block keep the resolution: the maps are 32, 32, 16, 16, 8, ... 4 pixels wide.
    BatchNorm forgets at PyTorch's rate of 0.1: torchvision's 0.01 suits ImageNet's long epochs.
    """
    if in_channels != 3:
        raise UserError(
            f"model: MobileNetV3 takes colour images, but the data has {in_channels} channel(s)."
            " Use model=torchvision model.name=mobilenet_v3_small, which takes any, or model=cnn."
        )
    model = mobilenet_v3_small(num_classes=num_classes, dropout=dropout, norm_layer=nn.BatchNorm2d)
    for block in model.features[:2]:  # the stem and the first block
        for layer in block.modules():
            if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2):
                layer.stride = (1, 1)
    return cast(nn.Module, model)
