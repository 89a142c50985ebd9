"""COCO's metrics, by faster-coco-eval."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddptrain.api import Curves
from ddptrain.data.detection.run_lengths import as_json
from ddptrain.data.detection.source import Scenes
from ddptrain.data.detection.write import as_coco

_ANY_AREA, _MOST = 0, -1
"""Positions in the evaluator's tables: objects of all sizes, 100 detections a picture."""
_LINES = 10
"""Classes whose curves are shown."""


class Scores(NamedTuple):
    """How good detections are."""

    metrics: dict[str, float]
    curves: Mapping[str, Curves]


def coco_scores(
    scenes: Scenes, classes: Sequence[str], rows: Tensor, masks: Sequence[bytes] | None = None
) -> Scores:
    """Average precision and recall of detections on all pictures of a part of a set.

    rows: float32 (d, 7), rows of picture, x1, y1, x2, y2 (in pixels of the picture), score, label. masks: of
    these, as `ddptrain.data.detection.run_lengths` has them; then there are the same metrics of masks, whose
    names begin with ``mask_``.

    mAP is the mean over classes and over IoU thresholds 0.50, 0.55, ... 0.95 of the average precision; mAP50
    and mAP75 are at one threshold; AR is the recall with 100 detections a picture, over the same thresholds
    (Lin et al., arXiv 1405.0312; cocodataset.org/#detection-eval). Classes that no picture holds don't count.
    """
    from faster_coco_eval import COCO, COCOeval_faster

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(as_coco(scenes.objects, scenes.sizes, scenes.names, classes))
        results = truth.loadRes(_results(rows, masks, scenes.sizes))
        kinds = ("bbox",) if masks is None else ("bbox", "segm")
        of_boxes, *of_masks = (_tables(COCOeval_faster(truth, results, kind), classes) for kind in kinds)
    metrics = _metrics(of_boxes)
    for tables in of_masks:
        metrics |= {f"mask_{name}": value for name, value in _metrics(tables).items()}
    names, precision, _ = of_boxes
    curves = {
        "precision_recall": _by_recall(
            {
                "IoU 0.50": precision[0].mean(1),
                "IoU 0.75": precision[5].mean(1),
                "IoU 0.90": precision[8].mean(1),
            }
        ),
        "precision_recall_of_classes": _by_recall(_worst(names, precision[0])),
    }
    return Scores(metrics, curves)


class _Tables(NamedTuple):
    """Of the classes that pictures hold."""

    names: list[str]
    precision: Tensor
    """(IoU, recall, class)"""
    recall: Tensor
    """(IoU, class)"""


def _tables(evaluator: Any, classes: Sequence[str]) -> _Tables:
    evaluator.evaluate()
    evaluator.accumulate()
    precision = torch.from_numpy(evaluator.eval["precision"])[..., _ANY_AREA, _MOST]
    recall = torch.from_numpy(evaluator.eval["recall"])[..., _ANY_AREA, _MOST]
    present = [i for i in range(len(classes)) if recall[0, i] >= 0]
    names = [classes[label] for label in present]
    return _Tables(names, precision[..., present], recall[..., present])


def _metrics(tables: _Tables) -> dict[str, float]:
    precision, recall = tables.precision, tables.recall
    metrics = {
        "mAP": float(precision.mean()),
        "mAP50": float(precision[0].mean()),
        "mAP75": float(precision[5].mean()),
        "AR": float(recall.mean()),
    }
    for place, name in enumerate(tables.names):
        metrics[f"AP/{name}"] = float(precision[..., place].mean())
        metrics[f"AR/{name}"] = float(recall[:, place].mean())
    return metrics


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


def _results(rows: Tensor, masks: Sequence[bytes] | None, sizes: Tensor) -> list[dict[str, Any]]:
    """Rows of picture, x1, y1, x2, y2, score, label as COCO's results JSON has them."""
    results: list[dict[str, Any]] = [
        {
            "image_id": int(picture) + 1,
            "category_id": int(label) + 1,
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "score": score,
        }
        for picture, x1, y1, x2, y2, score, label in rows.tolist()
    ]
    if masks is not None:
        for result, mask in zip(results, masks, strict=True):
            result["segmentation"] = as_json(mask, *sizes[result["image_id"] - 1].tolist())
    return results
