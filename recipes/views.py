"""Test-time augmentation: a picture is looked at several times, and the answers are averaged."""

import logging
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.api import UserError

log = logging.getLogger("ddptrain")


@final
class Views(nn.Module):
    """A classifier that averages its logits over views of each picture; for evaluation.

    level: 0, the picture alone; 1, with its mirror image; 2, these two also moved by one pixel up and to the
    left, and down and to the right, together weighing as much as the unmoved ones. Six passes, as the
    records on CIFAR-10 are evaluated (github.com/KellerJordan/cifar10-airbench, arXiv 2404.00498).
    """

    def __init__(self, model: nn.Module, level: int) -> None:
        super().__init__()
        self._model = model
        self._level = level

    def forward(self, images: Tensor) -> Tensor:
        """(n, C, H, W) -> (n, classes)."""
        if self._level < 2:
            return self._faced(images)
        height, width = images.shape[2:]
        around = functional.pad(images, (1, 1, 1, 1), mode="reflect")
        # in the images' own memory layout: for another one the model would be compiled once more
        corners = [around[:, :, at : at + height, at : at + width] for at in (0, 2)]
        moved = [self._faced(torch.empty_like(images).copy_(corner)) for corner in corners]
        return self._faced(images) / 2 + (moved[0] + moved[1]) / 4

    def _faced(self, images: Tensor) -> Tensor:
        logits: Tensor = self._model(images)
        if self._level == 0:
            return logits
        # halved before the next pass: under CUDA graphs (compile=max-autotune) that overwrites what this gave
        half = logits / 2
        mirrored: Tensor = self._model(images.flip(-1))
        return half + mirrored / 2


def note_one_view(level: int) -> None:
    """Log that an exported file looks at a picture once, where evaluation does not."""
    if level:
        log.warning(
            "note       task.tta=%d: evaluate averages %d views of a picture, and the file takes one; its own"
            " metrics are those of: evaluate run=... task.tta=0",
            *(level, (1, 2, 6)[level]),
        )


def check_level(level: int) -> None:
    """Raise UserError where there is no such level."""
    if not 0 <= level <= 2:
        raise UserError(f"task.tta={level}: must be 0 (off), 1 (mirror) or 2 (mirror and shift).")
