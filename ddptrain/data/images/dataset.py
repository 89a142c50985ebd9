"""Labelled images out of any map-style dataset, to be cut, augmented and scaled by ddptrain."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from ddptrain.api.rng import state_of_generators
from ddptrain.data.agreement import note_other_labels, places_among, relabelled
from ddptrain.data.dataset import check_map_style, class_names
from ddptrain.data.held_out import is_held_out
from ddptrain.data.identity import label_column, of_samples
from ddptrain.data.images.folder import IMAGENET_MEAN, IMAGENET_STD, check_sizes
from ddptrain.data.images.source import ImageSet, ImageSource, Split
from ddptrain.data.left_out import BROKEN, HINT, UnusableSample
from ddptrain.data.pictures import Box, check_pixels, cut, fit, png_of, upright
from ddptrain.data.pipeline import MapStyle
from ddptrain.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

log = logging.getLogger("ddptrain")
_LABELS = ("targets", "labels", "_labels")
"""Attributes by which torchvision's datasets tell all labels."""
_ONE_AT_A_TIME = threading.Lock()
"""Blocks are written by threads; a dataset may have one open file."""


@final
class DatasetSplit(Split):
    """Some samples of a dataset."""

    full_size = True

    def __init__(
        self, dataset: MapStyle, ids: Tensor, labels: Tensor, size: int, resize: int | None = None,
        own_labels: Tensor | None = None, key: str = "data.source.dataset",
    ) -> None:  # fmt: skip
        """own_labels: what the dataset itself says of each sample, where that is not ``labels``. key: of the
        dataset."""
        self._dataset = dataset
        self._key = key
        self._ids = ids
        self._own_labels = labels if own_labels is None else own_labels
        self.labels = labels[ids]
        self.shape = (size, size, 3)
        self._resize = resize

    def images(self, ids: Tensor) -> Tensor:
        return torch.stack([fit(self._picture(i), self.shape, self._resize) for i in ids.tolist()])

    def cropped(self, i: int, box_of: Callable[[int, int], Box]) -> Tensor:
        whole = self._picture(i)
        return cut(whole, box_of(whole.height, whole.width), self.shape[:2])

    def encoded(self, i: int) -> bytes:
        with _ONE_AT_A_TIME:
            picture = self._picture(i)
        return png_of(picture)

    def fingerprints(self, ids: Sequence[int]) -> Iterator[bytes]:
        return of_samples(self._dataset, [int(self._ids[i]) for i in ids])

    def _picture(self, i: int) -> "Image.Image":
        sample = int(self._ids[i])
        try:
            picture, label = _parts(self._dataset[sample])
            picture = _as_picture(picture)
        except (*BROKEN, UserError) as error:
            raise UnusableSample(
                f"{self._key}: sample {sample} can't be used ({error}).{HINT}",
                everywhere=False,
            ) from error
        wanted = int(self._own_labels[sample])
        if getattr(label, "ndim", 0) or label != wanted:
            raise UserError(
                f"{self._key}: sample {sample} has the label {label}, and the list of all labels, in"
                f" {' or '.join(_LABELS)} of {type(self._dataset).__name__}, says {wanted}. Make both the"
                " same, or leave the list out.",
                everywhere=False,
            )
        return picture


@final
class DatasetImages(ImageSource):
    """The pictures of a map-style dataset whose samples are (picture, label), or dicts with ``image`` (or
    ``img``) and ``label``: Pillow's pictures, or uint8 (C, H, W) tensors or (H, W, C) arrays, not
    transformed.

    dataset: training samples. valid: validation samples; without it every tenth of ``dataset`` is held out.
    classes: as `ddptrain.data.dataset.DatasetData` has it. size, resize: as `ImageFolder` has them.
    """

    name = "dataset"
    each_rank = True

    def __init__(
        self,
        dataset: MapStyle,
        valid: MapStyle | None = None,
        classes: list[str] | int | None = None,
        size: int = 224,
        resize: int | None = None,
    ) -> None:
        check_sizes(size, resize)
        check_map_style(dataset, "data.source.dataset")
        if valid is not None:
            check_map_style(valid, "data.source.valid")
        self._dataset = dataset
        self._valid = valid
        self._classes = classes
        self.size: int = size
        self.resize = resize

    def fetch(self, root: Path) -> None:
        """The dataset fetches itself."""

    def open(self, root: Path) -> ImageSet:
        named = class_names(self._dataset, self._classes, "data.source.classes")
        for key, dataset in (("dataset", self._dataset), ("valid", self._valid)):
            _check_draws_nothing(dataset, f"data.source.{key}")
        labels = _labels(self._dataset, "data.source.dataset")
        everything = torch.arange(len(labels))
        tenth = is_held_out(everything)
        if self._valid is None:
            if not tenth.any():
                raise UserError(
                    f"data.source.dataset: every tenth of its samples is held out for validation, and it has"
                    f" {len(labels)}. Give ten or more, or samples for validation: data.source.valid."
                )
            train = DatasetSplit(self._dataset, everything[~tenth], labels, self.size)
            valid = DatasetSplit(self._dataset, everything[tenth], labels, self.size, self.resize)
        else:
            own_labels = _labels(self._valid, "data.source.valid")
            theirs = self._as_trained(own_labels)
            train = DatasetSplit(self._dataset, everything, labels, self.size)
            valid = DatasetSplit(
                self._valid, torch.arange(len(theirs)), theirs, self.size, self.resize, own_labels,
                "data.source.valid",
            )  # fmt: skip
        most = max(int(part.labels.max()) for part in (train, valid) if len(part)) + 1
        classes = named or tuple(map(str, range(most)))
        least = min(int(part.labels.min()) for part in (train, valid) if len(part))
        if most > len(classes) or least < 0:
            raise UserError(
                f"data.source.dataset: labels must be 0 to {len(classes) - 1}, for {len(classes)} classes,"
                f" and are {least} to {most - 1}. Name the classes by data.source.classes=[...], or give"
                " their number."
            )
        held_out = self._valid is None
        return ImageSet(train, valid, classes, IMAGENET_MEAN, IMAGENET_STD, self.resize, held_out)

    def _as_trained(self, labels: Tensor) -> Tensor:
        """The labels of the dataset for validation, by its classes' names where it has some."""
        own = class_names(self._valid, None, "data.source.valid")
        # classes=[...] may be other words for those that the dataset names
        configured = () if isinstance(self._classes, int) else tuple(self._classes or ())
        trained = class_names(self._dataset, None, "data.source.dataset") or configured
        if not own or not trained:
            return labels
        where, of = "data.source.valid", "data.source.dataset"
        places = places_among(trained, own, where, of)
        note_other_labels(places, where, of)
        return relabelled(labels, places, len(trained), where)


def _check_draws_nothing(dataset: MapStyle | None, key: str) -> None:
    """Raises UserError where its first sample draws random numbers: pictures in memory would keep what was
    drawn once, and evaluations differ."""
    if dataset is None:
        return
    before = state_of_generators()
    with suppress(Exception):  # whatever a dataset raises is said when the sample is needed
        dataset[0]
    if state_of_generators() != before:
        raise UserError(
            f"{key}: {type(dataset).__name__} draws random numbers for a picture. Leave its"
            " random transforms out, and give them as data.augment or augment=<preset>; or take it as it is:"
            " data=dataset."
        )


def _labels(dataset: MapStyle, key: str) -> Tensor:
    """int64 (n,), of all samples: as the dataset tells them, or by reading it once."""
    if not len(dataset):
        raise UserError(
            f"{key}: {type(dataset).__name__} has no sample. Its __len__ says 0; are its files there?"
        )
    changes = getattr(dataset, "target_transform", None) is not None  # torchvision's lists are without it
    for name in () if changes else _LABELS:
        labels_given = getattr(dataset, name, None)
        if labels_given is not None and not callable(labels_given) and len(labels_given) == len(dataset):
            break
    else:
        labels_given = None if changes else label_column(dataset)
    if labels_given is None:
        why = "changes its labels (target_transform)" if changes else "does not tell its labels (targets)"
        log.info("data       %s %s; it is read once", type(dataset).__name__, why)
        labels_given = [_label(dataset, i, key) for i in range(len(dataset))]
    try:
        labels = torch.as_tensor(labels_given)
    except (TypeError, ValueError, RuntimeError):  # words, lists of several lengths
        labels = torch.empty(0, 0)
    if labels.ndim != 1 or not torch.equal(labels.double(), labels.long().double()):
        raise UserError(
            f"{key}: the labels of {type(dataset).__name__} must be whole numbers, one for each"
            f" picture; the first is {labels_given[0]!r}."
        )
    return labels.long()


def _label(dataset: MapStyle, i: int, key: str) -> Any:
    try:
        return _parts(dataset[i])[1]
    except (*BROKEN, UserError) as error:
        raise UserError(
            f"{key}: sample {i} can't be used ({error}). Mend it, or have the dataset tell all labels"
            f" ({_LABELS[0]}), which are read from its samples otherwise."
        ) from error
    except Exception as error:
        error.add_note(f"(in sample {i} of {key})")
        raise


def _parts(sample: Any) -> tuple[Any, Any]:
    """(picture, label)"""
    if isinstance(sample, Mapping):
        picture = sample.get("image", sample.get("img"))
        if picture is not None and "label" in sample:
            return picture, sample["label"]
    elif isinstance(sample, tuple | list) and len(sample) == 2:
        return sample[0], sample[1]
    raise UserError("it must be (picture, label), or a dict with image and label")


def _as_picture(picture: Any) -> "Image.Image":
    """In colour, with 8 bits a channel."""
    from PIL import Image
    from torchvision.transforms.v2.functional import to_pil_image

    if not isinstance(picture, Image.Image):
        if str(getattr(picture, "dtype", "")).removeprefix("torch.") != "uint8" or picture.ndim not in (2, 3):
            raise UserError("its picture must be Pillow's, or of uint8; leave transforms out of the dataset")
        channels = 1 if picture.ndim == 2 else picture.shape[0 if isinstance(picture, Tensor) else -1]
        if channels not in (1, 3, 4):
            raise UserError(
                f"its picture has the shape {tuple(picture.shape)}; must be (C, H, W) of a tensor, (H, W, C)"
                " of an array, of 1 channel, 3, or 4 with alpha"
            )
        picture = to_pil_image(picture)
    check_pixels(picture, "its picture")
    return upright(picture, "RGB")
