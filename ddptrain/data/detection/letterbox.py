"""A picture of any size in a square: scaled until its longer side fits, grey bars around it."""

from typing import NamedTuple

import torch
from torch import Tensor

GREY = 114
"""Of the bars, in 0..255, the usual value in YOLO's family."""


class Letterbox(NamedTuple):
    """Where a picture lies in its square, or n of them in theirs; float32 (..., 2) each, x before y."""

    scale: Tensor
    """Pixels of the square for one of the picture."""
    corner: Tensor
    """Pixels of the square before the picture begins."""

    def of(self, i: int | Tensor) -> "Letterbox":
        """The i-th picture's, or those of several."""
        return Letterbox(self.scale[i], self.corner[i])

    def there(self, boxes: Tensor) -> Tensor:
        """(n, k, 4) x1, y1, x2, y2 in pixels of the pictures -> in pixels of the squares."""
        return boxes * _twice(self.scale) + _twice(self.corner)

    def back(self, boxes: Tensor) -> Tensor:
        """(n, k, 4) in pixels of the squares -> in pixels of the pictures; not clipped to them."""
        return (boxes - _twice(self.corner)) / _twice(self.scale)


def _twice(of: Tensor) -> Tensor:
    """(..., 2) -> (..., 1, 4), for both corners of a box."""
    return torch.cat([of, of], dim=-1).unsqueeze(-2)


def in_square(pixels: Tensor, placed: Letterbox, size: int) -> Tensor:
    """uint8 (3, h, w), scaled already, -> (3, size, size), where one picture lies."""
    left, top = placed.corner.long().tolist()
    square = torch.full((3, size, size), GREY, dtype=torch.uint8)
    square[:, top : top + pixels.shape[1], left : left + pixels.shape[2]] = pixels
    return square


def fitted(sizes: Tensor, size: int) -> Tensor:
    """int64 (..., 2) heights and widths -> the same, scaled so that the longer side is ``size``; no side
    falls below one pixel."""
    scale = size / sizes.amax(-1, keepdim=True).double()
    return (sizes * scale).round().long().clamp(1, size)


def letterbox(sizes: Tensor, size: int) -> Letterbox:
    """int64 (n, 2) heights and widths of pictures -> where they lie in squares of ``size`` pixels.

    The scales are those of the rounded sizes, so that there and back is exact.
    """
    inner = fitted(sizes, size)
    scale = inner / sizes.double()
    corner = (size - inner) // 2
    return Letterbox(scale.flip(1).float(), corner.flip(1).float())
