"""BatchNorms that keep what pretrained weights bring."""

from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from ddptrain.api import UserError


def freeze_norms(module: nn.Module, eps: float | None = None) -> None:
    """Replace all BatchNorms by ones that keep statistics, scales and shifts, in place. eps: None keeps each
    one's own."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, FrozenBatchNorm2d(child.num_features, child.eps if eps is None else eps))
        else:
            freeze_norms(child, eps)


def check_norms(module: nn.Module) -> None:
    """Raise UserError where all frozen norms are new, so that they would let everything through as it is."""
    norms = [child for child in module.modules() if isinstance(child, FrozenBatchNorm2d)]
    if norms and not any(bool(norm.running_mean.any()) for norm in norms):
        raise UserError(
            "model.frozen_norm=true: the norms have no statistics to keep, as the weights are random."
            " Name trained ones (init.weights=default), or set it to false."
        )
