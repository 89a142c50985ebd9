"""Detection with a model of another library, by that model's own losses."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from ddptrain.api import Deployed, Figure, Loss, Progress, Report, Rows, Task, UserError, derive_seed
from ddptrain.data.detection.batch import Batch
from ddptrain.data.detection.data import DetectionData
from ddptrain.recipes.detection.deploy import deployed, suppression
from ddptrain.recipes.detection.detections import Detections
from ddptrain.recipes.detection.detector import Detector
from ddptrain.recipes.detection.predict import Predicted
from ddptrain.recipes.detection.reports import Reports
from ddptrain.recipes.detection.video import Track

if TYPE_CHECKING:
    from ddptrain.data.pictures import Named


@final
class LibraryDetection(Task):
    """The sum of a detector's own losses, of each picture by itself, so that neither micro-batches nor ranks
    change them; COCO's metrics.

    model: called with ``num_classes`` and ``size``, the pixels of the squares' sides.
    """

    best_metric = "mAP"
    higher_is_better = True

    def __init__(self, model: Callable[..., Detector], data: DetectionData) -> None:
        if data.rectangular:
            raise UserError("data.rectangular=true: is for model=yolo. Use data.rectangular=false.")
        self._model = model
        self._data = data
        self._reports = Reports(data, _detect)

    def build(self) -> nn.Module:
        detector = self._model(num_classes=len(self._data.classes), size=self._data.size)
        if detector.learns_masks and not self._data.masks:
            raise UserError(
                "model: learns masks, and the data have boxes alone. Add data.source.masks=true: COCO's JSON,"
                " YOLO's polygons and drawn scenes have masks."
            )
        if self._data.masks and not detector.learns_masks:
            raise UserError("data.source.masks=true: this model learns boxes alone. Leave it out.")
        return detector

    def loss(self, model: nn.Module, batch: Batch, progress: Progress) -> Loss:
        seed = derive_seed(self._data.seed, progress.step)
        losses = model(batch.images, batch.boxes, batch.labels, batch.ids, seed, batch.masks)
        sums = {name: values.float().sum() for name, values in losses.items()}
        parts = sums if len(sums) > 1 else {}
        return Loss(torch.stack(list(sums.values())).sum(), len(batch.images), parts)

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor | Rows]:
        return self._reports.evaluate(model, batch)

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        return self._reports.report(sums)

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        return self._reports.figures(model)

    def predict(
        self,
        model: nn.Module,
        source: str,
        out: str = "predictions",
        score: float = 0.25,
        track: Track = "none",
    ) -> Iterator[str]:
        _check_listed(model, score)
        return self._reports.predict(model, source, out, score, track)

    def predict_sample(self, model: nn.Module, sample: "Named", score: float = 0.25) -> Predicted:
        """What is on a picture, the surest first; ``score``: the least."""
        _check_listed(model, score)
        return self._reports.predict_sample(model, sample, score)

    def deploy(
        self,
        model: nn.Module,
        nms: bool = True,
        batch: int = 1,
        score: float | None = None,
        most: int | None = None,
    ) -> Deployed:
        """With ``nms`` at most ``most`` boxes a picture (100), of ``score`` (0.25) or more, else all that is
        said."""
        assert isinstance(model, Detector)
        if model.learns_masks:
            raise UserError(
                "export: a file would give boxes alone, and this model learns masks, too. From Python:"
                " ddptrain.load(run).predict(picture)."
            )
        if model.chooses and not nms:
            raise UserError(
                "nms=false: this detector has no anchors, but chooses its queries or proposals itself."
                " nms=true lists its answers, without doubles."
            )
        suppress = suppression(nms, model.overlap, score, most)
        whole: Deployed = deployed(_Dense(model), self._data, batch, model.overlap, suppress)
        return whole


@final
class _Dense(nn.Module):
    """All that a detector says, as `ddptrain.recipes.detection.deploy` takes it."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.detector.dense(images)


def _check_listed(model: nn.Module, score: float) -> None:
    assert isinstance(model, Detector)
    if score < model.least_score:
        raise UserError(
            f"score={score:g}: this detector lists nothing below {model.least_score:g}. Add"
            f" +model.score_thresh={score:g} (of Faster and Mask R-CNN +model.box_score_thresh={score:g})."
        )


def _detect(model: nn.Module, images: Tensor, least_score: float) -> list[Detections]:
    return [detected.where(detected.scores >= least_score) for detected in model(images)]
