"""Pictures of one's own with an XML file each, as labelImg, CVAT and Roboflow write it for "Pascal VOC"."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, final

from ddptrain.data import held_out
from ddptrain.data.detection import files
from ddptrain.data.detection.files import FileScenes, ImageFile, Problems, Row
from ddptrain.data.detection.source import DetectionSet, DetectionSource
from ddptrain.data.detection.voc import box_of, name_of, objects_of
from ddptrain.data.left_out import OnError
from ddptrain.data.pictures import check_apart, pictures_in
from ddptrain.errors import UserError

_VALID_NAMES = ("val", "valid", "validation", "test")
_FOLDERS = (("JPEGImages", "Annotations"), ("images", "annotations"), ("images", "Annotations"))
"""Of pictures, and of their annotations where these do not lie beside them."""
_OTHERS = ("", ".xml", ".txt", ".pbtxt")
"""Endings of what such tools put beside pictures."""


@final
class VocFolder(DetectionSource):
    """A folder of pictures with annotations in Pascal VOC's XML, and classes of one's own: the names that
    appear in them, sorted.

    path: the folder, relative to the current one. Its parts are the folders ``train`` and ``val`` (or
    ``valid``, ``validation``, ``test``), or what ``ImageSets/Main/train.txt`` and ``val.txt`` list of
    ``JPEGImages``; else every tenth picture, sorted by path, is held out. The annotation of a.jpg is a.xml,
    beside it or where its path leads with the folder ``JPEGImages`` or ``images`` replaced by ``Annotations``
    or ``annotations``. Corners count from 1, and objects marked as difficult become crowds, as
    `ddptrain.data.detection.voc` has it.

    on_error: "stop" refuses a set with problems and lists them; "skip" leaves out bad objects, and pictures
    that are broken or have no annotation. The argument ``root`` of `open` isn't used.
    """

    name = "voc folder"

    def __init__(self, path: str, on_error: OnError = "stop") -> None:
        self._folder = Path(path)
        self._on_error = on_error

    def forgiving(self) -> DetectionSource:
        return VocFolder(str(self._folder), "skip")

    def open(self, root: Path) -> DetectionSet:
        parts = _parts(self._folder)
        if not any(map(_annotation_of, chain(*parts))):
            others = sorted(file for ending in ("yaml", "json") for file in self._folder.rglob(f"*.{ending}"))
            hint = f" Did you mean data.source.path={others[0]}?" if others else ""
            raise UserError(f"data.source.path={self._folder}: none of its pictures has an XML file.{hint}")
        problems = Problems(self._folder, self._on_error)
        train, valid = (_annotated(part, problems) for part in parts)
        names = {name for part in (train, valid) for one in part for name in map(name_of, one.objects)}
        classes = sorted(name for name in names if isinstance(name, str) and name)
        if not classes:
            raise UserError(f"data.source.path={self._folder}: no annotation in it names an object.")
        files.checked_names(self._folder, classes)
        return problems.opened(
            FileScenes(_labelled(train, self._folder, classes, problems)),
            FileScenes(_labelled(valid, self._folder, classes, problems)),
            classes,
        )


class _Annotated(NamedTuple):
    picture: ImageFile
    annotation: Path
    objects: list[Any]
    """As `objects_of` reads them."""


def _parts(folder: Path) -> tuple[list[Path], list[Path]]:
    """The pictures for training and for validation, sorted."""
    lists = [folder / "ImageSets" / "Main" / f"{part}.txt" for part in ("train", "val")]
    if (folder / "train").is_dir():
        train = _pictures(folder / "train")
        others = [folder / name for name in _VALID_NAMES if (folder / name).is_dir()]
        valid = _pictures(others[0]) if others else []
    elif all(file.is_file() for file in lists):
        pictures = _pictures(folder / "JPEGImages")
        train, valid = (_listed(file, folder / "JPEGImages", pictures) for file in lists)
    else:
        train, valid = _pictures(folder), []
    files.note_in_both(train, valid, "train", f"{folder}: val")
    return (train, valid) if valid else held_out.split(train)


def _pictures(folder: Path) -> list[Path]:
    pictures = pictures_in(folder, beside=_OTHERS)
    if not pictures:
        raise UserError(f"data.source.path: {folder} holds no picture.")
    check_apart(folder, [picture.relative_to(folder) for picture in pictures])
    return pictures


def _listed(file: Path, folder: Path, pictures: Sequence[Path]) -> list[Path]:
    """The pictures that a list names, one a line, by their paths below the folder, without their endings."""
    by_name = {picture.relative_to(folder).with_suffix("").as_posix(): picture for picture in pictures}
    listed = []
    for number, line in enumerate(files.read_text(file).splitlines(), 1):
        if fields := line.split():
            if fields[0] not in by_name:
                raise UserError(f"{file}, line {number}: {fields[0]}: there is no picture of this name.")
            listed.append(by_name[fields[0]])
    return sorted(listed)


def _annotated(pictures: Sequence[Path], problems: Problems) -> list[_Annotated]:
    annotated = []
    for file in pictures:
        annotation = _annotation_of(file)
        if annotation is None:
            places = " or ".join(map(str, _annotation_places(file)))
            problems.add(
                f"{file}: has no annotation, {places}. One without an <object> says that nothing is on it."
            )
            continue
        try:
            picture = files.probe(file)
            annotated.append(_Annotated(picture, annotation, objects_of(annotation, picture)))
        except UserError as error:
            problems.add(str(error))
    return annotated


def _annotation_of(picture: Path) -> Path | None:
    return next((place for place in _annotation_places(picture) if place.is_file()), None)


def _annotation_places(picture: Path) -> list[Path]:
    """Where a picture's annotation may lie, the likeliest first."""
    places = [picture.with_suffix(".xml")]
    folders = picture.parts[:-1]
    for of_pictures, of_annotations in _FOLDERS:
        if of_pictures in folders:
            at = len(folders) - 1 - folders[::-1].index(of_pictures)
            parts = [*folders[:at], of_annotations, *folders[at + 1 :], picture.with_suffix(".xml").name]
            places.append(Path(*parts))
    return places


def _labelled(
    annotated: Sequence[_Annotated], folder: Path, classes: Sequence[str], problems: Problems
) -> Iterator[tuple[ImageFile, str, list[Row]]]:
    labels = {name: label for label, name in enumerate(classes)}
    for picture, annotation, objects in annotated:
        rows = []
        for number, entry in enumerate(objects, 1):
            try:
                if not isinstance(name := name_of(entry), str) or not name:
                    raise UserError(f"name {name}: must be the name of its class")
                box, difficult = box_of(entry, picture)
                rows.append(Row(box, labels[name], difficult))
            except UserError as error:
                problems.add(f"{annotation}, object {number}: {error}.")
        yield picture, picture.file.relative_to(folder).as_posix(), rows
