"""What a detector does wrong: which objects it confuses or misses, and on which pictures."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import box_area, box_iou

from ddptrain.api import ConfusionMatrix, Curves
from ddptrain.data.detection.source import Objects, Scenes

SCORE, OVERLAP = 0.25, 0.5
"""The least score of a detection, and the least IoU with an object that it is taken for."""
BACKGROUND = "background"
_SIZES = 10
"""Groups of equally many objects."""


class Matched(NamedTuple):
    """The detections of one picture and its objects, crowds left out."""

    picture: int
    pairs: Sequence[tuple[int, int]]
    """Labels of an object and of the detection that lies on it."""
    missed: Sequence[int]
    """Labels of objects on which no detection lies."""
    spurious: Sequence[int]
    """Labels of detections that lie on no object."""
    sizes: Tensor
    """float32 (objects,): the root of each box's share of the picture."""
    found: Tensor
    """bool (objects,): whether a detection of its class lies on it."""

    @property
    def mistakes(self) -> int:
        return len(self.missed) + len(self.spurious) + sum(true != seen for true, seen in self.pairs)


def matched(scenes: Scenes, rows: Tensor) -> Iterator[Matched]:
    """Each picture's detections of SCORE or more and objects, in pairs from the largest IoU down.

    rows: float32 (d, 7), rows of picture, x1, y1, x2, y2 (in pixels of the picture), score, label.
    """
    sure = rows[rows[:, 5] >= SCORE]
    sure = sure[sure[:, 0].argsort(stable=True)]
    counts = torch.bincount(sure[:, 0].long(), minlength=len(scenes)).tolist()
    for i, own in enumerate(sure.split(counts)):
        yield _matched(i, scenes.objects[i], own, scenes.sizes[i])


def _matched(picture: int, on_it: Objects, rows: Tensor, size: Tensor) -> Matched:
    boxes, labels = on_it.boxes[~on_it.crowd], on_it.labels[~on_it.crowd].tolist()
    seen, seen_labels = rows[:, 1:5], rows[:, 6].long().tolist()
    overlaps = box_iou(boxes, seen)
    close = (overlaps >= OVERLAP).nonzero().tolist()
    partner: dict[int, int] = {}
    for a, b in sorted(close, key=lambda pair: -float(overlaps[pair[0], pair[1]])):
        if a not in partner and b not in partner.values():
            partner[a] = b
    spurious = set(range(len(seen))) - set(partner.values()) - _in_crowds(seen, on_it.boxes[on_it.crowd])
    right = [a in partner and labels[a] == seen_labels[partner[a]] for a in range(len(labels))]
    return Matched(
        picture,
        [(labels[a], seen_labels[b]) for a, b in partner.items()],
        [label for a, label in enumerate(labels) if a not in partner],
        [seen_labels[b] for b in sorted(spurious)],
        (box_area(boxes) / size.prod()).sqrt(),
        torch.tensor(right, dtype=torch.bool),
    )


def _in_crowds(seen: Tensor, crowds: Tensor) -> set[int]:
    """Which boxes lie in a crowd for the larger part: they count neither for nor against."""
    if not len(seen) or not len(crowds):
        return set()
    corners = torch.maximum(seen[:, None, :2], crowds[:, :2]), torch.minimum(seen[:, None, 2:], crowds[:, 2:])
    shared = (corners[1] - corners[0]).clamp(min=0).prod(2).amax(1)
    return set((shared > box_area(seen) / 2).nonzero()[:, 0].tolist())


def confusion(pictures: Sequence[Matched], classes: Sequence[str]) -> ConfusionMatrix:
    """Objects by class, and what they were taken for. The last column are objects that were missed, the last
    row detections where there is none."""
    counts = [[0] * (len(classes) + 1) for _ in range(len(classes) + 1)]
    for one in pictures:
        cells = [*one.pairs, *((label, -1) for label in one.missed), *((-1, label) for label in one.spurious)]
        for true, seen in cells:
            counts[true][seen] += 1
    return ConfusionMatrix(counts, [*classes, BACKGROUND])


def by_size(pictures: Sequence[Matched]) -> Curves:
    """The share of objects that are found, in groups of equally many from the smallest up."""
    sizes = torch.cat([one.sizes for one in pictures])
    found = torch.cat([one.found for one in pictures])[sizes.argsort()].float()
    groups = zip(sizes.sort().values.chunk(_SIZES), found.chunk(_SIZES), strict=True)
    points = [(float(size.mean()), float(share.mean())) for size, share in groups if len(size)]
    return Curves({"found": points}, "size (root of the share of the picture)", "recall")


def worst(pictures: Sequence[Matched], most: int) -> list[int]:
    """Those with most mistakes, the worst first."""
    wrong = sorted((one for one in pictures if one.mistakes), key=lambda one: (-one.mistakes, one.picture))
    return [one.picture for one in wrong[:most]]


def against_score(precision: Tensor, recall: Tensor, scores: Tensor) -> Curves:
    """Precision, recall and F1 of detections that reach a score, the mean over classes.

    precision, scores: (recall's levels, classes) of an evaluator, at one IoU: the precision at each level,
    and the score that reaches it, 0 where none does. recall: (levels,).
    """
    steps = [step / 100 for step in range(1, 100)]
    lines: dict[str, list[tuple[float, float]]] = {"precision": [], "recall": [], "F1": []}
    for step in steps:
        reached = scores >= step
        at = reached.sum(0) - 1  # the last level that this score still reaches, of each class; -1: none
        there = at >= 0
        level = at.clamp(min=0)
        of_recall = there * recall[level]
        of_precision = there * precision.gather(0, level[None])[0]
        harmonic = 2 * of_precision * of_recall / (of_precision + of_recall).clamp(min=1e-9)
        lines["recall"].append((step, float(of_recall.mean())))
        lines["F1"].append((step, float(harmonic.mean())))
        if there.any():  # the precision of no detection is no number
            lines["precision"].append((step, float(of_precision[there].mean())))
    best = max(lines["F1"], key=lambda point: point[1])
    lines[f"F1 (best {best[1]:.2f} at {best[0]:.2f})"] = lines.pop("F1")
    return Curves(lines, "least score", "mean over classes, IoU 0.50")
