"""Detection: the Task of the YOLO recipes."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.api import Deployed, Figure, Loss, Progress, Report, Rows, Task, UserError, derive_seed
from ddptrain.data.detection.batch import Batch
from ddptrain.data.detection.data import DetectionData
from ddptrain.recipes.detection.deploy import deployed, suppression
from ddptrain.recipes.detection.detections import CANDIDATES, MOST, Detections
from ddptrain.recipes.detection.predict import Predicted
from ddptrain.recipes.detection.reports import Reports
from ddptrain.recipes.detection.video import Track
from ddptrain.recipes.outputs import check_outputs
from ddptrain.recipes.yolo.assign import TaskAligned
from ddptrain.recipes.yolo.boxes import (
    Dense,
    boxes_at,
    class_loss,
    complete_iou_loss,
    decoded,
    detections,
    distance_loss,
    distances_from,
    expected_distances,
)
from ddptrain.recipes.yolo.model import STRIDES, Dual, Raw, Yolo, evaluated

if TYPE_CHECKING:
    from ddptrain.data.pictures import Named

log = logging.getLogger("ddptrain")

_COARSEST = STRIDES[-1]


@final
class Detection(Task):
    """Boxes by CIoU and distribution focal loss, classes by binary cross-entropy; COCO's metrics.

    model: called with ``num_classes``. assigner: which anchor learns which object. box, distance, classes:
    weights of the three losses. multi_scale: in each step pictures are scaled to a side drawn from
    [1 - multi_scale, 1 + multi_scale] times theirs; 0 for none. overlap: IoU above which the less sure of two
    boxes of one class is a double.
    """

    best_metric = "mAP"
    higher_is_better = True
    least_count = 1.0

    def __init__(
        self,
        model: Callable[..., nn.Module],
        data: DetectionData,
        assigner: TaskAligned,
        box: float = 7.5,
        distance: float = 1.5,
        classes: float = 0.5,
        multi_scale: float = 0.0,
        overlap: float = 0.7,
    ) -> None:
        if not 0 <= multi_scale < 1:
            raise UserError(f"task.multi_scale={multi_scale}: must be in [0, 1).")
        if not 0 <= overlap <= 1:
            raise UserError(f"task.overlap={overlap}: must be in [0, 1].")
        if min(box, distance, classes) < 0 or box + distance + classes == 0:
            raise UserError(
                f"task.box={box} task.distance={distance} task.classes={classes}: 0 or more, and not all 0."
            )
        self._model = model
        self._data = data
        self._assigner = assigner
        self._gains = {"box": box, "distance": distance, "classes": classes}
        self._multi_scale = multi_scale
        self._overlap = overlap
        self._reports = Reports(data, self._detect, MOST)

    def build(self) -> nn.Module:
        if self._data.masks:
            raise UserError("data.source.masks=true: model=yolo learns boxes alone. Leave it out.")
        model = self._model(num_classes=len(self._data.classes))
        longest = round(self._data.size * (1 + self._multi_scale))
        if isinstance(model, Yolo) and model.widest < longest:
            log.info(
                "note       no box is longer than %d pixels, and pictures are up to %d: for objects as large"
                " as a picture set model.bins=%d",
                model.widest, longest, math.ceil(longest / (2 * STRIDES[-1])) + 1,
            )  # fmt: skip
        return model

    def loss(self, model: nn.Module, batch: Batch, progress: Progress) -> Loss:
        """Every term is added over anchors, weighted by the score they should give, and divided by the sum of
        those weights over the whole global batch (or by 1 where it is less, as MMDetection's TOODHead does):
        how many anchors learn an object differs between ranks.

        A second head's term is added to the first one's, and divided by the first one's weights.
        """
        images, true = self._scaled(batch.images, batch.boxes, progress)
        if len(images) == 1 and images.shape[-1] == _COARSEST:
            raise UserError(
                f"data.size={_COARSEST}: the coarsest map of a single picture has one cell, and BatchNorm"
                " needs more than one value. Use a larger data.size, train.batch_size or train.micro_batch.",
                everywhere=False,
            )
        outputs: Raw | Dual = model(images)
        raw = outputs.one_to_many if isinstance(outputs, Dual) else outputs
        assert raw is not None, "a loss needs the model in training mode"
        self._check(raw, model)
        sums, count = self._losses(raw, true, batch.labels)
        total = torch.stack([gain * sums[name] for name, gain in self._gains.items()]).sum()
        if isinstance(outputs, Dual):
            selection = self._selection_loss(outputs.one_to_one, true, batch.labels)
            sums["one_to_one"] = self._gains["classes"] * selection
            total = total + sums["one_to_one"]
        return Loss(total, count, sums)

    def _losses(self, raw: Raw, true: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The three sums, and the sum of their weights. true: (n, k, 4) boxes. labels: (n, k)."""
        raw = _one_grid(raw)
        logits, scores, points, strides = raw.distances.float(), raw.classes.float(), raw.points, raw.strides
        stride = strides[:, None]
        distances = expected_distances(logits) * stride
        boxes = boxes_at(points, distances.detach())
        assigned = self._assigner(scores.detach().sigmoid(), boxes, points, strides, true, labels)
        weight, learnt = assigned.weight, (assigned.weight > 0)[..., None]
        # dense, with each anchor's cell where nothing is to be learnt: picking those out would wait for the
        # device. Also in place of what is seen there: a box without sides may have a NaN as its gradient
        goal, label = _of_objects(true, labels, assigned.target)
        goal = torch.where(learnt, distances_from(points, goal), stride / 2)
        distances = torch.where(learnt, distances, stride / 2)
        sums = {
            "box": (complete_iou_loss(distances, goal) * weight).sum(),
            "distance": (distance_loss(logits, goal / stride).mean(-1) * weight).sum(),
            "classes": class_loss(scores, _class_goals(scores, label, weight)),
        }
        return sums, weight.sum()

    def _selection_loss(self, raw: Raw, true: Tensor, labels: Tensor) -> Tensor:
        """The second head's sum: its classes', whose boxes the first head learns."""
        raw = _one_grid(raw)
        scores = raw.classes.float()
        assigned = self._assigner(
            scores.detach().sigmoid(), decoded(raw), raw.points, raw.strides, true, labels, one_to_one=True
        )
        _, label = _of_objects(true, labels, assigned.target)
        return class_loss(scores, _class_goals(scores, label, assigned.weight))

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
        return self._reports.predict(model, source, out, score, track)

    def predict_sample(self, model: nn.Module, sample: "Named", score: float = 0.25) -> Predicted:
        """What is on a picture, the surest first; ``score``: the least."""
        return self._reports.predict_sample(model, sample, score)

    def deploy(
        self,
        model: nn.Module,
        nms: bool = False,
        batch: int = 1,
        score: float | None = None,
        most: int | None = None,
    ) -> Deployed:
        """With ``nms`` at most ``most`` boxes a picture (100), of ``score`` (0.25) or more, else all that is
        said."""
        with torch.no_grad():
            overlap = self._overlap_of(model(torch.zeros(1, 3, self._data.size, self._data.size)))
        suppress = suppression(nms, overlap, score, most)
        whole: Deployed = deployed(Dense(model), self._data, batch, overlap, suppress)
        return whole

    def _check(self, raw: Raw, model: nn.Module) -> None:
        """Raises UserError where the model has more or fewer outputs than there are classes."""
        check_outputs(raw.classes, len(self._data.classes), model, "classes", "(n, anchors, classes)")

    def _detect(self, model: nn.Module, images: Tensor, least_score: float) -> list[Detections]:
        outputs: Raw | Dual = model(images)
        raw = evaluated(outputs)
        self._check(raw, model)
        return detections(raw, least_score, self._overlap_of(outputs), CANDIDATES)

    def _overlap_of(self, outputs: Raw | Dual) -> float:
        """The IoU above which there are doubles in them; 1 where there are none."""
        return 1.0 if isinstance(outputs, Dual) else self._overlap

    def _scaled(self, images: Tensor, boxes: Tensor, progress: Progress) -> tuple[Tensor, Tensor]:
        """The batch at this step's scale, the same on every rank and in every micro-batch."""
        if not self._multi_scale:
            return images, boxes
        side = images.shape[-1]
        shift = derive_seed(self._data.seed, progress.step) / 2**63 * 2 - 1
        least = 2 if len(images) == 1 else 1  # cells a side: BatchNorm needs more than one value
        new = max(round(side * (1 + self._multi_scale * shift) / _COARSEST), least) * _COARSEST
        if new == side:
            return images, boxes
        resized = functional.interpolate(images, size=(new, new), mode="bilinear", antialias=True)
        return resized, boxes * (new / side)


def _one_grid(raw: Raw) -> Raw:
    """DataParallel lays what its replicas say of the anchors, all the same, one below the other."""
    count = raw.classes.shape[1]
    return raw._replace(points=raw.points[:count], strides=raw.strides[:count])


def _class_goals(scores: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    """(n, a, classes): the score that each anchor should give. label, weight: (n, a)."""
    return torch.zeros_like(scores).scatter_(2, label.clamp(min=0)[..., None], weight[..., None])


def _of_objects(boxes: Tensor, labels: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The box (n, a, 4) and the label (n, a) of the object that each anchor was given."""
    if labels.shape[1] == 0:  # not one object in the batch
        return boxes.new_zeros(*index.shape, 4), labels.new_zeros(index.shape)
    return boxes.gather(1, index[..., None].expand(-1, -1, 4)), labels.gather(1, index)
