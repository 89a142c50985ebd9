"""Pictures that have any number of classes each."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.api import Data, Deployed, Loss, Progress, Report, Rows, Task, UserError
from ddptrain.recipes.class_weights import ClassWeights
from ddptrain.recipes.limits import check_label_smoothing
from ddptrain.recipes.outputs import check_labels, check_outputs, check_zero_or_one
from ddptrain.recipes.pictures import Description, by_name, classifier, deployed, predictions
from ddptrain.recipes.views import Views, check_level, note_one_view

if TYPE_CHECKING:
    from ddptrain.data.pictures import Named


@final
class MultiLabelClassification(Task):
    """Binary cross-entropy of each class; mean average precision, F1 at a probability of 0.5, and loss.

    model, tta: as `ddptrain.recipes.image.ImageClassification` has them. data: any whose batches are (images,
    labels), float (n, C, H, W) and float (n, classes), 1 for each class that a picture has. label_smoothing:
    in [0, 1), in training only: 1 becomes 1 - half of it, 0 becomes half of it. class_weights: factors of the
    losses where a class is there: numbers, or ``balanced``, pictures without it divided by pictures with it.
    """

    best_metric = "map"
    higher_is_better = True

    def __init__(
        self,
        model: Callable[..., nn.Module],
        data: Data,
        label_smoothing: float = 0.0,
        tta: int = 0,
        class_weights: Literal["balanced"] | list[float] | None = None,
    ) -> None:
        check_label_smoothing(label_smoothing)
        check_level(tta)
        self._model = model
        self._data = data
        self._label_smoothing = label_smoothing
        self._tta = tta
        self._weights = ClassWeights(class_weights)

    def build(self) -> nn.Module:
        self._weights.prepare(self._data)
        return classifier(self._model, self._data, multi_label=True)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
        images, labels = batch
        logits = self._logits(model, model, images)
        check_labels(labels, logits, one_each=False)
        targets = labels * (1 - self._label_smoothing) + self._label_smoothing / 2
        losses = functional.binary_cross_entropy_with_logits(
            logits, targets, reduction="none", pos_weight=self._weights.on(logits.device)
        )
        return Loss(losses.mean(dim=1).sum(), len(labels))

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor | Rows]:
        images, labels = batch
        logits = self._logits(model, Views(model, self._tta), images).float()
        check_labels(labels, logits, one_each=False)
        losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return {"loss": losses.mean(dim=1).sum(), "answers": Rows(torch.stack([logits, labels], dim=1))}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        logits, labels = sums["answers"].unbind(dim=1)
        check_zero_or_one(labels)
        labels = labels == 1
        precisions = [average_precision(*pair) for pair in zip(logits.T, labels.T, strict=True)]
        defined = [p for p in precisions if p is not None]
        answered = logits > 0
        both = 2.0 * (answered & labels).sum(dim=0)
        either = answered.sum(dim=0) + labels.sum(dim=0)
        metrics = {
            "map": sum(defined) / len(defined) if defined else 0.0,
            "f1": float((both / either)[either > 0].mean()) if either.any() else 1.0,
            "loss": float(sums["loss"]) / len(logits),
        }
        names = zip(self._data.outputs, precisions, strict=True)
        return Report(metrics | {f"ap/{name}": p for name, p in names if p is not None})

    def predict(
        self, model: nn.Module, source: str, out: str = "predictions", threshold: float = 0.5
    ) -> Iterator[str]:
        """A line for each picture that ``source`` names (a file, a folder with those below, a pattern): the
        classes of at least this probability.

        Under ``out``: ``predictions.csv``, with the probabilities of all classes, and the pictures with their
        answers on sheets, ``sheet-<n>.png``.
        """
        if not 0 < threshold < 1:
            raise UserError(f"threshold={threshold}: must be between 0 and 1.")
        names, views = self._data.outputs, Views(model, self._tta)

        def describe(probabilities: Tensor) -> Description:
            shares = probabilities.tolist()
            has = [
                f"{name} {share:.1%}" for name, share in zip(names, shares, strict=True) if share >= threshold
            ]
            line = ", ".join(has) or "none"
            return Description([f"{share:.6g}" for share in shares], line, line)

        def answer(images: Tensor) -> Tensor:
            return self._logits(model, views, images).float().sigmoid()

        yield from predictions(answer, self._data, source, out, names, describe)

    def predict_sample(self, model: nn.Module, sample: "Named") -> Mapping[str, float]:
        """Each class's probability by its name, the likeliest first."""
        logits = self._logits(model, Views(model, self._tta), self._data.preprocess(sample))
        return by_name(logits[0].float().sigmoid(), self._data.outputs)

    def _logits(self, model: nn.Module, views: nn.Module, images: Tensor) -> Tensor:
        """(n, classes). Raises UserError where the model has more or fewer outputs than there are classes."""
        logits: Tensor = views(images)
        check_outputs(logits, len(self._data.outputs), model, "classes", "(n, classes)")
        return logits

    def deploy(self, model: nn.Module, batch: int | None = None) -> Deployed:
        """float32 (n, C, H, W), normalised as in training -> logits (n, classes), for any n, or for ``batch``
        alone; a class's probability is the sigmoid of its logit."""
        note_one_view(self._tta)
        return deployed(self, model, self._data, batch)


def average_precision(scores: Tensor, positive: Tensor) -> float | None:
    """The area below the steps of precision over recall, as scikit-learn's ``average_precision_score`` has
    it: equal scores are one step. None without a positive.

    scores: float (n,). positive: bool (n,).
    """
    if not positive.any():
        return None
    order = scores.argsort(descending=True)
    ranked = scores[order]
    ends = torch.cat([ranked[1:] != ranked[:-1], ranked.new_ones(1, dtype=torch.bool)])
    hits = positive[order].double().cumsum(0)[ends]
    precision = hits / (ends.nonzero().flatten() + 1)
    gained = hits.diff(prepend=hits.new_zeros(1)) / hits[-1]
    return float((precision * gained).sum())
