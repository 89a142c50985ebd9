"""Image classification: the Task that all image recipes share."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.api import ConfusionMatrix, Data, Deployed, Loss, Progress, Report, Task, UserError
from ddptrain.recipes.class_weights import ClassWeights
from ddptrain.recipes.limits import check_label_smoothing
from ddptrain.recipes.outputs import check_labels, check_outputs, check_range
from ddptrain.recipes.pictures import Description, by_name, classifier, deployed, predictions
from ddptrain.recipes.views import Views, check_level, note_one_view

if TYPE_CHECKING:
    from ddptrain.data.pictures import Named

log = logging.getLogger("ddptrain")

_MOST_CLASSES_LISTED = 100
"""More classes have no recall and precision of their own in the log files."""
_MOST_IN_MATRIX = 2000
"""Of more classes there is no confusion matrix: of 20,000 it would have 3 GB, for each batch."""

_NO_LABEL = -(2**31)
"""None is left out: torch would leave out those of -100, and they would count in the mean all the same."""


@final
class ImageClassification(Task):
    """Cross-entropy over classes; accuracy, balanced accuracy (the mean of the classes' recalls, where they
    have unequal numbers of samples), top-5 accuracy (of more than five classes), loss, each class's recall
    and precision (up to a hundred classes), and a confusion matrix (up to 2,000).

    model: as `ddptrain.recipes.pictures.classifier` calls it. data: any whose batches are (images, labels),
    float (n, C, H, W) and int64 (n,), and whose ``outputs`` are the classes. label_smoothing: in [0, 1)
    (Szegedy et al., arXiv 1512.00567), in training only; of soft targets too. tta: level of
    `ddptrain.recipes.views.Views` in evaluation and ``predict``; an export is without. class_weights: factors
    of the classes' losses, in training only: numbers, or ``balanced``, the inverse of a class's share of the
    training samples divided by the number of classes. best_metric: what ``checkpoints/best`` is the best in.
    """

    def __init__(
        self,
        model: Callable[..., nn.Module],
        data: Data,
        label_smoothing: float = 0.0,
        tta: int = 0,
        class_weights: Literal["balanced"] | list[float] | None = None,
        best_metric: Literal["accuracy", "balanced_accuracy", "loss"] = "accuracy",
    ) -> None:
        check_label_smoothing(label_smoothing)
        self._model = model
        self._data = data
        check_level(tta)
        self._label_smoothing = label_smoothing
        self._tta = tta
        self._weights = ClassWeights(class_weights)
        self.best_metric = best_metric
        self.higher_is_better = best_metric != "loss"

    def build(self) -> nn.Module:
        self._weights.prepare(self._data)
        return classifier(self._model, self._data, multi_label=False)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
        images, labels = batch  # int64 (n,) classes, or float32 (n, classes) shares of mixed samples
        logits = self._logits(model, model, images)
        check_labels(labels, logits, one_each=True)
        try:
            loss = functional.cross_entropy(
                logits,
                labels,
                self._weights.on(logits.device),
                ignore_index=_NO_LABEL,
                reduction="sum",
                label_smoothing=self._label_smoothing,
            )
        except IndexError as error:
            check_range(error, logits.shape[1])
            raise
        return Loss(loss, len(labels))

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        images, labels = batch
        logits = self._logits(model, Views(model, self._tta), images).float()
        classes = logits.shape[1]
        try:
            loss = functional.cross_entropy(logits, labels, ignore_index=_NO_LABEL, reduction="sum")
        except IndexError as error:
            check_range(error, classes)
            raise
        answers = logits.argmax(dim=1)
        if classes <= _MOST_IN_MATRIX:
            cells = _counted(labels * classes + answers, classes * classes)
            counts = {"confusion": cells.view(classes, classes)}
        else:
            right = _counted(labels, classes, answers == labels)
            counts = {
                "right": right,
                "actual": _counted(labels, classes),
                "predicted": _counted(answers, classes),
            }
        best_five = logits.topk(min(5, classes), dim=1).indices
        return {"loss": loss, "in_top5": (best_five == labels[:, None]).sum(), **counts}

    def predict(self, model: nn.Module, source: str, out: str = "predictions", top: int = 3) -> Iterator[str]:
        """A line for each picture that ``source`` names (a file, a folder with those below, a pattern): the
        ``top`` likeliest classes. Pictures are cut and scaled as `ddptrain.data.pictures.fitted` does it.

        Under ``out``: ``predictions.csv``, and the pictures with their answers on sheets, ``sheet-<n>.png``.
        """
        if top < 1:
            raise UserError(f"top={top}: must be 1 or more.")
        names, views = self._data.outputs, Views(model, self._tta)
        best = min(top, len(names))
        heads = [f"{head}_{place}" for place in range(1, best + 1) for head in ("label", "probability")]

        def describe(probabilities: Tensor) -> Description:
            shares, labels = (values.tolist() for values in probabilities.topk(best))
            answers = [(names[label], share) for label, share in zip(labels, shares, strict=True)]
            cells = [part for name, share in answers for part in (name, f"{share:.6g}")]
            lines = [f"{name} {share:.1%}" for name, share in answers]
            return Description(cells, ", ".join(lines), lines[0])

        def answer(images: Tensor) -> Tensor:
            return self._logits(model, views, images).float().softmax(dim=1)

        yield from predictions(answer, self._data, source, out, heads, describe)

    def predict_sample(self, model: nn.Module, sample: "Named") -> Mapping[str, float]:
        """Each class's probability by its name, the likeliest first."""
        logits = self._logits(model, Views(model, self._tta), self._data.preprocess(sample))
        return by_name(logits[0].float().softmax(0), self._data.outputs)

    def _logits(self, model: nn.Module, views: nn.Module, images: Tensor) -> Tensor:
        """(n, classes). Raises UserError where the model has more or fewer outputs than there are classes."""
        logits: Tensor = views(images)
        check_outputs(logits, len(self._data.outputs), model, "classes", "(n, classes)")
        return logits

    def deploy(self, model: nn.Module, batch: int | None = None) -> Deployed:
        """float32 (n, C, H, W), normalised as in training -> logits (n, classes), for any n, or for ``batch``
        alone."""
        note_one_view(self._tta)
        return deployed(self, model, self._data, batch)

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        names, figures = self._data.outputs, {}
        if (confusion := sums.get("confusion")) is not None:
            figures["confusion"] = ConfusionMatrix(confusion.tolist(), names)
            of_classes = confusion.diagonal(), confusion.sum(dim=1), confusion.sum(dim=0)
        else:
            of_classes = sums["right"], sums["actual"], sums["predicted"]
        right, actual, predicted = (counts.double() for counts in of_classes)
        count = int(actual.sum())
        metrics = {"accuracy": int(right.sum()) / count}
        metrics["balanced_accuracy"] = float((right / actual).nanmean())  # NaN: no sample of the class
        if len(names) > 5:
            metrics["top5"] = int(sums["in_top5"]) / count
        metrics["loss"] = float(sums["loss"]) / count
        for i, name in enumerate(names if len(names) <= _MOST_CLASSES_LISTED else ()):
            for figure, of in (("recall", actual), ("precision", predicted)):
                if of[i]:
                    metrics[f"{figure}/{name}"] = float(right[i] / of[i])
        answers = predicted.nonzero().flatten().tolist()
        if len(answers) == 1 and len(names) > 1:
            log.warning(
                "note       every picture is taken for %r: usual in the first steps. Later the rate is too"
                " high or too low (find lr), or the averaged weights (ema.decay) or BatchNorm's statistics"
                " (its momentum) lag behind",
                names[answers[0]],
            )
        return Report(metrics, figures)


def _counted(places: Tensor, size: int, counts: Tensor | None = None) -> Tensor:
    """int64 (size,): how often each place comes; counts: which of them count."""
    # bincount would ask the device for the largest place: a sync point
    ones = torch.ones_like(places) if counts is None else counts.long()
    return places.new_zeros(size).scatter_add_(0, places, ones)
