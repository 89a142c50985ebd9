"""Pictures that a CSV file lists with their labels."""

import csv
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor

from ddptrain.data.agreement import check_distinct, check_known
from ddptrain.data.held_out import is_held_out
from ddptrain.data.images.folder import IMAGENET_MEAN, IMAGENET_STD, FolderSplit, check_sizes, note_unseen
from ddptrain.data.images.source import ImageSet, ImageSource
from ddptrain.data.paths import Paths
from ddptrain.errors import UserError
from ddptrain.text import first_few

log = logging.getLogger("ddptrain")

_TRAIN, _VALID, _TEST = range(3)
_SPLITS = {
    "train": _TRAIN, "training": _TRAIN, "val": _VALID, "valid": _VALID, "validation": _VALID, "test": _TEST,
}  # fmt: skip
_SEPARATOR = ";"


class _Rows(NamedTuple):
    files: list[str]
    """Relative to the root."""
    names: list[tuple[str, ...]]
    """The classes of each."""
    parts: list[int]
    """Of `_SPLITS`."""

    def only(self, parts: Sequence[int]) -> "_Rows":
        """Those of these parts."""
        kept = [i for i, part in enumerate(self.parts) if part in parts]
        files, names = [self.files[i] for i in kept], [self.names[i] for i in kept]
        return _Rows(files, names, [self.parts[i] for i in kept])


@final
class CsvLabels(ImageSource):
    """``root/<file>``: a heading, and a line for each picture.

    The column ``file`` names the picture, relative to ``root``. The labels are in the column ``label``, one
    class each; or in ``labels``, any number of classes with ``;`` between them; or in a column for each
    class, 1 where the picture has it, else 0. A column ``split`` says train, val or test; without it every
    tenth line is held out. The lines of test are left out; where there are none of val, they are validation.

    size, resize: as `ddptrain.data.images.folder.ImageFolder` has them.
    """

    name = "csv"

    def __init__(self, file: str = "labels.csv", size: int = 224, resize: int | None = None) -> None:
        check_sizes(size, resize)
        self._file = file
        self.size: int = size
        self.resize = resize

    def fetch(self, root: Path) -> None:
        if not (root / self._file).is_file():
            raise UserError(
                f"data.root={root}: holds no file {self._file}. Name it, relative to data.root, by"
                " data.source.file=..."
            )

    def open(self, root: Path) -> ImageSet:
        path = root / self._file
        rows, own, held_out = _read(path, root)
        held = _VALID if _VALID in rows.parts else _TEST
        if _TEST in rows.parts:
            count = rows.parts.count(_TEST)
            used = "left out: there are lines of val" if held == _VALID else "for validation: none is of val"
            log.info("data       %s: %d lines have split=test, and are %s", path, count, used)
        rows = rows.only((_TRAIN, held))
        classes = sorted({name for names in rows.names for name in names})
        if len(classes) < 2:
            raise UserError(f"{path}: names {len(classes)} class(es); a classifier needs two or more.")
        _check_names(classes, path)
        _check_trained(rows, held, path, held_out)
        one_each = own == ["label"]
        if not one_each and own != ["labels"] and (unseen := [name for name in own if name not in classes]):
            log.warning("note       %s: no picture has %s, so it is no class", path, first_few(unseen, 5))
        labels = _indices(rows.names, classes) if one_each else _one_hot(rows.names, classes)
        parts = []
        for part, name in ((_TRAIN, "training"), (held, "validation")):
            ids = [i for i, own in enumerate(rows.parts) if own == part]
            if not ids:
                raise UserError(f"{path}: no line is left for {name}. Give it some, by a column `split`.")
            resize = None if part == _TRAIN else self.resize
            files = Paths(root, (rows.files[i] for i in ids))
            parts.append(FolderSplit(files, labels[torch.tensor(ids)], self.size, resize))
        train, valid = parts
        counts = valid.labels.bincount(minlength=len(classes)) if one_each else valid.labels.sum(0)
        tenth = "every tenth line is held out, unless a column `split` says more"
        note_unseen(str(path), classes, counts, tenth if held_out else "see `split`")
        return ImageSet(train, valid, classes, IMAGENET_MEAN, IMAGENET_STD, self.resize, held_out)


def _check_names(classes: Sequence[str], path: Path) -> None:
    """Raises UserError for classes that are the same word, or several words that are classes themselves."""
    check_distinct(classes, str(path))
    for name in classes:
        parts = [part.strip() for part in re.split("[,|;]", name)]
        if _SEPARATOR in name or (len(parts) > 1 and set(parts) <= set(classes)):
            raise UserError(
                f"{path}: {name!r} would be one class. Write several of a picture with ; between them, in a"
                " column `labels`."
            )


def _check_trained(rows: _Rows, held: int, path: Path, held_out: bool) -> None:
    """Raises UserError for a class that only lines of validation have: its output would never be trained."""
    trained, judged = ({name for of in rows.only([part]).names for name in of} for part in (_TRAIN, held))
    if not held_out:
        check_known(judged, trained, f"{path}, split={'val' if held == _VALID else 'test'}", "split=train")
    elif only := sorted(judged - trained):
        log.warning(
            "note       %s: no training picture has %s; every tenth line is held out. A column `split` says"
            " which", path, first_few(only, 5),
        )  # fmt: skip


def _read(path: Path, root: Path) -> tuple[_Rows, list[str], bool]:
    """The lines of the file, the columns that tell the classes, and whether every tenth is held out."""
    rows = _Rows([], [], [])
    line_of: dict[str, int] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as opened:
            lines = csv.DictReader(opened, strict=True)
            columns = list(lines.fieldnames or ())
            own = [name for name in columns if name not in ("file", "split")]
            if "file" not in columns or not own:
                raise UserError(
                    f"{path}: its first line must name the columns: file, and label (one class), labels"
                    " (several, with ; between them) or one column a class. It names"
                    f" {', '.join(columns) or 'none'}."
                )
            _check_columns(columns, own, path)
            for line in lines:
                where = f"{path}, line {lines.line_num}"
                if None in line or None in line.values():
                    raise UserError(f"{where}: has not as many values as there are columns ({len(columns)}).")
                if not os.path.isfile(root / line["file"]):
                    raise UserError(f"{where}: file={line['file']}: there is no such file in {root}.")
                before = line_of.setdefault(os.path.normpath(line["file"]), lines.line_num)
                if before < lines.line_num:
                    raise UserError(
                        f"{where}: file={line['file']}: is in line {before} too. Write one line for each"
                        " picture, with all of its classes."
                    )
                rows.files.append(line["file"])
                rows.names.append(_classes_of(line, own, where))
                rows.parts.append(_part_of(line, len(rows.parts), where))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: can't be read as CSV in UTF-8 ({error}).") from error
    return rows, own, "split" not in columns


def _check_columns(columns: Sequence[str], own: Sequence[str], path: Path) -> None:
    """Raises UserError for columns whose meaning isn't clear. own: those that tell the classes."""
    for name in columns:
        if columns.count(name) > 1:
            raise UserError(f"{path}: two columns are called {name!r}. Leave one of them out.")
        plain = name.strip().lower()
        if plain != name and plain in ("file", "label", "labels", "split"):
            raise UserError(f"{path}: a column is called {name!r}. Call it {plain}.")
    if len(own) > 1 and (words := [name for name in own if name in ("label", "labels")]):
        others = first_few([name for name in own if name != words[0]], 3)
        raise UserError(
            f"{path}: has a column {words[0]}, and {others} beside it. Leave one or the other out."
        )


def _classes_of(line: Mapping[str, str], own: Sequence[str], where: str) -> tuple[str, ...]:
    if list(own) == ["label"]:
        if not line["label"].strip():
            raise UserError(f"{where}: has no label. For pictures without a class use a column `labels`.")
        return (line["label"].strip(),)
    if list(own) == ["labels"]:
        names = [name.strip() for name in line["labels"].split(_SEPARATOR)]
        return tuple(dict.fromkeys(filter(None, names)))
    for name in own:
        if line[name].strip() not in ("0", "1"):
            raise UserError(f"{where}: {name}={line[name]}: must be 1 (the picture has this class) or 0.")
    return tuple(name for name in own if line[name].strip() == "1")


def _part_of(line: Mapping[str, str], place: int, where: str) -> int:
    if "split" not in line:
        return _VALID if is_held_out(place) else _TRAIN
    split = line["split"].strip().lower()
    if split not in _SPLITS:
        raise UserError(f"{where}: split={line['split']}: must be one of {', '.join(_SPLITS)}.")
    return _SPLITS[split]


def _indices(names: Sequence[tuple[str, ...]], classes: Sequence[str]) -> Tensor:
    places = {name: place for place, name in enumerate(classes)}
    return torch.tensor([places[name] for (name,) in names])


def _one_hot(names: Sequence[tuple[str, ...]], classes: Sequence[str]) -> Tensor:
    places = {name: place for place, name in enumerate(classes)}
    labels = torch.zeros(len(names), len(classes))
    for row, own in zip(labels, names, strict=True):
        row[[places[name] for name in own]] = 1
    return labels
