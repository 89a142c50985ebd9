"""The boxes that a detector finds, and which of them are doubles."""

from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import nms

CANDIDATES = 1000
"""Best answers of a picture that go into the suppression of doubles."""
SURE_CANDIDATES = 10_000
"""Of a prediction, whose answers have to be sure, so that hundreds of objects with ten answers each keep
theirs."""
LEAST_SCORE = 0.001
"""Of detections that COCO's metrics count."""
MOST = 100
"""Detections of a picture that COCO's metrics count."""


class Detections(NamedTuple):
    """What is found on one picture, the surest first."""

    boxes: Tensor
    """float32 (d, 4) x1, y1, x2, y2 in pixels."""
    scores: Tensor
    """float32 (d,) in [0, 1]"""
    labels: Tensor
    """int64 (d,)"""
    masks: Tensor | None = None
    """float32 (d, 28, 28) in [0, 1]: how surely each cell of a grid over its box is the object's; None of a
    detector that learns no masks."""

    def where(self, kept: Tensor | slice) -> "Detections":
        """Some of them."""
        masks = None if self.masks is None else self.masks[kept]
        return Detections(self.boxes[kept], self.scores[kept], self.labels[kept], masks)


def candidates(boxes: Tensor, scores: Tensor, most: int = CANDIDATES) -> Detections:
    """The best pairs of anchor and class of each picture, at most so many.

    boxes: (n, a, 4), or (n, a, classes, 4) where each class has its own. scores: (n, a, classes). Returns
    (n, c, ...) tensors.
    """
    classes = scores.shape[-1]
    best, index = scores.flatten(1).topk(min(most, scores[0].numel()))
    anchor = torch.div(index, classes, rounding_mode="floor")
    place = anchor if boxes.ndim == 3 else index
    chosen = boxes.flatten(1, -2).gather(1, place[..., None].expand(-1, -1, 4))
    return Detections(chosen, best, index - anchor * classes)


def without_doubles(boxes: Tensor, scores: Tensor, labels: Tensor, overlap: float) -> Tensor:
    """int64 (kept,): which of (d, 4) boxes stay, the surest first. overlap: IoU in [0, 1] above which the
    less sure of two boxes of one class is a double."""
    if len(boxes) == 0:
        return labels
    if overlap == 1:  # nothing overlaps by more, and an exported file needs no NMS operator
        return scores.topk(len(scores)).indices
    # classes are kept apart by moving their boxes; torchvision's batched_nms does it from coordinate 0 on
    # only, and waits for a number that it copies to the device
    boxes = boxes - boxes.min()
    kept: Tensor = nms(boxes + labels[:, None] * (boxes.max() + 1), scores, overlap)
    return kept


def suppressed(
    boxes: Tensor, scores: Tensor, least_score: float, overlap: float, most: int
) -> list[Detections]:
    """Each picture's answers without doubles. boxes, scores: as `candidates` has them. most: per picture."""
    best = candidates(boxes, scores, CANDIDATES if least_score <= LEAST_SCORE else SURE_CANDIDATES)
    counts = (best.scores >= least_score).sum(1).tolist()  # a sync point; one more a picture in nms
    pictures = []
    for count, *of in zip(counts, best.boxes, best.scores, best.labels, strict=True):
        own_boxes, own_scores, labels = (each[:count] for each in of)  # the surest come first
        kept = without_doubles(own_boxes, own_scores, labels, overlap)[:most]
        pictures.append(Detections(own_boxes[kept], own_scores[kept], labels[kept]))
    return pictures


def chosen(boxes: Tensor, scores: Tensor, labels: Tensor, overlap: float, most: int) -> tuple[Tensor, Tensor]:
    """Scores and indices of the surest of (d, 4) boxes without doubles, of a number that does not depend on
    what is seen, as a file needs it: min(most, d). Scores are 0 below the last."""
    kept = without_doubles(boxes, scores, labels, overlap)
    marks = torch.zeros_like(scores).scatter(0, kept, torch.ones_like(kept, dtype=scores.dtype))
    best, index = (scores * marks).topk(min(most, len(scores)))
    return best, index
