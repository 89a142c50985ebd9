"""A picture of any size on a canvas, a square or a rectangle: scaled until its longer side fits, grey bars
around it."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

GREY = 114
"""Of the bars, in 0..255, the usual value in YOLO's family."""
COARSEST = 32
"""Pixels of the coarsest stride, of which both sides are multiples."""

Shape = Literal["square", "common", "own"]
"""Of canvases: a square, the smallest rectangle that holds all pictures, or the smallest for each."""


class Letterbox(NamedTuple):
    """Where a picture lies on its canvas, or n of them on theirs; float32 (..., 2) each, x before y."""

    scale: Tensor
    """Pixels of the canvas for one of the picture."""
    corner: Tensor
    """Pixels of the canvas before the picture begins."""

    def of(self, i: int | Tensor) -> "Letterbox":
        """The i-th picture's, or those of several."""
        return Letterbox(self.scale[i], self.corner[i])

    def there(self, boxes: Tensor) -> Tensor:
        """(n, k, 4) x1, y1, x2, y2 in pixels of the pictures -> in pixels of the canvases."""
        return boxes * _twice(self.scale) + _twice(self.corner)

    def back(self, boxes: Tensor) -> Tensor:
        """(n, k, 4) in pixels of the canvases -> in pixels of the pictures; not clipped to them."""
        return (boxes - _twice(self.corner)) / _twice(self.scale)


def _twice(of: Tensor) -> Tensor:
    """(..., 2) -> (..., 1, 4), for both corners of a box."""
    return torch.cat([of, of], dim=-1).unsqueeze(-2)


def in_canvas(pixels: Tensor, placed: Letterbox, canvas: Tensor) -> Tensor:
    """uint8 (3, h, w), scaled already, -> (3, H, W), where one picture lies. canvas: int64 (2,), H and W."""
    left, top = placed.corner.long().tolist()
    filled = torch.full((3, *canvas.tolist()), GREY, dtype=torch.uint8)
    filled[:, top : top + pixels.shape[1], left : left + pixels.shape[2]] = pixels
    return filled


def fitted(sizes: Tensor, size: int) -> Tensor:
    """int64 (..., 2) heights and widths -> the same, scaled so that the longer side is ``size``; no side
    falls below one pixel."""
    scale = size / sizes.amax(-1, keepdim=True).double()
    return (sizes * scale).round().long().clamp(1, size)


def canvases(sizes: Tensor, size: int, shape: Shape) -> Tensor:
    """int64 (n, 2) heights and widths of pictures -> those of their canvases, multiples of 32, where the
    pictures' longer sides are ``size`` pixels."""
    if shape == "square":
        return sizes.new_full((1, 2), size).expand_as(sizes)
    inner = fitted(sizes, size)
    if shape == "common":
        inner = inner.amax(0, keepdim=True)
    return (-(-inner // COARSEST) * COARSEST).expand_as(sizes)


def letterbox(sizes: Tensor, size: int, canvas: Tensor | None = None) -> Letterbox:
    """int64 (n, 2) heights and widths of pictures -> where they lie on their canvases.

    size: of the longer side, in pixels. canvas: int64 (n, 2), as `canvases` gives them; squares, if None. The
    scales are those of the rounded sizes, so that there and back is exact.
    """
    inner = fitted(sizes, size)
    scale = inner / sizes.double()
    corner = ((size if canvas is None else canvas) - inner) // 2
    return Letterbox(scale.flip(1).float(), corner.flip(1).float())
