"""Darknet's and Ultralytics' layout: a data.yaml, folders of images, and a text file of boxes for each."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, final

from ddptrain.data import held_out
from ddptrain.data.detection import files
from ddptrain.data.detection.files import FileScenes, ImageFile, Problems, Row
from ddptrain.data.detection.run_lengths import fills, of_polygons
from ddptrain.data.detection.source import DetectionSet, DetectionSource
from ddptrain.data.left_out import OnError
from ddptrain.data.pictures import ENDINGS, pictures_in
from ddptrain.errors import UserError
from ddptrain.text import parse_yaml

_ROUNDING = 1e-3
_RULE = f"its edges must lie within 0..1 ({_ROUNDING:g} beyond counts as rounding and is cut off)"
_NO_LABELS = ("classes.txt",)  # What labelImg and Label Studio put beside the labels
_EXPECTED = "the data.yaml of a set in YOLO's layout"


@final
class YoloFiles(DetectionSource):
    """A set described by a data.yaml.

    path: the data.yaml, relative to the current folder. Its keys: ``train`` and ``val``, each a folder of
    images (searched to the bottom), a .txt file that lists images (relative to that file), or a list of
    these; ``path``, the folder that these are relative to, itself relative to the yaml's folder, which it
    is by default; ``names``, a list or {0: name, ...}; ``nc``, optional, their count. Without ``val`` every
    tenth image, sorted by path, is held out. An image's labels lie where its path leads with the last
    component ``images`` replaced by ``labels`` and the ending by ``.txt`` (beside it, if there is no such
    component): a line ``class cx cy w h`` for each box, in 0..1 of the picture's sides, or a polygon
    ``class x1 y1 x2 y2 x3 y3 ...``, of which the enclosing box is taken.

    on_error: "stop" refuses a set with problems and lists them; "skip" leaves out the bad lines' boxes,
    and the images that can't be read or have no labels. masks: every line must be a polygon, which is read as
    a mask, too. The argument ``root`` of `open` isn't used.
    """

    name = "yolo"

    def __init__(self, path: str | None = None, on_error: OnError = "stop", masks: bool = False) -> None:
        self._file = files.checked_path(path, _EXPECTED)
        self._on_error = on_error
        self._masks = masks

    def forgiving(self) -> DetectionSource:
        return YoloFiles(str(self._file), "skip", self._masks)

    def open(self, root: Path) -> DetectionSet:
        files.check_exists(self._file, _EXPECTED)
        layout = _read_layout(self._file)
        problems = Problems(self._file, self._on_error)
        train = _images_of_part(layout, "train", layout.train, problems)
        if layout.valid:
            valid = _images_of_part(layout, "val", layout.valid, problems)
            files.note_in_both(train, valid, "train", f"{self._file}: val")
        else:
            train, valid = held_out.split(train)
        return problems.opened(
            FileScenes(_labelled(train, layout, problems, self._masks), self._masks),
            FileScenes(_labelled(valid, layout, problems, self._masks), self._masks),
            layout.names,
        )


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a data.yaml says."""

    file: Path
    root: Path
    train: list[str]
    valid: list[str]
    names: list[str]


def _read_layout(file: Path) -> _Layout:
    text = files.read_text(file)
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{file}: is not YAML ({error}).") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: must hold the keys train, names and, where there is one, val.")
    if "kpt_shape" in content:
        raise UserError(f"{file}: kpt_shape: keypoints can't be trained on; name a set of boxes.")
    root = content.get("path") or "."
    if not isinstance(root, str) or not os.path.isdir(file.parent / root):
        raise UserError(
            f"{file}: path: {root}: there is no such folder in {file.parent}. Correct it, or remove it if"
            " the images lie beside the yaml."
        )
    train = _entries(file, "train", content.get("train"))
    if not train:
        raise UserError(f"{file}: the key train is missing; it must name a folder of images.")
    key = next((name for name in ("val", "valid", "validation") if content.get(name)), "val")
    valid = _entries(file, key, content.get(key))
    return _Layout(file, file.parent / root, train, valid, _names(file, content))


def _entries(file: Path, key: str, value: Any) -> list[str]:
    entries = value if isinstance(value, list) else [] if value is None else [value]
    for entry in entries:
        if not isinstance(entry, str):
            raise UserError(f"{file}: {key}: {entry}: must be a folder, a .txt file or a list of these.")
    return entries


def _names(file: Path, content: dict[Any, Any]) -> list[str]:
    names, count = content.get("names"), content.get("nc")
    if isinstance(names, dict):
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise UserError(f"{file}: names: numbered {', '.join(map(str, names))}; must count up from 0.")
        names = [names[i] for i in range(len(names))]
    if not isinstance(names, list) or not names:
        raise UserError(f"{file}: names: must list the classes, [cat, dog] or {{0: cat, 1: dog}}.")
    for i, name in enumerate(names):
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise UserError(f"{file}: names: YAML reads class {i} as {name}; put its name in quotes.")
    if count is not None and count != len(names):
        raise UserError(f"{file}: nc: {count}: names lists {len(names)}; make them agree, or remove nc.")
    return files.checked_names(file, [str(name) for name in names])


def _images_of_part(layout: _Layout, key: str, entries: Sequence[str], problems: Problems) -> list[Path]:
    """The part's images, sorted, in the same order on every machine."""
    images: list[Path] = []
    for entry in entries:
        place = layout.root / entry
        # as Roboflow writes it; Ultralytics does this
        if not os.path.exists(place) and entry.startswith("../"):
            place = layout.root / entry.removeprefix("../")
        if os.path.isdir(place):
            pictures = pictures_in(place, beside=("", ".txt"))
            _report_orphans(place, pictures, problems)
            images += pictures
        elif place.suffix == ".txt" and os.path.isfile(place):
            images += _read_list(place, problems)
        else:
            raise UserError(
                f"{layout.file}: {key}: {entry}: {place} is neither a folder of images nor a .txt file that"
                " lists them."
            )
    if not images:
        raise UserError(
            f"{layout.file}: {key}: no image found in {', '.join(entries)} (looked for {', '.join(ENDINGS)})."
        )
    return sorted(images)


def _read_list(file: Path, problems: Problems) -> list[Path]:
    images = []
    for number, line in enumerate(files.read_text(file).splitlines(), 1):
        image = file.parent / line.strip()
        if os.path.isfile(image):  # a name too long for a file is none
            images.append(image)
        elif line.strip():
            problems.add(f"{file}, line {number}: {line.strip()}: there is no such image.")
    return images


def _report_orphans(folder: Path, images: Sequence[Path], problems: Problems) -> None:
    expected = {_label_file(image) for image in images}
    place = _label_file(folder / "any").parent
    for label in sorted(place.rglob("*.txt")):
        is_hidden = any(part.startswith(".") for part in label.relative_to(place).parts)
        if label not in expected and label.name not in _NO_LABELS and not is_hidden:
            problems.add(f"{label}: there is no image for these labels under {folder}.")


def _label_file(image: Path) -> Path:
    parts = list(image.parts)
    folders = parts[:-1]
    if "images" in folders:
        parts[len(folders) - 1 - folders[::-1].index("images")] = "labels"
    return Path(*parts).with_suffix(".txt")


def _labelled(
    images: Sequence[Path], layout: _Layout, problems: Problems, masks: bool
) -> Iterator[tuple[ImageFile, str, list[Row]]]:
    owners: dict[Path, Path] = {}
    for image in images:
        label = _label_file(image)
        owner = owners.setdefault(label, image)
        if owner is not image:
            reason = "is listed twice" if owner == image else f"has the same labels as {owner.name}, {label}"
            problems.add(f"{image}: {reason}. Rename or remove one of the two.")
            continue
        if not label.is_file():
            problems.add(f"{image}: has no labels, {label}. An empty file says that nothing is on it.")
            continue
        try:
            picture, lines = files.probe(image), files.read_text(label).splitlines()
        except UserError as error:
            problems.add(str(error))
            continue
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                if fields := line.split():
                    rows.append(_row(fields, picture, layout, masks))
            except UserError as error:
                problems.add(f"{label}, line {number}: {error}.")
        name = image.relative_to(layout.root) if image.is_relative_to(layout.root) else image
        yield picture, name.as_posix(), rows


def _row(fields: list[str], picture: ImageFile, layout: _Layout, masks: bool) -> Row:
    if len(fields) != 5 and (len(fields) < 7 or len(fields) % 2 == 0):
        raise UserError(
            f"{len(fields)} columns: must be 5 (class cx cy w h), or for a polygon an odd number from 7"
            " (class x1 y1 x2 y2 x3 y3 ...)"
        )
    values = [_number(field) for field in fields]
    count = len(layout.names)
    if not values[0].is_integer() or not 0 <= values[0] < count:
        raise UserError(
            f"class {fields[0]}: must be a whole number from 0 to {count - 1}"
            f" ({layout.file.name} names {count} class{'es' if count > 1 else ''})"
        )
    slack = (_ROUNDING * picture.width, _ROUNDING * picture.height)
    written = f"box {' '.join(fields[1:])}" if len(fields) == 5 else f"polygon {' '.join(fields[1:7])} ..."
    box = files.clipped(written, _in_pixels(values[1:], picture), picture, slack, _RULE)
    mask = _mask(written, values[1:], picture) if masks else None
    if mask is not None and not fills(mask, box, picture.height, picture.width):
        raise UserError(f"{written}: encloses no pixel of the image")
    return Row(box, int(values[0]), False, mask)


def _mask(written: str, values: list[float], picture: ImageFile) -> bytes:
    if len(values) == 4:
        raise UserError(f"{written}: must be a polygon (class x1 y1 x2 y2 x3 y3 ...), as masks are read")
    in_pixels = [value * side for value, side in zip(values, cycle((picture.width, picture.height)))]
    return of_polygons([in_pixels], picture.height, picture.width)


def _number(field: str) -> float:
    try:
        value = float(field)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{field!r}: must be a number")
    return value


def _in_pixels(values: list[float], picture: ImageFile) -> files.Box:
    if len(values) == 4:
        cx, cy, w, h = values
        x1, y1, x2, y2 = cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2
    else:
        xs, ys = values[::2], values[1::2]
        x1, y1, x2, y2 = min(xs), min(ys), max(xs), max(ys)
    return x1 * picture.width, y1 * picture.height, x2 * picture.width, y2 * picture.height
