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
    wrong: Tensor
    """bool (detections,): whether it lies on no object, or on one of another class."""

    @property
    def mistakes(self) -> int:
        return len(self.missed) + len(self.spurious) + sum(true != seen for true, seen in self.pairs)


def matched(scenes: Scenes, rows: Tensor) -> Iterator[Matched]:
    """Each picture's detections of SCORE or more and objects, in pairs from the largest IoU down.

    rows: float32 (d, 7), rows of picture, x1, y1, x2, y2 (in pixels of the picture), score, label.
    """
    for i, own in enumerate(_by_picture(rows[rows[:, 5] >= SCORE], len(scenes))):
        yield matched_on(scenes, i, own)


def _by_picture(rows: Tensor, count: int) -> Sequence[Tensor]:
    """Each picture's rows, in their order. count: of pictures."""
    counts = torch.bincount(rows[:, 0].long(), minlength=count).tolist()
    by_picture: Sequence[Tensor] = rows[rows[:, 0].argsort(stable=True)].split(counts)
    return by_picture


def matched_on(scenes: Scenes, picture: int, rows: Tensor) -> Matched:
    """All of these detections, which are of one picture, and its objects."""
    on_it = scenes.objects[picture]
    boxes, labels = on_it.boxes[~on_it.crowd], on_it.labels[~on_it.crowd].tolist()
    seen, seen_labels = rows[:, 1:5], rows[:, 6].long().tolist()
    overlaps = box_iou(boxes, seen)
    close = (overlaps >= OVERLAP).nonzero().tolist()
    partner: dict[int, int] = {}
    for a, b in sorted(close, key=lambda pair: -float(overlaps[pair[0], pair[1]])):
        if a not in partner and b not in partner.values():
            partner[a] = b
    on_none = set(range(len(seen))) - set(partner.values())
    spurious = on_none - set(_in_crowds(rows, on_it).nonzero()[:, 0].tolist())
    right = [a in partner and labels[a] == seen_labels[partner[a]] for a in range(len(labels))]
    confused = {b for a, b in partner.items() if not right[a]}
    return Matched(
        picture,
        [(labels[a], seen_labels[b]) for a, b in partner.items()],
        [label for a, label in enumerate(labels) if a not in partner],
        [seen_labels[b] for b in sorted(spurious)],
        (box_area(boxes) / scenes.sizes[picture].prod()).sqrt(),
        torch.tensor(right, dtype=torch.bool),
        torch.tensor([b in spurious | confused for b in range(len(seen))], dtype=torch.bool),
    )


def _in_crowds(rows: Tensor, on_it: Objects) -> Tensor:
    """bool (d,): which detections lie in a crowd of their class for half or more: they count neither for nor
    against."""
    alike = rows[:, 6].long()[:, None] == on_it.labels
    inside = _share_inside(rows[:, 1:5].double(), on_it.boxes.double()) >= OVERLAP
    return (alike & on_it.crowd & inside).any(1)


def _share_inside(seen: Tensor, boxes: Tensor) -> Tensor:
    """(seen, boxes): the share of each box's area that lies in each of the others."""
    corners = torch.maximum(seen[:, None, :2], boxes[:, :2]), torch.minimum(seen[:, None, 2:], boxes[:, 2:])
    shared = (corners[1] - corners[0]).clamp(min=0).prod(2)
    share: Tensor = shared / box_area(seen).clamp(min=1e-9)[:, None]
    return share


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


def against_score(scenes: Scenes, rows: Tensor) -> Curves:
    """Precision, recall and F1 of the detections that reach a score, the mean over the classes that pictures
    hold; matched as COCO does at an IoU of 0.5. Precision is what a user of that score gets, and not COCO's,
    which is the highest at this recall or a larger one.

    rows: as `matched` has them.
    """
    steps = torch.arange(1, 100) / 100
    objects = torch.cat([on_it.labels[~on_it.crowd] for on_it in scenes.objects])
    classes, totals = objects.unique(return_counts=True)
    scores, labels, right = _judged(scenes, rows[rows[:, 5] >= steps[0]])
    hits, counts = torch.zeros(2, len(classes), len(steps))
    for place, label in enumerate(classes):
        reached = scores[labels == label][:, None] >= steps
        hits[place], counts[place] = (reached & right[labels == label][:, None]).sum(0), reached.sum(0)
    means = {
        "precision": (hits / counts).nanmean(0),  # the precision of no detection is no number
        "recall": (hits / totals[:, None]).mean(0),
    }
    f1 = (2 * hits / (counts + totals[:, None])).mean(0)
    best = int(f1.argmax())
    means[f"F1 (best {float(f1[best]):.2f} at {float(steps[best]):.2f})"] = f1
    lines = {
        name: [(step / 100, float(value)) for step, value in enumerate(mean, 1) if not value.isnan()]
        for name, mean in means.items()
    }
    return Curves(lines, "least score", "mean over classes, IoU 0.50")


def _judged(scenes: Scenes, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, labels and whether they are right of all detections but those in crowds, by COCO's rule: each
    takes, the surest first, the object of its class with the largest IoU that none has taken before."""
    surest_first = rows[rows[:, 5].argsort(descending=True, stable=True)]
    judged = [(torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))]
    for on_it, own in zip(scenes.objects, _by_picture(surest_first, len(scenes)), strict=True):
        seen, boxes, labels = own[:, 1:5].double(), on_it.boxes.double(), own[:, 6].long()
        alike = labels[:, None] == on_it.labels
        overlaps = torch.where(alike & ~on_it.crowd, box_iou(seen, boxes), 0).tolist()
        right, taken = torch.zeros(len(own), dtype=torch.bool), set[int]()
        for detection, of_objects in enumerate(overlaps):
            free = [(overlap, i) for i, overlap in enumerate(of_objects) if i not in taken]
            overlap, nearest = max(free, default=(0.0, 0))
            if overlap >= OVERLAP:
                right[detection] = True
                taken.add(nearest)
        counted = right | ~_in_crowds(own, on_it)
        judged.append((own[counted, 5], labels[counted], right[counted]))
    scores, labels, right = (torch.cat(column) for column in zip(*judged, strict=True))
    return scores, labels, right
