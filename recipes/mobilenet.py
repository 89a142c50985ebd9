"""MobileNetV3-small (Howard et al., Searching for MobileNetV3, arXiv 1905.02244), from torchvision."""

from pickle import UnpicklingError
from typing import Any, cast

from torch import nn
from torchvision.models import get_model_weights, mobilenet_v3_large, mobilenet_v3_small

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


def mobilenet_v3(
    num_classes: int, in_channels: int, size: str = "small", weights: str | None = None, dropout: float = 0.2
) -> nn.Module:
    """torchvision's stock MobileNetV3: logits (n, num_classes) for (n, 3, H, W), H and W about 224.

    size: small or large. weights: ``DEFAULT`` starts from torchvision's ImageNet weights (downloaded
    to torch's hub folder), with a new last layer; null starts from scratch.
    """
    _three(in_channels)
    makers: dict[str, Any] = {"small": mobilenet_v3_small, "large": mobilenet_v3_large}
    if size not in makers:
        raise UserError(f"model.size={size}: must be small or large.")
    if weights is None:
        return cast(nn.Module, makers[size](num_classes=num_classes, dropout=dropout))
    model = makers[size](dropout=dropout)
    try:
        chosen = get_model_weights(makers[size])[weights]
        # torchvision's own way loads without weights_only, and so runs what the file says
        model.load_state_dict(chosen.get_state_dict(progress=False, check_hash=True, weights_only=True))
    except KeyError as error:
        raise UserError(f"model.weights={weights}: torchvision has no such weights; try DEFAULT.") from error
    except (OSError, RuntimeError, UnpicklingError) as error:  # not there; another hash; no weights
        raise UserError(
            f"model.weights={weights}: can't be had ({error}). Use model.weights=null to start"
            " from scratch, or put the file into torch's hub folder (TORCH_HOME)."
        ) from error
    last = model.classifier[-1]
    assert isinstance(last, nn.Linear)
    model.classifier[-1] = nn.Linear(last.in_features, num_classes)
    return cast(nn.Module, model)


def _three(in_channels: int) -> None:
    if in_channels != 3:
        raise UserError(
            f"model: MobileNetV3 takes colour images, but the data has {in_channels} channel(s)."
            " Use model=cnn, or data with three channels."
        )
