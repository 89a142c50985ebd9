"""The parts that the detector is made of. All maps are (n, channels, height, width)."""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional


@final
class ConvBlock(nn.Sequential):
    """Convolution, BatchNorm, SiLU; the side is divided by ``stride``."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int = 1, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(out_channels, eps=1e-3, momentum=0.03),
            nn.SiLU(inplace=True),
        )


@final
class Bottleneck(nn.Module):
    """Two 3x3 convolutions, around which the input may be added (He et al., arXiv 1512.03385)."""

    def __init__(self, channels: int, shortcut: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(ConvBlock(channels, channels, 3), ConvBlock(channels, channels, 3))
        self._shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.layers(x)
        return x + changed if self._shortcut else changed


@final
class CspBlock(nn.Module):
    """Cross-stage-partial block: one half of the channels passes by, the other goes through bottlenecks, and
    what each of them gives is kept (Wang et al., arXiv 1911.11929; the dense joining as in ELAN,
    arXiv 2211.04800)."""

    def __init__(self, in_channels: int, out_channels: int, depth: int, shortcut: bool) -> None:
        super().__init__()
        half = out_channels // 2
        self.split = ConvBlock(in_channels, 2 * half)
        self.bottlenecks = nn.ModuleList(Bottleneck(half, shortcut) for _ in range(depth))
        self.join = ConvBlock((2 + depth) * half, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.split(x).chunk(2, dim=1))
        for bottleneck in self.bottlenecks:
            parts.append(bottleneck(parts[-1]))
        joined: Tensor = self.join(torch.cat(parts, dim=1))
        return joined


@final
class PyramidPooling(nn.Module):
    """What lies within 5, 9 and 13 cells around each, by max-pooling three times in a row (He et al.,
    arXiv 1406.4729)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.shrink = ConvBlock(channels, half)
        self.pool = nn.MaxPool2d(5, stride=1, padding=2)
        self.join = ConvBlock(4 * half, channels)

    def forward(self, x: Tensor) -> Tensor:
        pooled = [self.shrink(x)]
        for _ in range(3):
            pooled.append(self.pool(pooled[-1]))
        joined: Tensor = self.join(torch.cat(pooled, dim=1))
        return joined


def doubled(x: Tensor) -> Tensor:
    """A map of twice the side, of the nearest cells."""
    return functional.interpolate(x, scale_factor=2.0, mode="nearest")
