"""COCO's metrics, by faster-coco-eval."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddptrain.api import Curves
from ddptrain.data.detection.source import Scenes
from ddptrain.data.detection.write import as_coco
from ddptrain.recipes.detection.errors import against_score

_ANY_AREA, _MOST = 0, -1
"""Positions in the evaluator's tables: objects of all sizes, 100 detections a picture."""
_LINES = 10
"""Classes whose curves are shown."""


class Scores(NamedTuple):
    """How good detections are."""

    metrics: dict[str, float]
    curves: Mapping[str, Curves]


def coco_scores(scenes: Scenes, classes: Sequence[str], rows: Tensor) -> Scores:
    """Average precision and recall of detections on all pictures of a part of a set.

    rows: float32 (d, 7), rows of picture, x1, y1, x2, y2 (in pixels of the picture), score, label.

    mAP is the mean over classes and over IoU thresholds 0.50, 0.55, ... 0.95 of the average precision; mAP50
    and mAP75 are at one threshold; AR is the recall with 100 detections a picture, over the same thresholds
    (Lin et al., arXiv 1405.0312; cocodataset.org/#detection-eval). Classes that no picture holds don't count.
    """
    from faster_coco_eval import COCO, COCOeval_faster

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(as_coco(scenes.objects, scenes.sizes, scenes.names, classes))
        evaluator = COCOeval_faster(truth, truth.loadRes(_results(rows)), "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
    precision = torch.from_numpy(evaluator.eval["precision"])[..., _ANY_AREA, _MOST]  # IoU, recall, class
    scores = torch.from_numpy(evaluator.eval["scores"])[0, ..., _ANY_AREA, _MOST]  # recall, class
    recall = torch.from_numpy(evaluator.eval["recall"])[..., _ANY_AREA, _MOST]  # IoU, class
    present = [i for i in range(len(classes)) if recall[0, i] >= 0]
    precision, scores, recall = precision[..., present], scores[:, present], recall[..., present]
    metrics = {
        "mAP": float(precision.mean()),
        "mAP50": float(precision[0].mean()),
        "mAP75": float(precision[5].mean()),
        "AR": float(recall.mean()),
    }
    for place, label in enumerate(present):
        metrics[f"AP/{classes[label]}"] = float(precision[..., place].mean())
        metrics[f"AR/{classes[label]}"] = float(recall[:, place].mean())
    names = [classes[label] for label in present]
    curves = {
        "precision_recall": _by_recall(
            {
                "IoU 0.50": precision[0].mean(1),
                "IoU 0.75": precision[5].mean(1),
                "IoU 0.90": precision[8].mean(1),
            }
        ),
        "precision_recall_of_classes": _by_recall(_worst(names, precision[0])),
        "against_score": against_score(precision[0], torch.linspace(0, 1, len(scores)), scores),
    }
    return Scores(metrics, curves)


def _worst(names: Sequence[str], precision: Tensor) -> dict[str, Tensor]:
    """Of (recall, classes) the classes with the least mean, the worst first."""
    order = precision.mean(0).argsort(stable=True)[:_LINES].tolist()
    return {names[label]: precision[:, label] for label in order}


def _by_recall(precision: Mapping[str, Tensor]) -> Curves:
    """Precision at recalls of 0, 0.01, ... 1."""
    lines = {
        name: [(i / 100, float(of)) for i, of in enumerate(values)] for name, values in precision.items()
    }
    return Curves(lines, "recall", "precision")


def _results(rows: Tensor) -> list[dict[str, Any]]:
    """Rows of picture, x1, y1, x2, y2, score, label as COCO's results JSON has them."""
    return [
        {
            "image_id": int(picture) + 1,
            "category_id": int(label) + 1,
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "score": score,
        }
        for picture, x1, y1, x2, y2, score, label in rows.tolist()
    ]
