"""A detector as other programs run it: pictures in, boxes out, nothing of the training."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from ddptrain.api import Deployed, Rows, UserError, Validation
from ddptrain.data.detection.batch import Batch
from ddptrain.data.detection.data import DetectionData
from ddptrain.recipes.detection.detections import CANDIDATES, MOST, Detections, candidates, chosen, suppressed
from ddptrain.recipes.detection.draw import annotated
from ddptrain.recipes.detection.errors import SCORE
from ddptrain.recipes.detection.reports import rows_of

_OF_ANCHORS = {
    "boxes": "(batch, anchors, 4), or (batch, anchors, classes, 4): x1, y1, x2, y2 in pixels of the square",
    "scores": "(batch, anchors, classes) in [0, 1]",
}
_OF_LISTS = {
    "detections": "(batch, most, 6): x1, y1, x2, y2 in pixels of the square, score in [0, 1], index of the"
    " class; the surest first, then rows of zeros"
}
"""The outputs, and what a program has to know of them."""
_RECTANGLES = 12
"""On the example picture."""
_TIE = 1e-5
"""Scores that differ by less are equal but for rounding."""
_PARTNERS = 1e-3
"""Boxes of the two lists that differ by less, in shares, are one answer."""
_MOST_SORTED = 3840
"""TensorRT sorts no more (TopK's limit, NVIDIA/TensorRT issue 4244)."""


def deployed(
    dense: nn.Module, data: DetectionData, batch: int, overlap: float, suppress: "Suppression | None"
) -> Deployed:
    """With ``suppress`` the doubles are removed and the output is a list, else every anchor speaks.

    overlap: by which a validation suppresses doubles. dense: for float32 (n, 3, side, side) in [0, 1] float32
    (n, a, 4) x1, y1, x2, y2 in pixels, and float32 (n, a, classes) scores.
    """
    if batch < 1:
        raise UserError(f"batch={batch}: must be 1 or more.")
    if data.rectangular:
        raise UserError("data.rectangular=true: an exported file takes squares. Add data.rectangular=false.")
    module = dense if suppress is None else _Listed(dense, suppress)
    outputs = _OF_ANCHORS if suppress is None else _OF_LISTS
    difference = (
        difference_of_anchors
        if suppress is None
        else partial(difference_of_lists, least_score=suppress.least_score)
    )
    limits = {"overlap": overlap} if suppress is None else suppress.as_json()
    about = {**data.preparation(), **limits, "outputs": outputs}
    example = _example(batch, data.size)
    validation = _Validation(data.classes, overlap)
    return Deployed(
        module.eval(),
        (example,),
        ("images",),
        tuple(outputs),
        difference,
        metadata=about,
        validation=validation,
    )


@final
class _Validation(Validation):
    """overlap: by which doubles are suppressed where every anchor speaks."""

    def __init__(self, classes: Sequence[str], overlap: float) -> None:
        self._classes = classes
        self._overlap = overlap

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch.images,)

    def evaluate(self, outputs: Sequence[Tensor], batch: Batch) -> Mapping[str, Tensor | Rows]:
        return rows_of(batch, self._detections(outputs))

    def pictures(self, batch: Batch, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The model's boxes in green, the file's in orange."""
        pictures = []
        for image, model, file in zip(
            batch.images, self._detections(ours), self._detections(theirs), strict=True
        ):
            pixels = (image * 255).round().to(torch.uint8)
            true = model.boxes[model.scores >= SCORE]
            pictures.append(annotated(pixels, file.where(file.scores >= SCORE), self._classes, true))
        return pictures

    def _detections(self, outputs: Sequence[Tensor]) -> list[Detections]:
        if len(outputs) == 1:
            listed = [rows[rows[:, 4] > 0] for rows in outputs[0]]
            return [Detections(rows[:, :4], rows[:, 4], rows[:, 5].long()) for rows in listed]
        boxes, scores = outputs
        return suppressed(boxes, scores, 0.0, self._overlap, MOST)


@final
class Suppression:
    """Which answers are listed: those of at least ``least_score``, at most ``most`` a picture, none that
    overlaps a surer one of its class by more than ``overlap`` (IoU)."""

    def __init__(self, least_score: float, overlap: float, most: int) -> None:
        if most < 1 or not 0 <= least_score <= 1:
            raise UserError(f"most={most} score={least_score}: must be 1 or more, and in [0, 1].")
        self.least_score = least_score
        self.overlap = overlap
        self.most = most

    def as_json(self) -> Mapping[str, float]:
        return {"score": self.least_score, "overlap": self.overlap, "most": self.most}


def suppression(nms: bool, overlap: float, score: float | None, most: int | None) -> Suppression | None:
    """What the words of an export ask for: by default at most 100 boxes, of 0.25 or more. Raises UserError
    for words that are of no use without ``nms``."""
    if nms:
        return Suppression(0.25 if score is None else score, overlap, 100 if most is None else most)
    for name, value in (("score", score), ("most", most)):
        if value is not None:
            raise UserError(
                f"{name}={value}: is for nms=true; without it the file gives every answer. Add nms=true, or"
                f" leave {name} out."
            )
    return None


@final
class _Listed(nn.Module):
    """float32 (n, 3, side, side) in [0, 1] -> float32 (n, most, 6): x1, y1, x2, y2 in pixels, score, class,
    the surest first; rows of zeros below the last."""

    def __init__(self, dense: nn.Module, suppress: Suppression) -> None:
        super().__init__()
        self.dense = dense
        self._suppress = suppress

    def forward(self, images: Tensor) -> Tensor:
        boxes, scores = self.dense(images)
        # ten answers an object, as YOLO's assignment teaches them, where there are doubles
        most = self._suppress.most * (1 if self._suppress.overlap == 1 else 10)
        best = candidates(boxes, scores, min(_MOST_SORTED, max(CANDIDATES, most)))
        pictures = zip(best.boxes, best.scores, best.labels, strict=True)
        return torch.stack([self._listed(*picture) for picture in pictures])

    def _listed(self, boxes: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
        # a fixed number of rows, kept ones marked by their score: shapes that depend on what is seen would
        # have to be handled by every program that runs this
        least, most = self._suppress.least_score, self._suppress.most
        best, index = chosen(boxes, scores, labels, self._suppress.overlap, most)
        best = torch.where(best >= least, best, 0.0)
        rows = torch.cat([boxes[index], best[:, None], labels[index, None].to(best.dtype)], dim=1)
        return nn.functional.pad(rows * (best > 0)[:, None], (0, 0, 0, most - len(best)))


def difference_of_anchors(ours: Tensor, theirs: Tensor) -> float:
    """Of boxes in shares of the largest coordinate, of scores as they are: a model that has hardly learned
    gives all anchors scores near 0, whose shares are rounding."""
    return float((theirs - ours).abs().max() / ours.abs().max().clamp(min=1))


def difference_of_lists(ours: Tensor, theirs: Tensor, least_score: float) -> float | None:
    """The largest difference between a listed box and its partner in the other list, in shares of the largest
    coordinate and of score; infinite where one has none.

    Rounding decides the order of (nearly) equal scores, and with it which of two doubles stays, and which
    scores reach the least one: boxes with a rival in score, or at the list's end, count where they have a
    partner, and need none. None where no box counts, so that nothing was compared.
    """
    scale = ours.new_tensor([*[float(ours[..., :4].abs().max().clamp(min=1))] * 4, 1.0, 1e-9])
    differences: list[float] = []
    for one, other in zip(ours, theirs, strict=True):
        both = [rows[rows[:, 4] > 0] / scale for rows in (one, other)]
        scores = torch.cat(both)[:, 4]
        for rows, others in (both, both[::-1]):
            apart = (rows[:, None] - others).abs().amax(2)  # cdist passes over NaN
            nearest = apart.amin(1) if len(others) else apart.new_full((len(rows),), torch.inf)
            tied = ((rows[:, None, 4] - scores).abs() < _TIE).sum(1) > 2  # itself, its partner, a rival
            lowest = float(rows[-1, 4]) if len(rows) == ours.shape[1] else least_score
            last = rows[:, 4] < lowest + _TIE
            differences += nearest[~(tied | last) | (nearest < _PARTNERS)].tolist()
    return float(torch.tensor(differences).max()) if differences else None  # so does Python's max


def _example(batch: int, side: int) -> Tensor:
    """float32 (n, 3, side, side): rectangles of any colour on noise."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch, 3, side, side, generator=generator) * 0.2
    for image in images:
        for _ in range(_RECTANGLES):
            x, y = torch.randint(0, side * 3 // 4, (2,), generator=generator).tolist()
            width, height = torch.randint(side // 16, side // 3, (2,), generator=generator).tolist()
            image[:, y : y + height, x : x + width] = torch.rand(3, 1, 1, generator=generator)
    return images
