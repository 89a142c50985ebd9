"""The network of the CIFAR-10 speed records: small, whitened at the front, an identity at the start.

From Keller Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (arXiv 2404.00498) and its successors
airbench94_muon.py (github.com/KellerJordan/cifar10-airbench) and github.com/hiverge/cifar10-speedrun, which
descend from tysam-code/hlb-CIFAR10 and David Page's "How to Train Your ResNet". docs/speedrun.md names the
source of each idea.
"""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.api import UserError

_PATCH = 2
_EXAMPLES = 5000
_SMALLEST = 8 + _PATCH - 1
"""Pixels a side that the three poolings leave one of."""


@final
class SpeedrunNet(nn.Module):
    """Logits (n, num_classes) for normalised images (n, in_channels, H, W), 9x9 or larger.

    The first layer whitens patches of 2x2 pixels and is not trained but for its bias. examples: gives the
    first so many training images, by which it is made, or None where a checkpoint gives its weights. width:
    channels of the first group; the others have four times as many.

    Logits are a mean over features, not a sum, so the gradients of the head and of all biases shrink as the
    network widens: their rates are to be in proportion to the width.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        image_size: tuple[int, int],
        examples: Callable[[int], Tensor | None],
        width: int = 64,
    ) -> None:
        super().__init__()
        if width < 1:
            raise UserError(f"model.width={width}: must be 1 or more.")
        if min(image_size) < _SMALLEST:
            raise UserError(
                f"data: pictures of {image_size[0]}x{image_size[1]} are too small for model=speedrun, which"
                f" halves them three times: {_SMALLEST}x{_SMALLEST} or larger. Use model=cnn, or other data."
            )
        whitened = 2 * in_channels * _PATCH**2
        self.whiten = nn.Conv2d(in_channels, whitened, _PATCH)
        self.whiten.weight.requires_grad_(False)
        if (images := examples(_EXAMPLES)) is not None:
            with torch.no_grad():
                self.whiten.weight.copy_(whitening_filters(images))
        self.groups = nn.Sequential(
            _Group(whitened, width), _Group(width, 4 * width), _Group(4 * width, 4 * width)
        )
        self.head = nn.Linear(4 * width, num_classes, bias=False)
        with torch.no_grad():
            self.head.weight /= self.head.weight.std()

    def forward(self, images: Tensor) -> Tensor:
        x = self.groups(functional.gelu(self.whiten(images)))
        # not amax, whose compiled gradient in bf16 is no number (pytorch#186799)
        features = functional.max_pool2d(x, (x.shape[2], x.shape[3])).flatten(1)
        logits: Tensor = self.head(features) / features.shape[1]
        return logits


class _Group(nn.Module):
    """Two convolutions; the sides are halved between the first and its norm."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, out_channels)
        self.norm1 = _norm(out_channels)
        self.conv2 = _convolution(out_channels, out_channels)
        self.norm2 = _norm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.silu(self.norm1(functional.max_pool2d(self.conv1(x), 2)))
        return functional.silu(self.norm2(self.conv2(x)))


def _convolution(in_channels: int, out_channels: int) -> nn.Conv2d:
    """3x3; its first filters hand on their own channel (hlb-CIFAR10's identity initialisation), the rest are
    torch's random ones."""
    layer = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(layer.weight[:in_channels])
    return layer


def _norm(channels: int) -> nn.BatchNorm2d:
    """With a trained bias and a scale of 1 (Page: the scales learn nothing useful in so short a run). Its
    statistics forget fast, because the run is over after 243 batches; the record's numbers."""
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4434)
    layer.weight.requires_grad_(False)
    return layer


def whitening_filters(images: Tensor, eps: float = 5e-4) -> Tensor:
    """(n, C, H, W), normalised -> (8 * C, C, 2, 2): filters whose answers to the images' patches are
    uncorrelated and of unit mean square, and then the same filters negated.

    The eigenvectors of the patches' second moments, each divided by ``sqrt(eigenvalue + eps)`` (Page's
    patch whitening; both signs since hlb-CIFAR10, because an activation follows that lets one through). An
    eigenvector's sign is free: here its largest entry is positive, so that equal data give equal filters.
    """
    size = images.shape[1] * _PATCH**2
    moments, count = torch.zeros(size, size, device=images.device), 0
    for part in images.split(500):
        patches = functional.unfold(part, _PATCH).transpose(0, 1).flatten(1)
        moments += patches @ patches.T
        count += patches.shape[1]
    values, vectors = torch.linalg.eigh((moments / count).cpu().double())
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
    scaled = vectors * largest.sign() / (values.clamp(min=0) + eps).sqrt()
    filters = scaled.T.reshape(size, images.shape[1], _PATCH, _PATCH)
    return torch.cat([filters, -filters]).float()
