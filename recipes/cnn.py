"""The small CNN of the PyTorch beginner's guides: two convolutions with pooling, two linear layers."""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.api import UserError


@final
class SmallCnn(nn.Module):
    """Logits (n, num_classes) for images (n, in_channels, H, W).

    width: channels of the first convolution; the second has twice as many. hidden: units between the
    two linear layers. image_size: (H, W), which fixes the first linear layer's width.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        image_size: tuple[int, int],
        width: int = 32,
        hidden: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value in (("width", width), ("hidden", hidden)):
            if value < 1:
                raise UserError(f"model.{name}={value}: must be 1 or more.")
        height, wide = image_size
        self.conv1 = nn.Conv2d(in_channels, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, kernel_size=3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.fc1 = nn.Linear(2 * width * (height // 4) * (wide // 4), hidden)
        self.fc2 = nn.Linear(hidden, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(self.dropout(torch.flatten(x, 1))))
        logits: Tensor = self.fc2(self.dropout(x))
        return logits
