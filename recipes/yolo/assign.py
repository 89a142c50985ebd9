"""Which anchor learns which object: task-aligned assignment (Feng et al.: TOOD, arXiv 2108.07755).

An anchor's alignment with an object is score^alpha * IoU^beta: how well it already sees it. Each object takes
the best few anchors that lie in it and whose boxes touch its own; an anchor wanted by several goes to the one
whose box it fits best.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import box_iou

from ddptrain.api import UserError

_PAIRS_AT_ONCE = 2**21
"""Of an anchor and an object: tensors of them are a step's largest, so they are made for some pictures at a
time."""


class Assigned(NamedTuple):
    """What each anchor is to learn."""

    target: Tensor
    """int64 (n, a): which of the picture's objects."""
    weight: Tensor
    """float32 (n, a) in [0, 1]: the score it should give it; 0 where it learns that nothing is there.

    An object's best anchor gets the IoU of the best fitting one, the others less in proportion to their
    alignment (section 3.3)."""


@dataclass(frozen=True, slots=True)
class TaskAligned:
    """most: anchors that an object takes. alpha, beta: exponents of score and IoU."""

    most: int = 10
    alpha: float = 0.5
    beta: float = 6.0

    def __post_init__(self) -> None:
        if self.most < 1:
            raise UserError(f"task.assigner.most={self.most}: must be 1 or more.")
        for name in ("alpha", "beta"):
            if getattr(self, name) < 0:
                raise UserError(f"task.assigner.{name}={getattr(self, name)}: must be 0 or more.")

    @torch.no_grad()
    def __call__(
        self,
        scores: Tensor,
        predicted: Tensor,
        points: Tensor,
        strides: Tensor,
        boxes: Tensor,
        labels: Tensor,
        one_to_one: bool = False,
    ) -> Assigned:
        """scores: (n, a, classes) in [0, 1]. predicted: (n, a, 4) boxes. points: (a, 2). strides: (a,).
        boxes: (n, k, 4) true ones. labels: int64 (n, k), -1 in rows without an object. All in pixels.
        one_to_one: of the anchors that an object was given only the best aligned one learns it.
        """
        n, a, _ = scores.shape
        k = labels.shape[1]
        if n * k == 0:
            return Assigned(labels.new_zeros(n, a), scores.new_zeros(n, a))
        pictures = max(1, _PAIRS_AT_ONCE // (k * a))
        parts = []
        for first in range(0, n, pictures):
            some = slice(first, first + pictures)
            parts.append(
                self._best(scores[some], predicted[some], boxes[some], labels[some], points, strides)
            )
        alignment, overlap, anchor = (torch.cat(of) for of in zip(*parts, strict=True))
        taken, at = alignment > 0, anchor.flatten(1)
        overlap = overlap * taken
        fit = overlap.new_zeros(n, a).scatter_reduce(1, at, overlap.flatten(1), "amax")
        # of those that fit an anchor alike the first
        own = torch.arange(k, device=labels.device)[:, None].expand_as(anchor)
        wants = torch.where(taken & (overlap == fit.gather(1, at).view_as(overlap)), own, k)
        target = labels.new_full((n, a), k).scatter_reduce(1, at, wants.flatten(1), "amin")
        mine = taken & (target.gather(1, at).view_as(own) == own)
        if one_to_one:
            best_of_own = (alignment * mine).argmax(2, keepdim=True)
            mine = mine & torch.zeros_like(mine).scatter_(2, best_of_own, True)
        alignment, overlap = alignment * mine, overlap * mine
        share = alignment / alignment.amax(2, keepdim=True).clamp(min=torch.finfo(alignment.dtype).tiny)
        weight = (share * overlap.amax(2, keepdim=True)).flatten(1)
        return Assigned(target % k, weight.new_zeros(n, a).scatter_reduce(1, at, weight, "amax"))

    def _best(
        self,
        scores: Tensor,
        predicted: Tensor,
        boxes: Tensor,
        labels: Tensor,
        points: Tensor,
        strides: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Each object's anchors: alignment, 0 where it has fewer; overlap; and int64, which. (n, k, most)"""
        overlap = box_iou(boxes, predicted).nan_to_num_()  # (n, k, a); two boxes without area give 0 / 0
        wanted = labels.clamp(min=0)[:, None, :].expand(-1, scores.shape[1], -1)
        class_scores = scores.gather(2, wanted).transpose(1, 2)
        possible = self._inside(points, strides, boxes) & (labels >= 0)[..., None] & (overlap > 0)
        alignment = torch.where(possible, class_scores.pow(self.alpha) * overlap.pow(self.beta), 0.0)
        best, anchor = alignment.topk(min(self.most, alignment.shape[2]), dim=2)
        return best, overlap.gather(2, anchor), anchor

    def _inside(self, points: Tensor, strides: Tensor, boxes: Tensor) -> Tensor:
        """bool (n, k, a): points in boxes or on their edges. A box thinner than the finest stride is taken as
        thick as that, or small objects would fall between the points."""
        middle = (boxes[..., :2] + boxes[..., 2:]) / 2
        half = ((boxes[..., 2:] - boxes[..., :2]) / 2).clamp(min=strides.min() / 2)
        across, down = (  # one coordinate at a time: half the memory of this, the largest tensors of a step
            (points[:, i] - middle[..., i, None]).abs() <= half[..., i, None] for i in (0, 1)
        )
        return across & down
