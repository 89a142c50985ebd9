"""torchmetrics' metrics on several ranks are what a plain loop over the validation set computes."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ddptrain.api.recipe import ConfusionMatrix, Picture
from ddptrain.api.world import World
from ddptrain.engine.evaluate import Totals, chunks_of
from ddptrain.errors import UserError
from ddptrain.recipes.batch_metrics import TorchMetric, batch_metrics
from ddptrain.testing import run_ranks

torchmetrics = pytest.importorskip("torchmetrics")
from torchmetrics import MetricCollection, classification, detection, regression, wrappers  # noqa: E402

N, BATCH, CLASSES, LABELS = 53, 9, 5, 4
NEEDED = {
    "FBeta": {"beta": 0.5},
    "RecallAtFixedPrecision": {"min_precision": 0.5},
    "PrecisionAtFixedRecall": {"min_recall": 0.5},
    "SpecificityAtSensitivity": {"min_sensitivity": 0.5},
    "SensitivityAtSpecificity": {"min_specificity": 0.5},
}
NOT_OF_PREDS_AND_TARGET = ("BinaryFairness", "BinaryGroupStatRates")
"""They take groups, too."""


def inputs(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    if kind == "Binary":
        return torch.rand(N, generator=generator), torch.randint(2, (N,), generator=generator)
    if kind == "Multiclass":
        logits = torch.randn(N, CLASSES, generator=generator)
        return logits.softmax(1), torch.randint(CLASSES, (N,), generator=generator)
    return torch.rand(N, LABELS, generator=generator), torch.randint(2, (N, LABELS), generator=generator)


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each class of the package with (preds, target), exact and binned, averaged and by class."""
    for name, metric in sorted(vars(classification).items()):
        kind = next((kind for kind in ("Binary", "Multiclass", "Multilabel") if name.startswith(kind)), None)
        if kind is None or not inspect.isclass(metric) or name in NOT_OF_PREDS_AND_TARGET:
            continue
        arguments = {"Multiclass": {"num_classes": CLASSES}, "Multilabel": {"num_labels": LABELS}}.get(
            kind, {}
        )
        arguments = {**arguments, **next((more for part, more in NEEDED.items() if part in name), {})}
        yield name, kind, arguments
        parameters = inspect.signature(metric).parameters
        if "thresholds" in parameters:
            yield name, kind, {**arguments, "thresholds": 7}
        if "average" in parameters:
            yield name, kind, {**arguments, "average": None}


def plain_loop(metric: Any, preds: Tensor, target: Tensor) -> Any:
    for chunk in chunks_of(len(target), BATCH):
        metric.update(preds[chunk.start : chunk.stop], target[chunk.start : chunk.stop])
    return metric.compute()


def on_ranks(world: World, metric: TorchMetric, preds: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The sums over all ranks, as the engine makes them."""
    chunks = chunks_of(len(target), BATCH)
    sums = Totals("test", len(chunks), world)
    for slot in range(world.rank, len(chunks), world.size):
        rows = slice(chunks[slot].start, chunks[slot].stop)
        for name, value in metric.sums(preds[rows], target[rows], len(chunks[slot])).items():
            sums.add(slot, name, value)
    return sums.totals(interrupted=False)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.double()]
    items = value.values() if isinstance(value, dict) else value
    return [tensor for item in items for tensor in tensors(item)]


@pytest.mark.long
def test_every_metric_of_classification_on_any_number_of_ranks() -> None:
    known = list(cases())
    assert len(known) > 100

    def rank(world: World) -> list[Any]:
        warnings.simplefilter("ignore")
        values = []
        for name, kind, arguments in known:
            metric = TorchMetric("m", getattr(classification, name)(**arguments))
            sums = on_ranks(world, metric, *inputs(kind))
            # only rank 0 reports
            values.append(metric.value(sums) if world.is_first else None)
            if world.is_first:
                metric.report(sums, ())
        return values

    with warnings.catch_warnings(action="ignore"):
        expected = [
            plain_loop(getattr(classification, name)(**arguments), *inputs(kind))
            for name, kind, arguments in known
        ]
    for size in (1, 2, 3):
        values = run_ranks(rank, size, timeout=200)[0]
        for case, value, plain in zip(known, values, expected, strict=True):
            for ours, theirs in zip(tensors(value), tensors(plain), strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7, equal_nan=True), (size, case)


def test_others_and_what_is_made_of_metrics() -> None:
    """Merged by a function of its own (Pearson), of several outputs, composed, wrapped."""
    generator = torch.Generator().manual_seed(6)
    preds, target = torch.randn(N, 2, generator=generator), torch.randn(N, 2, generator=generator)
    make: dict[str, Callable[[], Any]] = {
        "Pearson": lambda: regression.PearsonCorrCoef(num_outputs=2),
        "R2": lambda: regression.R2Score(multioutput="raw_values"),
        "Spearman": lambda: regression.SpearmanCorrCoef(num_outputs=2),
        "MAE": regression.MeanAbsoluteError,
        "composed": lambda: regression.MeanSquaredError() + 2 * regression.MeanAbsoluteError(),
    }

    def rank(world: World) -> dict[str, Any]:
        warnings.simplefilter("ignore")
        values = {}
        for name, metric in make.items():
            measured = TorchMetric(name, metric())
            sums = on_ranks(world, measured, preds, target)
            values[name] = measured.value(sums) if world.is_first else None
        return values

    with warnings.catch_warnings(action="ignore"):
        expected = {name: plain_loop(metric(), preds, target) for name, metric in make.items()}
    for size in (1, 3):
        for name, value in run_ranks(rank, size)[0].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_what_a_metric_reports() -> None:
    preds, target = inputs("Multiclass")
    metrics = MetricCollection(
        {
            "f1": classification.MulticlassF1Score(CLASSES, average=None),
            "confusion": classification.MulticlassConfusionMatrix(CLASSES),
            "roc": classification.MulticlassROC(CLASSES),
            "recall": classification.MulticlassRecallAtFixedPrecision(CLASSES, 0.3),
            "each": wrappers.ClasswiseWrapper(classification.MulticlassAccuracy(CLASSES, average=None)),
        },
        prefix="valid_",
    )
    reports = {}
    for metric in batch_metrics(metrics):
        assert isinstance(metric, TorchMetric)
        reports[metric.name] = metric.report(
            on_ranks(World(), metric, preds, target), ("a", "b", "c", "d", "e")
        )
    assert reports["valid_f1"][0].keys() == {f"valid_f1/{name}" for name in "abcde"}
    confusion = reports["valid_confusion"][1]["valid_confusion"]
    assert isinstance(confusion, ConfusionMatrix)
    assert sum(map(sum, confusion.counts)) == N
    picture = reports["valid_roc"][1]["valid_roc"]
    assert isinstance(picture, Picture)
    assert picture.pixels.shape[0] == 3
    assert reports["valid_recall"][0].keys() == {f"valid_recall/{name}" for name in "abcde"}
    assert all(len(report[0]) for name, report in reports.items() if "each" in name)


@pytest.mark.parametrize("class_metrics", [False, True])
def test_mean_average_precision_has_values_of_each_class(class_metrics: bool) -> None:
    metric = TorchMetric(
        "map", detection.MeanAveragePrecision(class_metrics=class_metrics, backend="faster_coco_eval")
    )
    boxes, labels = torch.tensor([[0.0, 0, 10, 10], [20, 20, 40, 40]]), torch.tensor([3, 7])
    output = [{"boxes": boxes, "scores": torch.tensor([0.9, 0.8]), "labels": labels}]
    target = [{"boxes": boxes + torch.tensor([[0.0], [9.0]]), "labels": labels}]
    totals = Totals("test", 1, World())
    for name, value in metric.sums(output, target, 1).items():
        totals.add(0, name, value)
    values, _ = metric.report(totals.totals(interrupted=False), ())
    assert values["map_map_50"] == pytest.approx(0.5, abs=0.01)
    by_class = {name: value for name, value in values.items() if name.startswith("map_map_per_class")}
    expected = {"map_map_per_class/3": 1.0, "map_map_per_class/7": 0.0} if class_metrics else None
    assert by_class == (expected or {"map_map_per_class": -1.0})


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (wrappers.BootStrapper(classification.BinaryAccuracy()), "draws random numbers"),
        (wrappers.MinMaxMetric(classification.BinaryAccuracy()), "more than one evaluation"),
    ],
)
def test_what_depends_on_more_than_the_set_is_refused(metric: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        batch_metrics({"m": metric})


def test_a_batch_that_a_metric_refuses_is_named() -> None:
    (metric,) = batch_metrics({"acc": classification.MulticlassAccuracy(3)})
    with pytest.raises(UserError, match=r"metrics\.acc: MulticlassAccuracy refuses"):
        metric.sums(torch.rand(4, 7), torch.tensor([0, 1, 2, 6]), 4)
