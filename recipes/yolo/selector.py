"""A head that leaves one of the anchors that see an object, so that there are no duplicates to suppress.

It adds a learnt logit to each class logit of a detector's own head (Zhou et al.: positive sample selector,
arXiv 2101.11782). Besides the features it sees whether a cell is surer than those around it, on its own map
and on the maps beside (Wang et al.: 3D max filtering, arXiv 2012.03544): 0.658 mAP without suppression, and
0.632 by features alone (`yolo_shapes`, 15 epochs).

No gradient leaves it: the rest of the network learns what it learns without, as far as no clipping looks at
the gradients of both.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.recipes.yolo.blocks import ConvBlock, doubled

_LEFT_OUT = -2.0
"""Logit that a fresh head adds: most anchors that see an object are to be left out."""
_FAR = 8.0
"""A logit further from its surroundings says no more than one so far."""


@final
class Selector(nn.Module):
    """widths: channels of the maps, each of half the side of the one before."""

    def __init__(self, widths: Sequence[int], num_classes: int) -> None:
        super().__init__()
        last = len(widths) - 1  # the first and the last have one map beside them: see `surroundings`
        self.maps = nn.ModuleList(
            _MapSelector(channels, num_classes, (3 + (i > 0) + (i < last)) * num_classes)
            for i, channels in enumerate(widths)
        )

    def forward(self, maps: Sequence[Tensor], logits: Sequence[Tensor]) -> list[Tensor]:
        """maps: (n, channels, h, w) features. logits: (n, classes, h, w) of the same cells. Returns logits of
        those that stay."""
        maps, logits = [x.detach() for x in maps], [x.detach() for x in logits]
        return [
            own + select(features, surroundings(logits, i))
            for i, (select, features, own) in enumerate(zip(self.maps, maps, logits, strict=True))
        ]


@final
class _MapSelector(nn.Module):
    def __init__(self, channels: int, num_classes: int, around: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            ConvBlock(channels, channels, 3, groups=channels), ConvBlock(channels, channels)
        )
        self.select = nn.Sequential(
            ConvBlock(channels + around, channels),
            ConvBlock(channels, channels, 3, groups=channels),
            ConvBlock(channels, channels),
            nn.Conv2d(channels, num_classes, 1),
        )
        nn.init.constant_(self.select[-1].bias, _LEFT_OUT)  # type: ignore[arg-type]

    def forward(self, features: Tensor, around: Tensor) -> Tensor:
        added: Tensor = self.select(torch.cat([self.features(features), around], dim=1))
        return added


def surroundings(logits: Sequence[Tensor], i: int) -> Tensor:
    """Of map i each cell's scores, and how far its logits lie above the highest around it: within one cell,
    within two, and on the finer and the coarser map, where there is one.

    logits: (n, classes, h, w) of each map, finest first -> (n, 3 to 5 times classes, h, w)
    """
    own = logits[i]
    highest = [functional.max_pool2d(own, 3, 1, 1), functional.max_pool2d(own, 5, 1, 2)]
    if i > 0:
        highest.append(functional.max_pool2d(logits[i - 1], 4, 2, 1))
    if i + 1 < len(logits):
        highest.append(doubled(functional.max_pool2d(logits[i + 1], 3, 1, 1)))
    return torch.cat([own.sigmoid(), *((own - other).clamp(-_FAR, _FAR) for other in highest)], dim=1)
