"""What the Tasks on pictures share: the model of a data set, and pictures that a program or a user brings."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddptrain.api import Data, Deployed, Task, UserError
from ddptrain.data.detection.files import probe
from ddptrain.data.images.data import ImageData
from ddptrain.data.pictures import claim, fitted, named_pictures
from ddptrain.recipes.limits import check_batch
from ddptrain.recipes.logits import LogitsValidation
from ddptrain.recipes.outputs import check_zero_or_one, kind
from ddptrain.recipes.sheets import COLUMNS, ROWS, Titled, write_sheet

_BATCH = COLUMNS * ROWS
"""Pictures that go through the model, and onto a sheet, at once."""
_WANTED = "(images, labels): float images (n, C, H, W), normalised, and"


class Description(NamedTuple):
    """What is said of a picture."""

    cells: Sequence[object]
    """In ``predictions.csv``, after the file."""
    line: str
    title: str
    """Below it on a sheet."""


def by_name(probabilities: Tensor, names: Sequence[str]) -> Mapping[str, float]:
    """float (classes,) -> each class's, the largest first."""
    shares = zip(names, probabilities.tolist(), strict=True)
    return dict(sorted(shares, key=lambda share: -share[1]))


def classifier(model: Callable[..., nn.Module], data: Data, multi_label: bool) -> nn.Module:
    """The model of a config, with those of ``num_classes``, ``in_channels``, ``image_size`` and ``examples``
    that it has parameters for; they follow from the data.

    multi_label: labels are float (n, classes), 1 for each class that a picture has, and not int64 (n,).
    Raises UserError where the data name no classes, or give something else than pictures with such labels.
    """
    classes = len(data.outputs)
    if classes < 2:
        raise UserError(
            f"data: a classifier needs the names of two classes or more, and {type(data).__name__} has"
            f" {classes} (its `outputs`). With data=dataset set data.classes=[...] or their number."
        )
    if isinstance(data, ImageData):
        _check_labels(data.multi_label == multi_label, "of the other kind", multi_label, classes)
        if multi_label and not data.recalled:
            for labels in data.all_labels:
                check_zero_or_one(labels)
        (channels, height, width), examples = _shape(data), data.examples
    else:
        images, labels = _first(data)  # once: it starts the loader processes
        fits = labels.shape[1:] == ((classes,) if multi_label else ())
        fits = fits and (labels.is_floating_point() if multi_label else labels.dtype == torch.int64)
        _check_labels(fits, kind(labels), multi_label, classes)
        if multi_label:
            check_zero_or_one(labels)
        (channels, height, width), examples = images.shape[1:], _no_examples
    return model(num_classes=classes, in_channels=channels, image_size=(height, width), examples=examples)


def deployed(task: Task, model: nn.Module, data: Data, batch: int | None) -> Deployed:
    """As `Task.deploy` has it: float32 (n, C, H, W) -> logits (n, classes), for any n, or for ``batch``."""
    check_batch(batch)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch or 2, *_shape(data), generator=generator)
    about: Mapping[str, Any] = {"classes": list(data.outputs)}
    if isinstance(data, ImageData):
        about = data.preparation()
    about = {**about, "outputs": {"logits": "(batch, classes): a logit for each class"}}
    free, validation = batch is None, LogitsValidation(task)
    return Deployed(
        model, (images,), ("images",), ("logits",), any_batch=free, metadata=about, validation=validation
    )


def predictions(
    answer: Callable[[Tensor], Tensor],
    data: Data,
    source: str,
    out: str,
    heads: Sequence[str],
    describe: Callable[[Tensor], Description],
) -> Iterator[str]:
    """A line for each picture that ``source`` names, and one in ``out/predictions.csv``; the pictures are on
    sheets, ``out/sheet-<n>.png``. They are cut and scaled as in evaluation.

    answer: float32 (n, C, H, W), normalised -> probabilities, float32 (n, classes). heads: of the columns
    after the file's. describe: of a picture's probabilities, (classes,). Raises UserError, before anything is
    written, where a file can't be read or ``out`` is not empty.
    """
    if not isinstance(data, ImageData):
        raise UserError(
            f"predict: reads picture files, and how {type(data).__name__} makes its images of them is not"
            " known. Use data of ddptrain.data.images.data.ImageData, or export the model."
        )
    files, folder = named_pictures(source), Path(out)
    _check_sound(files)
    claim(folder)
    table = folder / "predictions.csv"
    with table.open("w", newline="", encoding="utf-8", errors="surrogateescape") as opened:
        rows = csv.writer(opened)
        rows.writerow(["file", *heads])
        for begin in range(0, len(files), _BATCH):
            part, shown = files[begin : begin + _BATCH], []
            pictures = torch.stack([fitted(file, data.shape, data.resize) for file in part])
            answers = answer(data.normalised(pictures)).cpu()
            for file, probabilities in zip(part, answers, strict=True):
                description = describe(probabilities)
                rows.writerow([file, *description.cells])
                shown.append(Titled(file, description.title))
                yield f"{file}: {description.line}\n"
            write_sheet(folder / f"sheet-{begin // _BATCH + 1:03}.png", shown)
    sheets = -(-len(files) // _BATCH)
    of = f"{len(files)} picture{'s' * (len(files) > 1)}"
    yield f"{out}: predictions.csv and {sheets} sheet{'s' * (sheets > 1)} of {of}"


def _check_labels(fits: bool, actual: str, multi_label: bool, classes: int) -> None:
    """Raise UserError unless they fit. actual: what they are."""
    wanted = "int64 (n,), one class a picture"
    if multi_label:
        wanted = f"float (n, {classes}), 1 for each class that a picture has, else 0"
    if not fits:
        raise UserError(
            f"data: the labels must be {wanted}, for this task, and are {actual}. For several classes a"
            " picture use task._target_=ddptrain.recipes.multilabel.MultiLabelClassification, for one"
            " ddptrain.recipes.image.ImageClassification."
        )


def _shape(data: Data) -> tuple[int, int, int]:
    """(channels, height, width) of the model's input."""
    if isinstance(data, ImageData):
        height, width, channels = data.shape
        return channels, height, width
    images, _ = _first(data)
    return images.shape[1], images.shape[2], images.shape[3]


def _first(data: Data) -> tuple[Tensor, Tensor]:
    """The first validation sample's batch. Raises UserError unless it is one of images and labels."""
    batch = next(iter(data.valid_batches([range(1)])))
    if not (
        isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(b, Tensor) for b in batch)
    ):
        kinds = ", ".join(map(kind, batch)) if isinstance(batch, tuple | list) else kind(batch)
        raise UserError(f"data: batches must be {_WANTED} labels. {type(data).__name__} gives ({kinds}).")
    images, labels = batch
    if images.ndim != 4 or not images.is_floating_point():
        raise UserError(
            f"data: batches must be {_WANTED} labels. The images of {type(data).__name__} are {kind(images)}."
        )
    return images, labels


def _no_examples(count: int) -> Tensor | None:
    raise UserError(
        "model: its first layer is made from training pictures, which only the sets of"
        " ddptrain.data.images.data.ImageData give. Choose one of those, or another model."
    )


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
