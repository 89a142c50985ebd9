"""ResNet-18 (He et al., Deep Residual Learning, arXiv 1512.03385), for images of about 32x32."""

from typing import cast

from torch import nn
from torchvision.models import resnet18


def resnet18_32(num_classes: int, in_channels: int) -> nn.Module:
    """torchvision's ResNet-18 with a 3x3 stem and no pooling after it, as is usual for CIFAR:
    logits (n, num_classes) for (n, in_channels, H, W)."""
    model = resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return cast(nn.Module, model)
