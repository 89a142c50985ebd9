"""Image classification: the Task that all image recipes share."""

import csv
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.api import At, ConfusionMatrix, Deployed, Loss, Report, Task, UserError
from ddptrain.data.detection.files import probe
from ddptrain.data.images import ImageData
from ddptrain.data.pictures import claim, fitted, named_pictures
from ddptrain.recipes.sheets import COLUMNS, ROWS, Titled, write_sheet
from ddptrain.recipes.views import Views, check_level

log = logging.getLogger("ddptrain")

_BATCH = COLUMNS * ROWS
"""Pictures that `ImageClassification.predict` puts through the model, and on a sheet, at once."""


def _check_sound(files: Sequence[Path]) -> None:
    """Raise UserError naming all that can't be read."""
    problems = []
    for file in files:
        try:
            probe(file)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))


@final
class ImageClassification(Task):
    """Cross-entropy over classes; accuracy, top-5 accuracy, loss and a confusion matrix.

    model: called with those of ``num_classes``, ``in_channels``, ``image_size`` (height, width) and
    ``examples`` (`ImageData.examples`) that it has parameters for; they follow from the data.
    label_smoothing: in [0, 1) (Szegedy et al., arXiv 1512.00567), in training only; of soft targets too.
    tta: level of `ddptrain.recipes.views.Views` in evaluation and ``predict``; an export is without.
    """

    best_metric = "accuracy"
    higher_is_better = True

    def __init__(
        self, model: Callable[..., nn.Module], data: ImageData, label_smoothing: float = 0.0, tta: int = 0
    ) -> None:
        if not 0 <= label_smoothing < 1:
            raise UserError(f"task.label_smoothing={label_smoothing}: must be in [0, 1).")
        self._model = model
        self._data = data
        check_level(tta)
        self._label_smoothing = label_smoothing
        self._tta = tta

    def build(self) -> nn.Module:
        height, width, channels = self._data.shape
        return self._model(
            num_classes=len(self._data.classes),
            in_channels=channels,
            image_size=(height, width),
            examples=self._data.examples,
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], at: At) -> Loss:
        images, labels = batch  # int64 (n,) classes, or float32 (n, classes) shares of mixed samples
        logits = model(images)
        loss = functional.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=self._label_smoothing
        )
        return Loss(loss, len(labels))

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        images, labels = batch
        logits = Views(model, self._tta)(images).float()
        classes = logits.shape[1]
        cells = labels * classes + logits.argmax(dim=1)
        # bincount would ask the device for the largest cell: a sync point
        counts = cells.new_zeros(classes * classes).scatter_add_(0, cells, torch.ones_like(cells))
        best_five = logits.topk(min(5, classes), dim=1).indices
        return {
            "loss": functional.cross_entropy(logits, labels, reduction="sum"),
            "confusion": counts.view(classes, classes),
            "in_top5": (best_five == labels[:, None]).sum(),
        }

    def predict(self, model: nn.Module, source: str, out: str = "predictions", top: int = 3) -> Iterator[str]:
        """A line for each picture that ``source`` names (a file, a folder with those below, a pattern): the
        ``top`` likeliest classes. Pictures are cut and scaled as `ddptrain.data.pictures.fitted` does it.

        Under ``out``: ``predictions.csv``, and the pictures with their answers on sheets, ``sheet-<n>.png``.
        """
        if top < 1:
            raise UserError(f"top={top}: must be 1 or more.")
        files, folder = named_pictures(source), Path(out)
        _check_sound(files)  # before anything is written
        claim(folder)
        best = min(top, len(self._data.classes))
        heads = [f"{head}_{place}" for place in range(1, best + 1) for head in ("label", "probability")]
        with (folder / "predictions.csv").open(
            "w", newline="", encoding="utf-8", errors="surrogateescape"
        ) as table:
            rows = csv.writer(table)
            rows.writerow(["file", *heads])
            for begin in range(0, len(files), _BATCH):
                shown = []
                for file, answers in self._answers(model, files[begin : begin + _BATCH], best):
                    rows.writerow([file, *(part for name, p in answers for part in (name, f"{p:.6g}"))])
                    told = [f"{name} {p:.1%}" for name, p in answers]
                    shown.append(Titled(file, told[0]))
                    yield f"{file}: {', '.join(told)}\n"
                write_sheet(folder / f"sheet-{begin // _BATCH + 1:03}.png", shown)
        sheets = -(-len(files) // _BATCH)
        of = f"{len(files)} picture{'s' * (len(files) > 1)}"
        yield f"{out}: predictions.csv and {sheets} sheet{'s' * (sheets > 1)} of {of}"

    def _answers(
        self, model: nn.Module, files: Sequence[Path], best: int
    ) -> Iterator[tuple[Path, list[tuple[str, float]]]]:
        """For each file the ``best`` likeliest classes and their probabilities, in [0, 1]."""
        shape, resize = self._data.shape, self._data.resize
        pictures = torch.stack([fitted(file, shape, resize) for file in files])
        logits: Tensor = Views(model, self._tta)(self._data.normalised(pictures))
        shares, labels = logits.float().softmax(dim=1).topk(best, dim=1)
        for file, which, how in zip(files, labels.tolist(), shares.tolist(), strict=True):
            yield file, [(self._data.classes[label], p) for label, p in zip(which, how, strict=True)]

    def deploy(self, model: nn.Module, batch: int | None = None) -> Deployed:
        """float32 (n, C, H, W), normalised as in training -> logits (n, classes), for any n, or for ``batch``
        alone."""
        if batch is not None and batch < 1:
            raise UserError(f"batch={batch}: must be 1 or more, or null for any.")
        height, width, channels = self._data.shape
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(batch or 2, channels, height, width, generator=generator)
        about = self._data.preparation()
        return Deployed(model, (images,), ("images",), ("logits",), any_batch=batch is None, metadata=about)

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        confusion = sums["confusion"]
        count = int(confusion.sum())
        metrics = {
            "accuracy": int(confusion.diagonal().sum()) / count,
            "top5": int(sums["in_top5"]) / count,
            "loss": float(sums["loss"]) / count,
        }
        predicted = confusion.sum(dim=0).nonzero().flatten().tolist()
        if len(predicted) == 1 and len(self._data.classes) > 1:
            log.warning(
                "note       every picture is taken for %r: usual in the first steps; later a rate that is too"
                " high or too low, or BatchNorm statistics that lag behind (model.norm_momentum=0.1)",
                self._data.classes[predicted[0]],
            )
        matrix = ConfusionMatrix(confusion.tolist(), self._data.classes)
        return Report(metrics, {"confusion": matrix})
