"""A picture of any size in a square: scaled until its longer side fits, grey bars around it."""

from typing import NamedTuple

import torch
from torch import Tensor

GREY = 114
"""Of the bars, in 0..255, the usual value in YOLO's family."""


class Letterbox(NamedTuple):
    """Where pictures lie in their squares; a scalar or a tensor (n,) each."""

    scale_x: Tensor
    scale_y: Tensor
    left: Tensor
    """Pixels of the square before the picture begins."""
    top: Tensor

    def of(self, i: int) -> "Letterbox":
        """The i-th picture's."""
        return Letterbox(*(each[i] for each in self))

    def there(self, boxes: Tensor) -> Tensor:
        """(n, k, 4) x1, y1, x2, y2 in pixels of the pictures -> in pixels of the squares."""
        return boxes * self._scale + self._corner

    def back(self, boxes: Tensor) -> Tensor:
        """(n, k, 4) in pixels of the squares -> in pixels of the pictures; not clipped to them."""
        return (boxes - self._corner) / self._scale

    @property
    def _scale(self) -> Tensor:
        return torch.stack([self.scale_x, self.scale_y] * 2, dim=-1).unsqueeze(-2)

    @property
    def _corner(self) -> Tensor:
        return torch.stack([self.left, self.top] * 2, dim=-1).unsqueeze(-2)


def fitted(sizes: Tensor, side: int) -> Tensor:
    """int64 (..., 2) heights and widths -> the same, scaled so that the longer side is ``side``; no side
    falls below one pixel."""
    scale = side / sizes.amax(-1, keepdim=True).double()
    return (sizes * scale).round().long().clamp(1, side)


def letterbox(sizes: Tensor, side: int) -> Letterbox:
    """int64 (n, 2) heights and widths of pictures -> where they lie in squares of ``side`` pixels.

    The scales are those of the rounded sizes, so that there and back is exact.
    """
    inner = fitted(sizes, side)
    scale = inner / sizes.double()
    corner = (side - inner) // 2
    return Letterbox(scale[:, 1].float(), scale[:, 0].float(), corner[:, 1].float(), corner[:, 0].float())
