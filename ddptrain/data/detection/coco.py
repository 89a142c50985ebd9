"""COCO's layout: one JSON of instances for a part, and a folder of images (cocodataset.org/#format-data)."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ddptrain.data import held_out
from ddptrain.data.detection import files
from ddptrain.data.detection.files import FileScenes, ImageFile, Problems, Row
from ddptrain.data.detection.run_lengths import fills, of_json
from ddptrain.data.detection.source import DetectionSet, DetectionSource
from ddptrain.data.images.class_folders import VALID_NAMES
from ddptrain.data.left_out import OnError
from ddptrain.errors import UserError
from ddptrain.text import parse_json

_RULE = "its edges must lie within it (1 pixel beyond counts as rounding and is cut off)"
_ROUNDING = (1.0, 1.0)
_TRIED = 20  # Images looked for to find their folder: some may be missing
_EXPECTED = "the JSON of a set's instances, in COCO's format"


@final
class CocoFiles(DetectionSource):
    """A set described by one or two JSONs of instances.

    path: the JSON for training, relative to the current folder. valid_path: the one for validation; without
    it, the sibling in whose name or folder ``train`` is val, valid, validation, test or testing; where there
    is none, every tenth image, sorted by name, is held out. The images lie in the first folder that holds one
    of the first: the JSON's folder, its ``images``, its parent, the parent's ``images``, or in one of these a
    folder named as the JSON without ``instances_``. Categories count in the order of their ids.

    on_error: "stop" refuses a set with problems and lists them; "skip" leaves out bad annotations, and
    images that are missing or broken. masks: read each annotation's ``segmentation``. The argument ``root``
    of `open` isn't used.
    """

    name = "coco"

    def __init__(
        self,
        path: str | None = None,
        valid_path: str | None = None,
        on_error: OnError = "stop",
        masks: bool = False,
    ) -> None:
        self._file = files.checked_path(path, _EXPECTED)
        self._valid_file = Path(valid_path) if valid_path else None
        self._on_error = on_error
        self._masks = masks

    def forgiving(self) -> DetectionSource:
        valid_path = None if self._valid_file is None else str(self._valid_file)
        return CocoFiles(str(self._file), valid_path, "skip", self._masks)

    def open(self, root: Path) -> DetectionSet:
        files.check_exists(self._file, _EXPECTED)
        if self._valid_file is not None:
            files.check_exists(self._valid_file, _EXPECTED, "data.source.valid_path")
        problems, masks = Problems(self._file, self._on_error), self._masks
        train = _read(self._file, problems, masks)
        valid_file = self._valid_file or _sibling(self._file)
        if valid_file is None:
            by_name = sorted(train.images, key=lambda image: str(image.get("file_name")))
            train_images, valid_images = held_out.split(by_name)
            valid = train
        else:
            valid = _read(valid_file, problems, masks)
            train_images, valid_images = train.images, valid.images
            files.note_in_both(_paths(train), _paths(valid), str(train.file), str(valid.file))
        for number in sorted(train.categories.keys() | valid.categories.keys()):
            names = [part.categories.get(number, "missing") for part in (valid, train)]
            if names[0] != names[1]:
                raise UserError(
                    f"{valid.file}: category {number} is {names[0]}, and {names[1]} in {train.file}; both"
                    " must have the same categories."
                )
        return problems.opened(
            FileScenes(_labelled(train, train_images, problems, masks), masks),
            FileScenes(_labelled(valid, valid_images, problems, masks), masks),
            list(train.categories.values()),
        )


@dataclass(frozen=True, slots=True)
class _Instances:
    """What a JSON says. categories: id to name, sorted. annotations: those of each image's id."""

    file: Path
    folder: Path
    categories: dict[int, str]
    images: list[dict[str, Any]]
    annotations: dict[Any, list[dict[str, Any]]]


def _paths(part: _Instances) -> list[Path]:
    paths = (part.folder / image["file_name"] for image in part.images)
    return [path for path in paths if os.path.isfile(path)]  # of a name that none can have, too


def _sibling(file: Path) -> Path | None:
    folder = file.absolute().parent
    for name in VALID_NAMES:
        in_folder = folder.parent / folder.name.replace("train", name)  # Roboflow: train/x.json, valid/x.json
        for other in (folder / file.name.replace("train", name), in_folder / file.name):
            if other != folder / file.name and other.is_file():
                return other
    return None


def _read(file: Path, problems: Problems, masks: bool) -> _Instances:
    text = files.read_text(file)
    try:
        content = parse_json(text, object_hook=None if masks else _without_masks)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{file}, line {error.lineno}, column {error.colno}: is not JSON ({error.msg})."
        ) from error
    except ValueError as error:  # a number of thousands of digits, brackets thousands deep
        raise UserError(f"{file}: is no JSON that can be read ({error}).") from error
    images = _usable_images(file, _entries(file, content, "images"), problems)
    if not images:
        raise UserError(f"{file}: images: lists no image with an id and a file_name.")
    return _Instances(
        file=file,
        folder=_image_folder(file, images),
        categories=_categories(file, _entries(file, content, "categories")),
        images=images,
        annotations=_by_image(
            file, {image["id"] for image in images}, _entries(file, content, "annotations"), problems
        ),
    )


def _entries(file: Path, content: Any, key: str) -> list[dict[str, Any]]:
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{file}: {key}: must be a list of objects, as in COCO's instances.")
    return entries


def _without_masks(entry: dict[str, Any]) -> dict[str, Any]:
    entry.pop("segmentation", None)  # most of a JSON's memory
    return entry


def _categories(file: Path, entries: Sequence[dict[str, Any]]) -> dict[int, str]:
    names: dict[int, str] = {}
    for entry in entries:
        number, name = entry.get("id"), entry.get("name")
        if not isinstance(number, int) or not isinstance(name, str):
            raise UserError(f"{file}: categories: {entry}: must have an id, a whole number, and a name.")
        if number in names:
            raise UserError(f"{file}: categories: the id {number} is that of {names[number]} and of {name}.")
        names[number] = name
    if not names:
        raise UserError(f"{file}: categories: must list one or more.")
    files.checked_names(file, list(names.values()))
    return dict(sorted(names.items()))


def _usable_images(file: Path, entries: Sequence[dict[str, Any]], problems: Problems) -> list[dict[str, Any]]:
    images: dict[Any, dict[str, Any]] = {}
    owners: dict[str, Any] = {}
    for place, entry in enumerate(entries, 1):
        number = entry.get("id")
        missing = [key for key in ("id", "file_name", "width", "height") if key not in entry]
        if missing:
            which = f"image {number}" if "id" in entry else f"image number {place} in its list"
            problems.add(f"{file}, {which}: has no {' and no '.join(missing)}.")
        elif not isinstance(number, int | str) or not isinstance(entry["file_name"], str):
            problems.add(
                f"{file}, image {number}: the id must be a number and file_name, {entry['file_name']},"
                " a string."
            )
        elif number in images:
            problems.add(
                f"{file}, image {number}: {entry['file_name']} and {images[number]['file_name']} have this"
                " id; each image must have its own."
            )
        elif (name := os.path.normpath(entry["file_name"])) in owners:
            problems.add(
                f"{file}, image {number}: {entry['file_name']} is the picture of image {owners[name]} too."
                " Give all its annotations one image_id."
            )
        else:
            images[number] = entry
            owners[name] = number
    return list(images.values())


def _image_folder(file: Path, images: Sequence[dict[str, Any]]) -> Path:
    parent = file.absolute().parent
    bases = [parent, parent / "images", parent.parent, parent.parent / "images"]
    split = file.stem.replace("instances_", "").replace("_annotations.coco", "")
    folders = bases + [base / split for base in bases if split]
    for image in images[:_TRIED]:
        for folder in folders:
            if os.path.isfile(folder / image["file_name"]):  # a name too long for a file is none
                return folder
    raise UserError(
        f"{file}: images: {images[0]['file_name']} lies in none of {', '.join(map(str, folders))}."
        " Put the images into one of these."
    )


def _by_image(
    file: Path, known: set[Any], entries: Sequence[dict[str, Any]], problems: Problems
) -> dict[Any, list[dict[str, Any]]]:
    grouped: dict[Any, list[dict[str, Any]]] = {number: [] for number in known}
    ids = set()
    for place, entry in enumerate(entries, 1):
        missing = [key for key in ("id", "image_id", "category_id", "bbox") if key not in entry]
        number, image = entry.get("id"), entry.get("image_id")
        if missing:
            which = f"annotation {number}" if "id" in entry else f"annotation number {place} in its list"
            problems.add(f"{file}, {which}: has no {' and no '.join(missing)}.")
        elif not isinstance(number, int | str) or number in ids:
            problems.add(f"{file}, annotation {number}: the id must be a number that no other one has.")
        elif not isinstance(image, int | str) or image not in grouped:
            problems.add(f"{file}, annotation {number}: image_id {json.dumps(image)}: no image has this id.")
        else:
            grouped[image].append(entry)
        if isinstance(number, int | str):
            ids.add(number)
    return grouped


def _labelled(
    instances: _Instances, images: Sequence[dict[str, Any]], problems: Problems, masks: bool
) -> Iterator[tuple[ImageFile, str, list[Row]]]:
    index = {number: i for i, number in enumerate(instances.categories)}
    for image in images:
        try:
            picture = files.probe(instances.folder / image["file_name"])
            files.check_size(picture, image["width"], image["height"])
        except UserError as error:
            problems.add(f"{instances.file}, image {image['id']}: {error}")
            continue
        rows = []
        for entry in instances.annotations[image["id"]]:
            try:
                row = _row(entry, picture, index)
                rows.append(_with_mask(row, entry, picture) if masks else row)
            except UserError as error:
                problems.add(f"{instances.file}, annotation {entry['id']}: {error}.")
        yield picture, image["file_name"], rows


def _with_mask(row: Row, entry: dict[str, Any], picture: ImageFile) -> Row:
    size = picture.height, picture.width
    mask = of_json(entry.get("segmentation"), *size)
    if not fills(mask, row.box, *size):
        raise UserError(f"segmentation: has no pixel within bbox {json.dumps(entry['bbox'])}")
    return row._replace(mask=mask)


def _row(entry: dict[str, Any], picture: ImageFile, index: dict[int, int]) -> Row:
    category, bbox, crowd = entry["category_id"], entry["bbox"], entry.get("iscrowd", 0)
    if not isinstance(category, int) or category not in index:
        raise UserError(f"category_id {json.dumps(category)}: no category has this id")
    if crowd not in (0, 1):
        raise UserError(f"iscrowd {crowd}: must be 0 or 1")
    numbers = isinstance(bbox, list) and all(isinstance(value, int | float) for value in bbox)
    if not numbers or len(bbox) != 4:
        raise UserError(f"bbox {json.dumps(bbox)}: must be four numbers, x, y, width and height")
    try:
        x, y, width, height = map(float, bbox)
    except OverflowError as error:
        raise UserError(f"bbox {json.dumps(bbox)}: {error}") from error
    box = (x, y, x + width, y + height)
    box = files.clipped(f"bbox {json.dumps(bbox)}", box, picture, _ROUNDING, _RULE)
    return Row(box, index[category], bool(crowd))
