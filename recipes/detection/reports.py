"""What every detector is asked after training steps: metrics, figures, boxes on pictures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torchvision.transforms.v2.functional import pil_to_tensor

from ddptrain.api import Figure, Picture, Report, Rows, UserError
from ddptrain.data.detection.batch import Batch
from ddptrain.data.detection.data import DetectionData
from ddptrain.data.detection.run_lengths import PackedMasks, decode_masks
from ddptrain.data.pictures import decoded
from ddptrain.recipes.detection.detections import LEAST_SCORE, Detections
from ddptrain.recipes.detection.draw import compared, make_sheet
from ddptrain.recipes.detection.errors import (
    SCORE,
    against_score,
    by_size,
    confusion,
    matched,
    matched_on,
    worst,
)
from ddptrain.recipes.detection.masks import whole_masks
from ddptrain.recipes.detection.predict import Predicted, on_picture, predicted
from ddptrain.recipes.detection.score import coco_scores
from ddptrain.recipes.detection.video import ENDINGS, Track, filmed, names_video

_SHOWN = 8
"""Validation pictures that are drawn at each evaluation."""


if TYPE_CHECKING:
    from ddptrain.data.pictures import Named


@final
class Reports:
    """A detector's metrics, figures and predictions.

    detect: called with a model in evaluation mode, a batch's images and the least score; gives each picture's
    detections, in pixels of its canvas. most: of a picture, that an evaluation takes.
    """

    def __init__(
        self,
        data: DetectionData,
        detect: Callable[[nn.Module, Tensor, float], Sequence[Detections]],
        most: int | None = None,
    ) -> None:
        self._data = data
        self._detect = detect
        self._judged = slice(most)
        self._reported: Tensor | None = None
        """The last report's detections, of which `figures` shows the mistakes."""

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor | Rows]:
        pictures = [seen.where(self._judged) for seen in self._detect(model, batch.images, LEAST_SCORE)]
        rows = rows_of(batch, pictures)
        return {**rows, **mask_rows(batch, pictures, self._data.valid.sizes)} if self._data.masks else rows

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        rows, masks = self._clipped(sums["detections"]), None
        if self._data.masks:
            masks = PackedMasks(sums["masks"], sums["mask_lengths"].cumsum(0))
        scores = coco_scores(self._data.valid, self._data.classes, rows, masks)
        self._reported = rows
        return Report(scores.metrics, scores.curves)

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        """The first pictures, and the mistakes in the last report: a verb that only reports draws none."""
        figures: dict[str, Figure] = {
            "predictions": self._sheet(model, [range(min(_SHOWN, self._data.valid_size))])
        }
        if self._reported is not None:
            pictures = list(matched(self._data.valid, self._reported))
            figures["confusion"] = confusion(pictures, self._data.classes)
            figures["by_size"] = by_size(pictures)
            figures["against_score"] = against_score(self._data.valid, self._reported)
            # the first ones where none is wrong: else an earlier evaluation's picture would stay
            most_wrong = worst(pictures, _SHOWN) or range(min(_SHOWN, self._data.valid_size))
            figures["worst"] = self._sheet(model, [range(i, i + 1) for i in most_wrong])
        return figures

    def predict(self, model: nn.Module, source: str, out: str, score: float, track: Track) -> Iterator[str]:
        """Boxes on pictures: a file, a folder or a pattern; see `ddptrain.recipes.detection.predict`. Or on a
        video; see `ddptrain.recipes.detection.video`."""
        _check_score(score)
        if names_video(source):
            detect = partial(self._detect, model)
            shown: Iterator[str] = filmed(detect, self._data, source, Path(out), score, track)
            return shown
        if track != "none":
            raise UserError(f"track={track}: is for a video ({', '.join(ENDINGS)}), a stream or a camera.")
        lines: Iterator[str] = predicted(
            lambda images: self._detect(model, images, score), self._data, source, Path(out)
        )
        return lines

    def predict_sample(self, model: nn.Module, sample: "Named", score: float) -> Predicted:
        """What is on a picture, a file or a PIL image, the surest first."""
        _check_score(score)
        pixels = pil_to_tensor(decoded(sample, "RGB"))
        image, placed = self._data.model_input(pixels)
        [seen] = self._detect(model, image, score)
        size = pixels.shape[1:]
        detected, masks = on_picture(seen, placed, size)
        names = tuple(self._data.classes[label] for label in detected.labels.tolist())
        whole = decode_masks(masks, *size) if self._data.masks else None
        return Predicted(detected.boxes, detected.scores, names, whole)

    def _sheet(self, model: nn.Module, chunks: Sequence[range]) -> Picture:
        """Validation pictures with what is on them and what the model sees there."""
        pictures: list[Tensor] = []
        for batch in self._data.valid_batches(chunks):
            answers = self._detect(model, batch.images, SCORE)
            judged = []
            for i, detected in enumerate(answers):
                rows = self._clipped(_rows(batch, i, detected).cpu())
                judged.append(matched_on(self._data.valid, int(batch.ids[i]), rows))
            pictures += compared(batch, answers, judged, self._data.classes)
        return make_sheet(pictures)

    def _clipped(self, rows: Tensor) -> Tensor:
        """Detections within their pictures."""
        sizes = self._data.valid.sizes[rows[:, 0].long()]
        most = torch.stack([sizes[:, 1], sizes[:, 0]] * 2, dim=1).to(rows.dtype)
        return torch.cat([rows[:, :1], rows[:, 1:5].clamp(min=0).minimum(most), rows[:, 5:]], dim=1)


def _check_score(score: float) -> None:
    if not 0 <= score <= 1:
        raise UserError(f"score={score}: must be in [0, 1].")


def mask_rows(batch: Batch, pictures: Sequence[Detections], sizes: Tensor) -> Mapping[str, Rows]:
    """The masks of `rows_of`'s detections in their pictures, one after the other, and how long each is.
    sizes: int64 (n, 2), of all pictures."""
    masks: list[bytes] = []
    for i, detected in enumerate(pictures):
        boxes = batch.placed.of(i).back(detected.boxes)
        masks += whole_masks(detected.masks, boxes, *sizes[batch.ids[i]].tolist())
    packed = PackedMasks.of(masks)
    return {"masks": Rows(packed.counts), "mask_lengths": Rows(torch.tensor([*map(len, masks)]).long())}


def rows_of(batch: Batch, pictures: Sequence[Detections]) -> Mapping[str, Tensor | Rows]:
    """The detections in a batch's pictures, as `Task.evaluate` gives them."""
    rows = [_rows(batch, i, detected) for i, detected in enumerate(pictures)]
    return {"detections": Rows(torch.cat(rows))}


def _rows(batch: Batch, i: int, detected: Detections) -> Tensor:
    """float32 (d, 7), of a batch's picture i, as `ddptrain.recipes.detection.score` has them."""
    picture = batch.ids[i].expand(len(detected.labels))
    boxes = batch.placed.of(i).back(detected.boxes)
    columns = [picture[:, None], boxes, detected.scores[:, None], detected.labels[:, None]]
    return torch.cat(columns, dim=1)
