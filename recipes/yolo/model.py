"""The network: a backbone in five stages, a path-aggregating neck, a decoupled head on three strides."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from ddptrain.api import UserError
from ddptrain.recipes.yolo.blocks import ConvBlock, CspBlock, PyramidPooling, doubled
from ddptrain.recipes.yolo.selector import Selector

STRIDES = (8, 16, 32)
"""Pixels from cell to cell on the three maps."""
_SIZES = {"n": (0.25, 1), "s": (0.5, 1), "m": (0.75, 2)}
"""Share of the full width; bottlenecks in a block (twice as many in the backbone's middle)."""
_FULL_WIDTHS = (64, 128, 256, 512, 1024)
_PRIOR = 0.01
"""Score that a fresh head gives every class, so that the many empty cells don't drown the first steps
(Lin et al., arXiv 1708.02002, section 4.1)."""


class Raw(NamedTuple):
    """What the network says of each of the ``a`` anchors, finest map first, row by row."""

    distances: Tensor
    """(n, a, 4, bins) logits: how far the left, top, right and bottom sides lie, in strides."""
    classes: Tensor
    """(n, a, classes) logits."""
    points: Tensor
    """float32 (a, 2): x and y of each anchor, the middle of its cell, in pixels."""
    strides: Tensor
    """float32 (a,): pixels."""


class Dual(NamedTuple):
    """The outputs of two heads."""

    one_to_many: Raw | None
    """Several anchors find an object; None in evaluation."""
    one_to_one: Raw
    """One anchor finds an object, so that there are no doubles: the same boxes, without a gradient, and
    classes of its own."""


def evaluated(outputs: Raw | Dual) -> Raw:
    """The head's that is asked in an evaluation."""
    return outputs.one_to_one if isinstance(outputs, Dual) else outputs


@final
class Yolo(nn.Module):
    """An anchor-free one-stage detector.

    size: n, s or m, in width and depth. bins: how many distances, 0 to bins - 1 strides, the box regression
    weighs (see `ddptrain.recipes.yolo.boxes`). Strides 8, 16 and 32, joined top-down and bottom-up (Liu et
    al.: path aggregation, arXiv 1803.01534); boxes and classes by branches of their own (Ge et al.: YOLOX,
    arXiv 2107.08430). one_to_one: with a second head, that finds an object once (`Selector`). head: whose
    outputs an evaluation gets; ``auto`` takes the second one's, if there is one.
    """

    def __init__(
        self,
        num_classes: int,
        size: Literal["n", "s", "m"] = "n",
        bins: int = 16,
        one_to_one: bool = False,
        head: Literal["auto", "one_to_many"] = "auto",
    ) -> None:
        super().__init__()
        if bins < 2:
            raise UserError(f"model.bins={bins}: must be 2 or more.")
        share, depth = _SIZES[size]
        one, two, three, four, five = (round(share * width) for width in _FULL_WIDTHS)
        self.stem = nn.Sequential(ConvBlock(3, one, 3, 2), ConvBlock(one, two, 3, 2))
        self.to_8 = nn.Sequential(CspBlock(two, two, depth, True), ConvBlock(two, three, 3, 2))
        self.to_16 = nn.Sequential(CspBlock(three, three, 2 * depth, True), ConvBlock(three, four, 3, 2))
        self.to_32 = nn.Sequential(CspBlock(four, four, 2 * depth, True), ConvBlock(four, five, 3, 2))
        self.top = nn.Sequential(CspBlock(five, five, depth, True), PyramidPooling(five))
        self.down_16 = CspBlock(five + four, four, depth, False)
        self.down_8 = CspBlock(four + three, three, depth, False)
        self.shrink_8 = ConvBlock(three, three, 3, 2)
        self.up_16 = CspBlock(three + four, four, depth, False)
        self.shrink_16 = ConvBlock(four, four, 3, 2)
        self.up_32 = CspBlock(four + five, five, depth, False)
        widths = (three, four, five)
        box_width = max(16, three // 4, 4 * bins)
        self.heads = nn.ModuleList(_Head(channels, num_classes, bins, box_width) for channels in widths)
        self.selector = Selector(widths, num_classes) if one_to_one else None
        self._bins = bins
        self.widest = 2 * (bins - 1) * STRIDES[-1]
        """Pixels of the longest side that a box can have."""
        self._head = head

    def forward(self, images: Tensor) -> Raw | Dual:
        """images: float (n, 3, H, W) in [0, 1]; H and W are multiples of 32. `Dual` where there are two
        heads, but for an evaluation of the first."""
        at_8 = self.to_8(self.stem(images))
        at_16 = self.to_16(at_8)
        at_32 = self.top(self.to_32(at_16))
        at_16 = self.down_16(torch.cat([doubled(at_32), at_16], dim=1))
        at_8 = self.down_8(torch.cat([doubled(at_16), at_8], dim=1))
        at_16 = self.up_16(torch.cat([self.shrink_8(at_8), at_16], dim=1))
        at_32 = self.up_32(torch.cat([self.shrink_16(at_16), at_32], dim=1))
        maps = (at_8, at_16, at_32)
        distances, classes = zip(*(head(x) for head, x in zip(self.heads, maps, strict=True)), strict=True)
        grid = anchors(images.shape[-2], images.shape[-1], images.device)
        many = Raw(_rows(distances).unflatten(2, (4, self._bins)), _rows(classes), *grid)
        if self.selector is None or (self._head == "one_to_many" and not self.training):
            return many
        one = Raw(many.distances.detach(), _rows(self.selector(maps, classes)), *grid)
        return Dual(many if self.training else None, one)


def _rows(maps: Iterable[Tensor]) -> Tensor:
    """(n, channels, h, w) of each map -> (n, a, channels)"""
    return torch.cat([x.flatten(2).transpose(1, 2) for x in maps], dim=1)


@final
class _Head(nn.Module):
    """Boxes and classes of one map."""

    def __init__(self, channels: int, num_classes: int, bins: int, box_width: int) -> None:
        super().__init__()
        self.box = nn.Sequential(
            ConvBlock(channels, box_width, 3),
            ConvBlock(box_width, box_width, 3),
            nn.Conv2d(box_width, 4 * bins, 1),
        )
        # each class map sees all channels in 1x1s and its surroundings in depthwise 3x3s: a third of the cost
        self.classes = nn.Sequential(
            ConvBlock(channels, channels, 3, groups=channels),
            ConvBlock(channels, channels),
            ConvBlock(channels, channels, 3, groups=channels),
            ConvBlock(channels, channels),
            nn.Conv2d(channels, num_classes, 1),
        )
        nn.init.constant_(self.classes[-1].bias, math.log(_PRIOR / (1 - _PRIOR)))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.box(x), self.classes(x)


def anchors(
    height: int, width: int, device: torch.device, strides: Sequence[int] = STRIDES
) -> tuple[Tensor, Tensor]:
    """float32 (a, 2) middles of all cells as x, y in pixels, and float32 (a,) strides, finest map first."""
    points, sizes = [], []
    for stride in strides:
        rows, columns = (
            torch.arange(stride / 2, side, stride, device=device, dtype=torch.float32)
            for side in (height, width)
        )
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        points.append(torch.stack([x, y], dim=-1).view(-1, 2))
        sizes.append(torch.full((len(points[-1]),), float(stride), device=device))
    return torch.cat(points), torch.cat(sizes)
