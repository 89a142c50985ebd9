"""Boxes from distances and back, and what a network's answer comes to as boxes, scores and classes."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.ops import batched_nms

from ddptrain.recipes.yolo.model import Raw

_CANDIDATES = 1000
"""Best answers of a picture that go into the suppression of doubles."""


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
    index = below.long().unsqueeze(-1)
    lower, upper = log_shares.gather(-1, index).squeeze(-1), log_shares.gather(-1, index + 1).squeeze(-1)
    return -(1 - share_above) * lower - share_above * upper


def boxes_at(points: Tensor, distances: Tensor) -> Tensor:
    """(a, 2) points and (..., a, 4) distances to the left, top, right and bottom sides, in pixels
    -> (..., a, 4) x1, y1, x2, y2."""
    return torch.cat([points - distances[..., :2], points + distances[..., 2:]], dim=-1)


def distances_from(points: Tensor, boxes: Tensor) -> Tensor:
    """The inverse of `boxes_at`; negative where a point lies outside."""
    return torch.cat([points - boxes[..., :2], boxes[..., 2:] - points], dim=-1)


def decoded(raw: Raw) -> Tensor:
    """float32 (n, a, 4): the boxes that a network sees, in pixels."""
    return boxes_at(raw.points, expected_distances(raw.distances.float()) * raw.strides[:, None])


class Detections(NamedTuple):
    """What is found on one picture, the surest first."""

    boxes: Tensor
    """float32 (d, 4) x1, y1, x2, y2 in pixels."""
    scores: Tensor
    """float32 (d,) in [0, 1]"""
    labels: Tensor
    """int64 (d,)"""


def candidates(boxes: Tensor, scores: Tensor) -> Detections:
    """The best 1000 pairs of anchor and class of each picture.

    boxes: (n, a, 4). scores: (n, a, classes). Returns (n, c, ...) tensors.
    """
    classes = scores.shape[-1]
    best, index = scores.flatten(1).topk(min(_CANDIDATES, scores[0].numel()))
    anchor = torch.div(index, classes, rounding_mode="floor")
    chosen = boxes.gather(1, anchor[..., None].expand(-1, -1, 4))
    return Detections(chosen, best, index - anchor * classes)


def detections(raw: Raw, least_score: float, overlap: float, most: int) -> list[Detections]:
    """What the network finds on each picture of a batch.

    overlap: IoU in [0, 1] above which the less sure of two boxes of one class is a double. most: per picture.
    """
    found = candidates(decoded(raw), raw.classes.float().sigmoid())
    pictures = []
    for boxes, scores, labels in zip(*found, strict=True):
        sure = scores >= least_score
        boxes, scores, labels = boxes[sure], scores[sure], labels[sure]
        kept = without_doubles(boxes, scores, labels, overlap)[:most]
        pictures.append(Detections(boxes[kept], scores[kept], labels[kept]))
    return pictures


def without_doubles(boxes: Tensor, scores: Tensor, labels: Tensor, overlap: float) -> Tensor:
    """int64 (kept,): which of (d, 4) boxes stay, the surest first; see `detections`."""
    if len(boxes) == 0:
        return labels
    # torchvision keeps classes apart by moving their boxes, which is right from coordinate 0 on only
    kept: Tensor = batched_nms(boxes - boxes.min(), scores, labels, overlap)
    return kept


def class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of each anchor and class with soft targets in [0, 1], added up."""
    return functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
