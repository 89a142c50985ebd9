"""Pascal VOC (Everingham et al. 2010), found and read by torchvision."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final
from xml.etree import ElementTree

from ddptrain.data.detection import files
from ddptrain.data.detection.files import Box, FileScenes, ImageFile, Problems, Row
from ddptrain.data.detection.source import DetectionSet, DetectionSource
from ddptrain.data.left_out import OnError
from ddptrain.errors import UserError

if TYPE_CHECKING:
    from torchvision.datasets import VOCDetection

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train"),
    "tvmonitor",
)
_CLASS_RULE = f"must be one of VOC's 20 classes ({', '.join(CLASSES)})"
_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_ROUNDING = (1.0, 1.0)
_RULE = "corners count from 1 to its width and height (1 pixel beyond counts as rounding and is cut off)"


@final
@dataclass(frozen=True, eq=False)
class VocFiles(DetectionSource):
    """Pascal VOC as its archives unpack: ``root/VOCdevkit/VOC<year>`` (2011: ``root/TrainVal/VOCdevkit/...``)
    with Annotations, ImageSets/Main/{train,val}.txt and JPEGImages. Objects marked as difficult become
    crowds, by COCO's rule: in evaluation no box that lies in one counts, for or against.

    download: bring what is missing from VOC's site. on_error: "stop" refuses a set with problems and lists
    them; "skip" leaves out bad objects, and images that are missing, broken or have no annotation.
    """

    name = "voc"

    year: Literal[2007, 2008, 2009, 2010, 2011, 2012] = 2012
    download: bool = False
    on_error: OnError = "stop"

    @property
    def _below(self) -> str:
        return ("TrainVal/" if self.year == 2011 else "") + f"VOCdevkit/VOC{self.year}"

    def fetch(self, root: Path) -> None:
        from torchvision.datasets import VOCDetection

        if self.download and not (root / self._below).is_dir():
            try:
                VOCDetection(root, str(self.year), "train", download=True)
            except (OSError, RuntimeError) as error:
                raise UserError(
                    f"data.source.download=true: VOC{self.year} can't be brought to {root} ({error})."
                    f" Put it there yourself, as {root / self._below}."
                ) from error

    def forgiving(self) -> DetectionSource:
        return replace(self, on_error="skip")

    def open(self, root: Path) -> DetectionSet:
        train, valid = self._dataset(root, "train"), self._dataset(root, "val")
        problems = Problems(root / self._below, self.on_error)
        return problems.opened(
            FileScenes(_labelled(train, problems)), FileScenes(_labelled(valid, problems)), CLASSES
        )

    def _dataset(self, root: Path, image_set: str) -> "VOCDetection":
        from torchvision.datasets import VOCDetection

        try:
            return VOCDetection(root, str(self.year), image_set)
        except (RuntimeError, FileNotFoundError) as error:
            wanted = root / self._below / "ImageSets" / "Main" / f"{image_set}.txt"
            raise UserError(
                f"data.root={root}: holds no VOC{self.year}: {wanted} is missing. Unpack its archive into"
                f" {root} (data.root=... names another folder), or set data.source.download=true."
            ) from error


def _labelled(dataset: "VOCDetection", problems: Problems) -> Iterator[tuple[ImageFile, str, list[Row]]]:
    for image, annotation in zip(dataset.images, dataset.annotations, strict=True):
        try:
            picture = files.probe(Path(image))
            objects = objects_of(annotation, picture)
        except UserError as error:
            problems.add(str(error))
            continue
        rows = rows_of(objects, annotation, picture, CLASSES, _CLASS_RULE, problems)
        yield picture, f"JPEGImages/{picture.file.name}", rows


def objects_of(annotation: str | Path, picture: ImageFile) -> list[Any]:
    """What an annotation says of each object, as torchvision reads it. Raises UserError where it can't be
    read, or is of another size than its picture."""
    from torchvision.datasets import VOCDetection

    try:
        root = ElementTree.parse(annotation).getroot()
    except OSError as error:
        raise UserError(f"{annotation}: can't be read ({error.strerror}).") from error
    except ElementTree.ParseError as error:
        line, column = error.position
        reason = str(error).split(":")[0]
        raise UserError(f"{annotation}, line {line}, column {column + 1}: is not XML ({reason}).") from error
    except (ValueError, LookupError) as error:  # an encoding of which Python's parser knows nothing
        raise UserError(f"{annotation}: can't be read ({error}). Save it as UTF-8.") from error
    if root.tag != "annotation":
        raise UserError(f"{annotation}: must hold one <annotation>.")
    if not len(root):
        return []
    content = VOCDetection.parse_voc_xml(root)["annotation"]
    size = content.get("size")
    sides = [_pixels(size.get(side)) if isinstance(size, dict) else 0 for side in ("width", "height")]
    if 0 not in sides:
        files.check_size(picture, *sides)
    objects: list[Any] = content["object"]
    return objects


def _pixels(text: Any) -> Any:
    """A side as it is written; 0 where it is not known, as some tools write it, too."""
    try:
        number = float(text or 0)
    except (TypeError, ValueError):
        return text
    return int(number) if number.is_integer() else text


def rows_of(
    objects: Sequence[Any],
    annotation: str | Path,
    picture: ImageFile,
    classes: Sequence[str],
    rule: str,
    problems: Problems,
) -> list[Row]:
    """An annotation's `objects_of` as rows. rule: what a name has to be, where it is none of the classes."""
    rows = []
    for number, entry in enumerate(objects, 1):
        try:
            name = name_of(entry)
            if not isinstance(name, str) or name not in classes:
                raise UserError(f"name {name}: {rule}")
            box, difficult = _box_of(entry, picture)
            rows.append(Row(box, classes.index(name), difficult))
        except UserError as error:
            problems.add(f"{annotation}, object {number}: {error}.")
    return rows


def name_of(entry: Any) -> Any:
    """The class of one of `objects_of`; a str, unless there is none or several."""
    return entry.get("name") if isinstance(entry, dict) else None


def _box_of(entry: Mapping[str, Any], picture: ImageFile) -> tuple[Box, bool]:
    """And whether it is marked as difficult. Raises UserError that says what is wrong with it."""
    difficult = entry.get("difficult", "0")
    if difficult == "Unspecified":  # as some tools write what they do not know
        difficult = "0"
    if difficult not in ("0", "1"):
        raise UserError(f"difficult {difficult}: must be 0 or 1")
    corners = entry.get("bndbox")
    written = [corners.get(corner) if isinstance(corners, dict) else None for corner in _CORNERS]
    bndbox = f"bndbox {' '.join(map(str, written))}"
    try:
        x1, y1, x2, y2 = (float(value) for value in written if isinstance(value, str))
    except ValueError as error:
        raise UserError(f"{bndbox}: must be four numbers, {', '.join(_CORNERS)}") from error
    box = files.clipped(bndbox, (x1 - 1, y1 - 1, x2, y2), picture, _ROUNDING, _RULE)
    return box, difficult == "1"
