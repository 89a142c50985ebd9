"""Pictures of one's own with an XML file each, as labelImg, CVAT and Roboflow write it for "Pascal VOC"."""

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, final

from ddptrain.data import held_out
from ddptrain.data.detection import files
from ddptrain.data.detection.files import FileScenes, ImageFile, Problems, Row
from ddptrain.data.detection.source import DetectionSet, DetectionSource
from ddptrain.data.detection.voc import name_of, objects_of, rows_of
from ddptrain.data.images.class_folders import VALID_NAMES
from ddptrain.data.left_out import OnError
from ddptrain.data.pictures import pictures_in
from ddptrain.errors import UserError

_FOLDERS = (("JPEGImages", "Annotations"), ("images", "annotations"), ("images", "Annotations"))
"""Of pictures, and of their annotations where these do not lie beside them."""
_OTHERS = ("", ".xml", ".txt", ".pbtxt")
"""Endings of what such tools put beside pictures."""


@final
class VocFolder(DetectionSource):
    """A folder of pictures with annotations in Pascal VOC's XML, and classes of one's own: the names that
    appear in them, sorted.

    path: the folder, relative to the current one. Its parts are the folders ``train`` and ``val`` (or
    ``valid``, ``validation``, ``test``) in it, in its ``images`` or ``JPEGImages``, or what the lists of
    these names in ``ImageSets/Main`` name of ``JPEGImages``; without a part for validation every tenth
    picture, sorted by path, is held out. The annotation of a.jpg is a.xml, beside it or where its path leads
    with the folder ``JPEGImages`` or ``images`` replaced by ``Annotations`` or ``annotations``. Corners count
    from 1, and objects marked as difficult become crowds, as `ddptrain.data.detection.voc` has it.

    on_error: "stop" refuses a set with problems and lists them; "skip" leaves out bad objects, and pictures
    that are broken or have no annotation. The argument ``root`` of `open` isn't used.
    """

    name = "voc folder"

    def __init__(self, path: str, on_error: OnError = "stop") -> None:
        self._folder = Path(path)
        self._on_error = on_error
        self._adopted: Sequence[str] | None = None

    def adopt_classes(self, classes: Sequence[str]) -> None:
        self._adopted = classes

    def forgiving(self) -> DetectionSource:
        return VocFolder(str(self._folder), "skip")

    def open(self, root: Path) -> DetectionSet:
        folder, problems = self._folder, Problems(self._folder, self._on_error)
        parts = _parts(folder, problems)
        if not any(map(_annotation_of, chain(*parts))):
            others = [path for path in folder.rglob("*") if path.suffix in (".yaml", ".yml", ".json")]
            others.sort(key=lambda path: ("train" not in str(path.relative_to(folder)), path))
            hint = f" Did you mean data.source.path={others[0]}?" if others else ""
            raise UserError(f"data.source.path={folder}: none of its pictures has an XML file.{hint}")
        train, valid = (_annotated(part, problems) for part in parts)
        names = [name_of(entry) for one in (*train, *valid) for entry in one.objects]
        classes = sorted({name for name in names if isinstance(name, str) and name})
        if self._adopted is not None and set(classes) <= set(self._adopted):
            classes = [*self._adopted]  # not each of them appears in every set
        if not classes:
            raise UserError(f"data.source.path={folder}: no annotation in it names an object.")
        files.checked_names(folder, classes)
        return problems.opened(
            FileScenes(_labelled(train, folder, classes, problems)),
            FileScenes(_labelled(valid, folder, classes, problems)),
            classes,
        )


class _Annotated(NamedTuple):
    picture: ImageFile
    annotation: Path
    objects: list[Any]
    """As `objects_of` reads them."""


def _parts(folder: Path, problems: Problems) -> tuple[list[Path], list[Path]]:
    """The pictures for training and for validation, sorted."""
    places = [folder, *(folder / name for name, _ in _FOLDERS)]
    for place in places:
        parts = {path.name.lower(): path for path in _entries(place) if path.is_dir()}
        if "train" in parts:
            train = _pictures(parts["train"], problems)
            valid_name = _first(VALID_NAMES, parts)
            valid = [] if valid_name is None else _pictures(parts[valid_name], problems)
            break
    else:
        place = folder / "JPEGImages"  # beside which masks of the same names may lie
        place = place if place.is_dir() else folder
        pictures = _pictures(place, problems)
        lists = {file.stem.lower(): file for file in _entries(folder / "ImageSets" / "Main")}
        if "train" in lists:
            train = _listed(lists["train"], place, pictures, problems)
            valid_name = _first(VALID_NAMES, lists)
            valid = [] if valid_name is None else _listed(lists[valid_name], place, pictures, problems)
        else:
            train, valid = pictures, []
    files.note_in_both(train, valid, "train", f"{folder}: val")
    return (train, valid) if valid else held_out.split(train)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _first(names: Sequence[str], known: Container[str]) -> str | None:
    return next((name for name in names if name in known), None)


def _pictures(folder: Path, problems: Problems) -> list[Path]:
    pictures: dict[Path, Path] = {}
    for file in pictures_in(folder, beside=_OTHERS) if folder.is_dir() else []:
        other = pictures.setdefault(file.with_suffix(""), file)
        if other is not file:
            problems.add(f"{file}: has the same annotation as {other.name}. Rename or remove one of the two.")
    if not pictures:
        raise UserError(f"data.source.path: {folder} holds no picture.")
    _report_orphans(folder, pictures.values(), problems)
    return list(pictures.values())


def _report_orphans(folder: Path, pictures: Iterable[Path], problems: Problems) -> None:
    expected = {place for picture in pictures for place in _annotation_places(picture)}
    for place in sorted({place.parent for place in _annotation_places(folder / "any")}):
        for file in sorted(place.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(place).parts)
            if file.suffix.lower() == ".xml" and file not in expected and not hidden:
                problems.add(f"{file}: there is no picture for this annotation under {folder}.")


def _listed(file: Path, folder: Path, pictures: Sequence[Path], problems: Problems) -> list[Path]:
    """Those that a list names, one a line, by their paths below the folder, with or without their endings."""
    by_name = {
        name.relative_to(folder).as_posix(): of for of in pictures for name in (of, of.with_suffix(""))
    }
    listed: set[Path] = set()
    for number, line in enumerate(files.read_text(file).splitlines(), 1):
        name = line.strip().strip('"')
        if name and name not in by_name:
            problems.add(f"{file}, line {number}: {name}: there is no picture of this name in {folder}.")
        elif name:
            listed.add(by_name[name])
    return sorted(listed)


def _annotated(pictures: Sequence[Path], problems: Problems) -> list[_Annotated]:
    annotated = []
    for file in pictures:
        annotation = _annotation_of(file)
        if annotation is None:
            places = " or ".join(str(place) for place in _annotation_places(file) if place.suffix == ".xml")
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
    file, folders = picture.with_suffix(".xml"), picture.parts[:-1]
    places = [file]
    for of_pictures, of_annotations in _FOLDERS:
        if of_pictures in folders:
            at = len(folders) - 1 - folders[::-1].index(of_pictures)
            places.append(Path(*folders[:at], of_annotations, *folders[at + 1 :], file.name))
    return [*places, *(place.with_suffix(".XML") for place in places)]


def _labelled(
    annotated: Sequence[_Annotated], folder: Path, classes: Sequence[str], problems: Problems
) -> Iterator[tuple[ImageFile, str, list[Row]]]:
    for picture, annotation, objects in annotated:
        rows = rows_of(objects, annotation, picture, classes, "must be the name of its class", problems)
        yield picture, picture.file.relative_to(folder).as_posix(), rows
