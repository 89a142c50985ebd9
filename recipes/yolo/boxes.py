"""Boxes from distances and back, and what a network's answer comes to as boxes, scores and classes."""

import math
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.recipes.detection.detections import Detections, suppressed
from ddptrain.recipes.yolo.model import Raw, evaluated

_EPS = 1e-7
"""Added to what is divided by."""


def expected_distances(logits: Tensor) -> Tensor:
    """(..., bins) logits -> (...): the mean of their distribution over 0 to bins - 1 (Li et al.: generalized
    focal loss, arXiv 2006.04388, equation 5)."""
    bins = torch.arange(logits.shape[-1], device=logits.device, dtype=logits.dtype)
    return (logits.softmax(-1) * bins).sum(-1)  # no matrix product: autocast would round it to bf16


def distance_loss(logits: Tensor, distances: Tensor) -> Tensor:
    """Distribution focal loss (arXiv 2006.04388, equation 6): (..., bins) logits and (...) true distances
    -> (...).

    The two bins beside a distance share its cross-entropy by how near they are; distances are clipped to
    [0, bins - 1].
    """
    last = logits.shape[-1] - 1
    distances = distances.clamp(0, last)
    below = distances.floor().clamp(max=last - 1)
    share_above = distances - below
    log_shares = logits.log_softmax(-1)
    index = below.long()
    lower, upper = log_shares.gather(-1, torch.stack([index, index + 1], dim=-1)).unbind(-1)
    return -torch.lerp(lower, upper, share_above)


def boxes_at(points: Tensor, distances: Tensor) -> Tensor:
    """(a, 2) points and (..., a, 4) distances to the left, top, right and bottom sides, in pixels
    -> (..., a, 4) x1, y1, x2, y2."""
    return torch.cat([points - distances[..., :2], points + distances[..., 2:]], dim=-1)


def distances_from(points: Tensor, boxes: Tensor) -> Tensor:
    """The inverse of `boxes_at`; negative where a point lies outside."""
    return torch.cat([points - boxes[..., :2], boxes[..., 2:] - points], dim=-1)


def complete_iou_loss(predicted: Tensor, true: Tensor) -> Tensor:
    """1 - complete IoU (Zheng et al., arXiv 1911.08287, equations 6 to 11) of boxes given by their distances
    (..., 4) from a common point, as in `boxes_at` -> (...).

    No gradient flows through the weight of the aspect ratio's term. A box without width and height may have a
    NaN as its gradient. torchvision's picks out the boxes that overlap by a mask, for which the host waits.
    """
    sides, true_sides = _sides(predicted), _sides(true)
    shared = _area(_sides(torch.minimum(predicted, true)).relu())
    iou = shared / (_area(sides) + _area(true_sides) - shared + _EPS)
    before, after = (predicted - true).chunk(2, dim=-1)
    apart = ((after - before) / 2).square().sum(-1)
    around = _sides(torch.maximum(predicted, true)).square().sum(-1) + _EPS
    turn = torch.atan2(*true_sides.unbind(-1)) - torch.atan2(*sides.unbind(-1))
    aspect = 4 / math.pi**2 * turn.square()
    missed = 1 - iou
    with torch.no_grad():
        weight = aspect / (missed + aspect + _EPS)
    return missed + apart / around + weight * aspect


def _sides(distances: Tensor) -> Tensor:
    """(..., 4) -> (..., 2) width and height."""
    before, after = distances.chunk(2, dim=-1)
    return before + after


def _area(sides: Tensor) -> Tensor:
    width, height = sides.unbind(-1)
    return width * height  # the backward of prod would wait for the device


def decoded(raw: Raw) -> Tensor:
    """float32 (n, a, 4): the boxes that a network sees, in pixels."""
    return boxes_at(raw.points, expected_distances(raw.distances.float()) * raw.strides[:, None])


def detections(raw: Raw, least_score: float, overlap: float, most: int) -> list[Detections]:
    """What the network finds on each picture of a batch.

    overlap: IoU in [0, 1] above which the less sure of two boxes of one class is a double. most: per picture.
    """
    return suppressed(decoded(raw), raw.classes.float().sigmoid(), least_score, overlap, most)


def class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of each anchor and class with soft targets in [0, 1], added up."""
    return functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")


@final
class Dense(nn.Module):
    """Every anchor's box and scores, as `ddptrain.recipes.detection.deploy` takes them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        raw = evaluated(self.model(images))
        return decoded(raw), raw.classes.float().sigmoid()
