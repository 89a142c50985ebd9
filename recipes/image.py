"""Image classification: the Task that all image recipes share."""

from collections.abc import Callable, Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.data.images import ImageData
from ddptrain.errors import UserError
from ddptrain.protocols import At, ConfusionMatrix, Deployed, Loss, Report, Task


@final
class ImageClassification(Task):
    """Cross-entropy over classes; accuracy, top-5 accuracy, loss and a confusion matrix.

    model: called with those of ``num_classes``, ``in_channels`` and ``image_size`` (height, width)
    that it has parameters for; they follow from the data.
    label_smoothing: in [0, 1) (Szegedy et al., arXiv 1512.00567), in training only.
    """

    best_metric = "accuracy"
    higher_is_better = True

    def __init__(
        self, model: Callable[..., nn.Module], data: ImageData, label_smoothing: float = 0.0
    ) -> None:
        if not 0 <= label_smoothing < 1:
            raise UserError(f"task.label_smoothing={label_smoothing}: must be in [0, 1).")
        self._model = model
        self._data = data
        self._label_smoothing = label_smoothing

    def build(self) -> nn.Module:
        height, width, channels = self._data.shape
        return self._model(
            num_classes=len(self._data.classes), in_channels=channels, image_size=(height, width)
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], at: At) -> Loss:
        images, labels = batch
        logits = model(images)
        loss = functional.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=self._label_smoothing
        )
        return Loss(loss, len(labels))

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        images, labels = batch
        logits = model(images).float()
        classes = logits.shape[1]
        cells = labels * classes + logits.argmax(dim=1)
        confusion = torch.bincount(cells, minlength=classes * classes).view(classes, classes)
        best_five = logits.topk(min(5, classes), dim=1).indices
        return {
            "loss": functional.cross_entropy(logits, labels, reduction="sum"),
            "confusion": confusion,
            "in_top5": (best_five == labels[:, None]).sum(),
        }

    def deploy(self, model: nn.Module, batch: int = 1) -> Deployed:
        """float32 (n, C, H, W), normalised as in training -> logits (n, classes)."""
        if batch < 1:
            raise UserError(f"batch={batch}: must be 1 or more.")
        height, width, channels = self._data.shape
        images = torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(0))
        return Deployed(model, (images,), ("images",), ("logits",))

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        confusion = sums["confusion"]
        count = int(confusion.sum())
        metrics = {
            "accuracy": int(confusion.diagonal().sum()) / count,
            "top5": int(sums["in_top5"]) / count,
            "loss": float(sums["loss"]) / count,
        }
        matrix = ConfusionMatrix(confusion.tolist(), self._data.classes)
        return Report(metrics, {"confusion": matrix})
