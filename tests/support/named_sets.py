"""Sets whose pictures show their classes by colour, so that what a label should be can be seen: in every kind
of labelled set, with any names for either part.

Single-label pictures have one colour; others have one in each half, for up to two classes. A mask's pixels
and a box lie where the colour is.
"""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from ddptrain.api.world import World
from ddptrain.data.dataset import DatasetData
from ddptrain.data.detection.augment import DetectionAugment
from ddptrain.data.detection.coco import CocoFiles
from ddptrain.data.detection.data import DetectionData
from ddptrain.data.detection.source import ArrayScenes, DetectionSet, DetectionSource, Objects
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.csv_labels import CsvLabels
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.dataset import DatasetImages
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.images.source import ArraySplit, ImageSet, ImageSource
from ddptrain.data.masks.data import MaskData
from ddptrain.data.stream.boxes import StreamBoxes
from ddptrain.data.stream.images import StreamImages
from ddptrain.data.stream.masks import StreamMasks

Names = Sequence[str]
SIDE = 32
COLOURS = {
    "ant": (220, 20, 20), "bee": (20, 220, 20), "cat": (20, 20, 220), "dog": (220, 220, 20),
    "aaa": (20, 220, 220), "cow": (220, 20, 220), "Ant": (130, 130, 130),
}  # fmt: skip
TRAINED = ("ant", "bee", "cat")
MEAN, STD = (100.0, 110.0, 90.0), (50.0, 60.0, 70.0)
"""Of a set in memory, or streamed from one."""


def picture(names: Names, side: int = SIDE) -> Image.Image:
    """Of one class, or of two, one in each half."""
    made = Image.new("RGB", (side, side), COLOURS[names[0]])
    made.paste(COLOURS[names[-1]], (side // 2, 0, side, side))
    return made


def seen(pixels: Tensor) -> set[str]:
    """The classes that a picture shows: (3, H, W), 0 to 255."""
    height, width = pixels.shape[1:]
    found = [pixels[:, height // 2, int(width * at)] for at in (0.25, 0.75)]
    return {
        min(COLOURS, key=lambda name: float((one - torch.tensor(COLOURS[name])).abs().sum())) for one in found
    }


def shown(classes: Names, several: bool = False) -> list[tuple[str, ...]]:
    """The pictures of a part: three of each class; of several labels also two classes at once."""
    each = [(name,) for name in classes for _ in range(3)]
    return each + [(a, b) for a in classes for b in classes if a < b] * several


# -- pictures with classes ----------------------------------------------------------------------------


class Drawn(ImageSource):
    """In memory. mean, std: its own."""

    name = "drawn"

    def __init__(
        self, train: Names, valid: Names, several: bool = False, side: int = SIDE,
        mean: Sequence[float] = MEAN, std: Sequence[float] = STD, grey: bool = False,
    ) -> None:  # fmt: skip
        self._names = (train, valid)
        self._several = several
        self._side = side
        self._normal = (mean, std)
        self._grey = grey

    def fetch(self, root: Path) -> None:
        pass

    def open(self, root: Path) -> ImageSet:
        train, valid = (self._split(names) for names in self._names)
        mean, std = (list(of[: 1 if self._grey else 3]) for of in self._normal)
        return ImageSet(train, valid, list(self._names[0]), mean, std)

    def _split(self, names: Names) -> ArraySplit:
        of = shown(names, self._several)
        images = torch.stack([pil_to_tensor(picture(own, self._side)).permute(1, 2, 0) for own in of])
        labels = torch.tensor([names.index(own[0]) for own in of])
        if self._several:
            labels = torch.tensor([[float(name in own) for name in names] for own in of])
        return ArraySplit(images[..., :1] if self._grey else images, labels)


class Listed:
    """A map-style dataset. tells: whether it names its classes. lists: whether it tells all labels at once.
    as_tensor: samples are normalised pixels, as `DatasetData` is given them. label: what a class's number is
    turned into."""

    def __init__(
        self, names: Names, tells: bool = True, as_tensor: bool = False, lists: bool = True,
        label: Callable[[int], Any] = int,
    ) -> None:  # fmt: skip
        self._shown = [name for (name,) in shown(names)]
        self._as_tensor = as_tensor
        self._own = [label(list(names).index(name)) for name in self._shown]
        if lists:
            self.targets = self._own
        if tells:
            self.classes = list(names)

    def __len__(self) -> int:
        return len(self._shown)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        made = picture([self._shown[i]])
        if self._as_tensor:
            mean, std = (torch.tensor(of)[:, None, None] for of in (MEAN, STD))
            return (pil_to_tensor(made).float() - mean) / std, self._own[i]
        return made, self._own[i]


def image_data(source: ImageSource, root: Path | str = "data", **more: Any) -> ImageData:
    return ImageData(source, Augment(), str(root), workers=0, **more)


def in_folders(root: Path, train: Names, valid: Names | None) -> Path:
    for part, names in (("train", train), ("val", valid or ())):
        for i, (name,) in enumerate(shown(names)):
            (root / part / name).mkdir(parents=True, exist_ok=True)
            picture([name]).save(root / part / name / f"{i}.png")
    return root


def in_csv(root: Path, rows: Sequence[tuple[tuple[str, ...], str]], column: str = "label") -> Path:
    """rows: classes and split of each."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / "labels.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["file", column, "split"])
        for i, (names, split) in enumerate(rows):
            picture(names).save(root / f"{i}.png")
            lines.writerow([f"{i}.png", ";".join(names), split])
    return root


def stream_of(out: Path, names: Names, several: bool = False, **more: Any) -> Path:
    """Both parts have these classes; `valid_url` takes the second."""
    list(image_data(Drawn(names, names, several, **more)).write(out))
    return out


def _folders(root: Path, train: Names, valid: Names) -> ImageData:
    return image_data(ImageFolder(SIDE), in_folders(root, train, valid))


def _csv(root: Path, train: Names, valid: Names) -> ImageData:
    rows = [(own, part) for part, names in (("train", train), ("val", valid)) for own in shown(names)]
    return image_data(CsvLabels(size=SIDE), in_csv(root, rows))


def _csv_labels(root: Path, train: Names, valid: Names) -> ImageData:
    rows = [(own, part) for part, names in (("train", train), ("val", valid)) for own in shown(names, True)]
    return image_data(CsvLabels(size=SIDE), in_csv(root, rows, "labels"))


def _image_dataset(root: Path, train: Names, valid: Names) -> ImageData:
    return image_data(DatasetImages(Listed(train), Listed(valid), size=SIDE))


def _image_dataset_named(root: Path, train: Names, valid: Names) -> ImageData:
    """The first does not tell its classes; the config does."""
    return image_data(DatasetImages(Listed(train, tells=False), Listed(valid), list(train), SIDE))


def _dataset(root: Path, train: Names, valid: Names) -> DatasetData:
    return DatasetData(Listed(train, as_tensor=True), Listed(valid, as_tensor=True), workers=0)


def _dataset_named(root: Path, train: Names, valid: Names) -> DatasetData:
    own = Listed(train, tells=False, as_tensor=True)
    return DatasetData(own, Listed(valid, as_tensor=True), classes=list(train), workers=0)


def _stream(root: Path, train: Names, valid: Names) -> ImageData:
    return _two_streams(root, train, valid, several=False)


def _stream_labels(root: Path, train: Names, valid: Names) -> ImageData:
    return _two_streams(root, train, valid, several=True)


def _two_streams(root: Path, train: Names, valid: Names, several: bool) -> ImageData:
    urls = [str(stream_of(root / part, names, several)) for part, names in (("one", train), ("two", valid))]
    return image_data(StreamImages(*urls, size=SIDE, cache=None), resident=False)


# -- masks and boxes ----------------------------------------------------------------------------------


def masks_in(root: Path, names: Names, part: str = "") -> Path:
    """A half of each picture is of a class, the other is of the first."""
    for i, name in enumerate(names * 2):
        mask = Image.new("L", (SIDE, SIDE), 0)
        mask.paste(list(names).index(name), (SIDE // 2, 0, SIDE, SIDE))
        for kind, image in (("images", picture([names[0], name])), ("masks", mask)):
            (root / part / kind).mkdir(parents=True, exist_ok=True)
            image.save(root / part / kind / f"{i}.png")
    (root / "classes.txt").write_text("".join(f"{name}\n" for name in names))
    return root


def stream_of_masks(out: Path, names: Names) -> Path:
    for part in ("train", "val"):
        masks_in(out.with_name(f"{out.name}-files"), tuple(names), part)
    list(MaskData(str(out.with_name(f"{out.name}-files")), SIDE, workers=0).write(out))
    return out


def _stream_masks(root: Path, train: Names, valid: Names) -> MaskData:
    urls = [str(stream_of_masks(root / part, names)) for part, names in (("one", train), ("two", valid))]
    return MaskData(size=SIDE, workers=0, source=StreamMasks(*urls, cache=None))


class DrawnBoxes(DetectionSource):
    """A box on the left half of each picture, in its class's colour."""

    name = "drawn"

    def __init__(self, train: Names, valid: Names, side: int = SIDE) -> None:
        self._names = (train, valid)
        self._side = side

    def open(self, root: Path) -> DetectionSet:
        return DetectionSet(*map(self._scenes, self._names), list(self._names[0]))

    def _scenes(self, names: Names) -> ArrayScenes:
        of = [name for (name,) in shown(names)]
        images = torch.stack([pil_to_tensor(picture([name], self._side)) for name in of])
        box, crowd = torch.tensor([[0.0, 0.0, self._side / 2, self._side]]), torch.zeros(1, dtype=torch.bool)
        objects = [Objects(box, torch.tensor([names.index(name)]), crowd) for name in of]
        return ArrayScenes(images, objects, [f"{i}.png" for i in range(len(of))])


def box_data(source: DetectionSource, side: Any = SIDE) -> DetectionData:
    return DetectionData(source, DetectionAugment(), size=side, workers=0)


def stream_of_boxes(out: Path, names: Names, side: int = SIDE) -> Path:
    list(box_data(DrawnBoxes(names, names, side)).write(out, "stream"))
    return out


def coco_of(root: Path, names: Names, part: str, numbers: Names | None = None) -> Path:
    """numbers: the names in the order of their ids, as they are by default."""
    ids = {name: 5 * (i + 1) for i, name in enumerate(numbers or names)}
    images, annotations = [], []
    for i, (name,) in enumerate(shown(names)):
        (root / part).mkdir(parents=True, exist_ok=True)
        picture([name]).save(root / part / f"{i}.png")
        images.append({"id": i, "file_name": f"{i}.png", "width": SIDE, "height": SIDE})
        box = [0, 0, SIDE / 2, SIDE]
        annotations.append({"id": i, "image_id": i, "category_id": ids[name], "bbox": box})
    categories = [{"id": number, "name": name} for name, number in ids.items()]
    file = root / part / "boxes.json"
    file.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return file


def _stream_boxes(root: Path, train: Names, valid: Names) -> DetectionData:
    urls = [str(stream_of_boxes(root / part, names)) for part, names in (("one", train), ("two", valid))]
    return box_data(StreamBoxes(*urls, cache=None))


def _coco(root: Path, train: Names, valid: Names) -> DetectionData:
    files = [str(coco_of(root, names, part)) for part, names in (("train", train), ("val", valid))]
    return box_data(CocoFiles(*files))


Set = ImageData | DatasetData | MaskData | DetectionData
KINDS: dict[str, Callable[[Path, Names, Names], Set]] = {
    "imagefolder": _folders, "csv": _csv, "csv, several": _csv_labels, "image_dataset": _image_dataset,
    "image_dataset, named": _image_dataset_named, "dataset": _dataset, "dataset, named": _dataset_named,
    "stream": _stream, "stream, several": _stream_labels, "stream_masks": _stream_masks,
    "stream_boxes": _stream_boxes, "coco": _coco,
}  # fmt: skip
"""Makes a set in a folder: its kind, with these classes for training and those for validation, each in their
order, where the kind lets them have one."""


def told(data: Set) -> Iterator[tuple[set[str], set[str]]]:
    """Of each validation sample of a prepared set: what its labels say it shows, and what can be seen."""
    names = data.outputs
    for batch in data.valid_batches([range(data.valid_size)]):
        if isinstance(data, DetectionData):
            for pixels, labels in zip(batch.images, batch.labels, strict=True):
                yield {names[label] for label in labels.tolist() if label >= 0}, seen(pixels * 255)
            continue
        images, labels = batch
        mean, std = (torch.tensor(of)[:, None, None] for of in _normal_of(data))
        for pixels, label in zip(images * std + mean, labels, strict=True):
            if label.ndim == 2:
                places = label.unique().tolist()
            else:
                places = label.nonzero().flatten().tolist() if label.ndim else [int(label)]
            yield {names[place] for place in places}, seen(pixels)


def _normal_of(data: Set) -> tuple[Sequence[float], Sequence[float]]:
    if isinstance(data, DatasetData):
        return MEAN, STD
    if isinstance(data, MaskData):
        return data.preparation()["mean"], data.preparation()["std"]
    assert isinstance(data, ImageData)
    return data.metadata()["mean"], data.metadata()["std"]


def prepared(data: Any) -> Any:
    data.prepare(World(), 0)
    return data
