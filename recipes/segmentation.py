"""Semantic segmentation: a class for every pixel."""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

from ddptrain.api import ConfusionMatrix, Deployed, Figure, Loss, Picture, Progress, Report, Task, UserError
from ddptrain.data.detection.files import probe
from ddptrain.data.masks.data import MaskData, Masked
from ddptrain.data.masks.files import IGNORED, PALETTE, blended, scaled
from ddptrain.data.pictures import check_apart, claim, decoded, named_pictures
from ddptrain.recipes.limits import check_batch
from ddptrain.recipes.logits import LogitsValidation
from ddptrain.recipes.outputs import check_outputs, kind

if TYPE_CHECKING:
    from ddptrain.data.pictures import Named

log = logging.getLogger("ddptrain")

_AUX = 0.5
"""Weight of the loss of the auxiliary head, as in torchvision's references."""
_SHOWN = 4
"""Validation pictures that are drawn at each evaluation."""


@final
class Segmentation(Task):
    """Cross-entropy over the pixels that count; mean IoU, accuracy and loss over all of them.

    model: called with ``num_classes``; gives a dictionary, as torchvision's segmentation models do.
    """

    best_metric = "miou"
    higher_is_better = True

    def __init__(self, model: Callable[..., nn.Module], data: MaskData) -> None:
        self._model = model
        self._data = data

    def build(self) -> nn.Module:
        return self._model(num_classes=len(self._data.classes))

    def loss(self, model: nn.Module, batch: Masked, progress: Progress) -> Loss:
        """Divided by the pixels that count in the whole global batch: ranks differ in how many they have."""
        images, truth = batch
        try:
            output = model(images)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise UserError(
                f"model: one picture of {self._data.size} pixels at once leaves a map of one cell, and"
                " BatchNorm needs more than one value. Use a larger train.batch_size or train.micro_batch, or"
                " model.name=fcn_resnet50.",
                everywhere=False,
            ) from error
        loss = _cross_entropy(self._logits_in(output, model), truth)
        if "aux" in output:
            loss = loss + _AUX * _cross_entropy(self._logits_in(output, model, "aux"), truth)
        # Both in units of about a picture's pixels, or fp16 overflows before the engine divides by the count.
        # A power of two changes no bit
        unit = 2.0 ** round(math.log2(truth[0].numel()))
        return Loss(loss / unit, (truth != IGNORED).sum() / unit)

    def evaluate(self, model: nn.Module, batch: Masked) -> Mapping[str, Tensor]:
        images, truth = batch
        logits = self._logits_in(model(images), model).float()
        classes = logits.shape[1]
        # picking out what counts, or bincount, would ask the device for a number: a sync point
        outside = classes * classes
        cells = torch.where(truth == IGNORED, outside, truth * classes + logits.argmax(dim=1)).flatten()
        counts = cells.new_zeros(outside + 1).scatter_add_(0, cells, torch.ones_like(cells))
        return {"loss": _cross_entropy(logits, truth), "confusion": counts[:-1].view(classes, classes)}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        """IoU of a class: pixels of it that were found / pixels that are of it or were taken for it.
        ``miou``: the mean over the classes that occur in either."""
        confusion, classes = sums["confusion"], self._data.classes
        right, true, predicted = confusion.diagonal(), confusion.sum(dim=1), confusion.sum(dim=0)
        count = int(confusion.sum())
        if not count:
            raise UserError("data: every pixel of the validation masks is 255, which does not count.")
        iou = {
            f"iou/{name}": int(right[i]) / int(true[i] + predicted[i] - right[i])
            for i, name in enumerate(classes)
            if true[i] + predicted[i]
        }
        _note_one_class(true, predicted, classes)
        metrics = {
            "miou": sum(iou.values()) / len(iou),
            "pixel_accuracy": int(right.sum()) / count,
            "loss": float(sums["loss"]) / count,
            **iou,
        }
        return Report(metrics, {"confusion": ConfusionMatrix(confusion.tolist(), classes)})

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        """Rows of a validation picture, its mask, and what was predicted."""
        pictures, truth = self._data.valid_samples(_SHOWN)
        predicted = model(self._data.normalised(pictures))["out"].argmax(dim=1).cpu()
        pixels = pictures.permute(0, 3, 1, 2)
        rows = torch.stack([pixels, blended(pixels, truth), blended(pixels, predicted)], dim=1)
        return {"predictions": Picture(make_grid(rows.flatten(0, 1), nrow=3, padding=4, pad_value=255))}

    def predict(self, model: nn.Module, source: str, out: str = "predictions") -> Iterator[str]:
        """A line for each picture that ``source`` names (a file, a folder with those below, a pattern): the
        share of each class.

        Under ``out``: ``masks/``, palette PNGs in the pictures' own sizes, as `MaskData` reads them, and
        ``overlays/``, the pictures half in their classes' colours.
        """
        files, folder = named_pictures(source), Path(out)
        above = Path(os.path.commonpath([file.parent for file in files]))
        names = [file.relative_to(above) for file in files]
        check_apart("source", names)
        for file in files:
            probe(file)  # before anything is written
        claim(folder)
        for file, name in zip(files, names, strict=True):
            picture = decoded(file, "RGB")
            classes = self._classes_of(model, picture)
            mask = Image.fromarray(classes.numpy())
            mask.putpalette(PALETTE)
            _save(mask, folder / "masks" / name.with_suffix(".png"))
            overlay = blended(pil_to_tensor(picture), classes)
            _save(to_pil_image(overlay), folder / "overlays" / name.with_suffix(".jpg"))
            yield f"{file}: {_shares(classes, self._data.classes)}\n"
        yield f"{out}: masks and overlays of {len(files)} picture{'s' * (len(files) > 1)}"

    def predict_sample(self, model: nn.Module, sample: "Named") -> Tensor:
        """uint8 (H, W): the class of each pixel of the picture."""
        return self._classes_of(model, decoded(sample, "RGB"))

    def _logits_in(self, output: Any, model: nn.Module, head: str = "out") -> Tensor:
        """(n, classes, H, W), of a head. Raises UserError where it has not as many outputs as there are
        classes."""
        if not isinstance(output, Mapping) or head not in output:
            raise UserError(f"model: gives {kind(output)}; must be a dictionary with the logits as {head!r}.")
        logits: Tensor = output[head]
        check_outputs(logits, len(self._data.classes), model, "classes", "(n, classes, height, width)")
        return logits

    def _classes_of(self, model: nn.Module, picture: Image.Image) -> Tensor:
        """uint8 (H, W), on the CPU: of each pixel in the picture's own size."""
        window = scaled(picture.height, picture.width, self._data.size)
        logits = model(self._data.preprocess(picture))["out"][0, :, : window.height, : window.width]
        size = (picture.height, picture.width)
        classes = torch.zeros(size, dtype=torch.uint8, device=logits.device)
        best = _scaled_up(logits[0], size)
        for label in range(1, len(logits)):  # one class at a time: of 12 megapixels each takes 48 MB
            plane = _scaled_up(logits[label], size)
            classes[plane > best] = label
            best = best.maximum(plane)
        return classes.cpu()

    def deploy(self, model: nn.Module, batch: int | None = None) -> Deployed:
        """float32 (n, 3, size, size), normalised as in training -> logits (n, classes, size, size), for any
        n, or for ``batch`` alone."""
        check_batch(batch)
        size = self._data.size
        images = torch.randn(batch or 2, 3, size, size, generator=torch.Generator().manual_seed(0))
        meaning = "(batch, classes, height, width): a logit for each class and pixel of the input"
        about = {**self._data.preparation(), "outputs": {"logits": meaning}}
        module, free = _Logits(model).eval(), batch is None
        validation = LogitsValidation(self, lambda logits: {"out": logits})
        return Deployed(
            module, (images,), ("images",), ("logits",), any_batch=free, metadata=about, validation=validation
        )


@final
class _Logits(nn.Module):
    """The main head alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self._model(images)["out"]
        return logits


def _cross_entropy(logits: Tensor, truth: Tensor) -> Tensor:
    """0-d: the sum over the pixels that count."""
    # not reduction="sum", whose order of addition differs from run to run on a GPU
    return functional.cross_entropy(logits, truth, ignore_index=IGNORED, reduction="none").sum()


def _scaled_up(plane: Tensor, size: tuple[int, int]) -> Tensor:
    """(h, w) -> float32 ``size``, bilinearly."""
    return functional.interpolate(plane.float()[None, None], size=size, mode="bilinear")[0, 0]


def _note_one_class(true: Tensor, predicted: Tensor, classes: Sequence[str]) -> None:
    """Warn where one class is all there is: in the masks, probably by mistake, or in what is predicted."""
    masks = "the validation masks hold no class but %r; 255 does not count (a mask of 0 and 255 has one)"
    answers = "every pixel is taken for %r: usual in the first steps; later a rate too high or too low"
    for pixels, what in ((true, masks), (predicted, answers)):
        present = pixels.nonzero().flatten().tolist()
        if len(present) == 1:
            log.warning(f"note       {what}", classes[present[0]])


def _save(picture: Image.Image, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.save(file)


def _shares(classes: Tensor, names: Sequence[str]) -> str:
    """The classes that occur, the largest first, with their shares."""
    counts = classes.flatten().bincount(minlength=len(names)).tolist()
    shares = sorted(zip(counts, names, strict=True), key=lambda of: -of[0])
    return ", ".join(f"{name} {count / classes.numel():.1%}" for count, name in shares if count)
