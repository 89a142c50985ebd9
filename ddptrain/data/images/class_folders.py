"""Folders of pictures: which ones are the parts and the classes of a set, and the files in them."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ddptrain.data.pictures import ENDINGS, note_not_read
from ddptrain.errors import UserError
from ddptrain.text import first_few

log = logging.getLogger("ddptrain")

_TRAIN_NAMES = ("train", "training")
VALID_NAMES = ("val", "valid", "validation", "test", "testing")
"""The first of these that is there is the part for validation."""


class Parts(NamedTuple):
    """The folders whose folders are classes. valid: None where pictures are to be held out of train."""

    train: Path
    valid: Path | None


def unpacked(root: Path) -> Path:
    """The folder with the parts or classes: ``root``, or its only folder (of that its only folder, ...), as
    an archive unpacks. Raises UserError naming the folder where that is not clear."""
    train, valid, others = _by_name(root)
    if train is not None or valid is not None or len(others) != 1 or not _folders(others[0]):
        return root
    if loose := _pictures_in(others[0]):
        raise UserError(
            f"{others[0]}: the only folder of data.root={root} holds pictures ({loose[0]}, ...) beside"
            " folders. If these are the classes, move the pictures into them."
        )
    return unpacked(others[0])


def parts_of(root: Path) -> Parts:
    """The parts of the set in ``root``. Raises UserError naming the folder where that is not clear."""
    train, valid, others = _by_name(root)
    if train is not None and others and valid is None and not _folders(train):
        return Parts(root, None)  # a class called train, say of vehicles
    if train is not None:
        _note_beside(root, Parts(train, valid))
        return Parts(train, valid)
    if valid is not None and {folder.name for folder in _folders(valid)} & {one.name for one in others}:
        raise UserError(
            f"{root}: holds classes ({others[0].name}, ...) and {valid.name} with folders of their names, and"
            " no train. Put the classes into train beside it."
        )
    if valid is not None and others:
        log.warning("note       %s: %s is read as a class, for there is no train beside it", root, valid.name)
    if valid is not None and not others:
        raise UserError(f"{root}: holds {valid.name}, and no train. Put train/<class>/* beside it.")
    for inner in others:
        train, valid, _ = _by_name(inner)
        if train is not None and valid is not None and _folders(train):
            raise UserError(
                f"data.root={root}: its folder {inner.name} holds {train.name} and {valid.name}, and is not"
                f" the only one. Give the one to use: data.root={inner}"
            )
    return Parts(root, None)


def _note_beside(root: Path, parts: Parts) -> None:
    """Log which folders beside the parts are not read."""
    if beside := [folder.name for folder in _folders(root) if folder not in parts]:
        used = " and ".join(part.name for part in parts if part is not None)
        log.info("note       %s: reads %s, and not %s beside it", root, used, first_few(beside, 5))


def pictures_by_class(part: Path) -> dict[str, list[str]]:
    """The image files of each class folder, relative to ``part``, in the same order on every machine.

    Raises UserError where there are none.
    """
    files_of: dict[str, list[str]] = {}
    others: list[str] = []
    for folder in _folders(part):
        own = files_of[folder.name] = []
        for file in _files_below(str(folder), folder.name):
            (own if _is_picture(file) else others).append(file)
    if not any(files_of.values()) and (loose := _pictures_in(part)):
        raise UserError(
            f"{part}: holds pictures itself ({loose[0]}, ...). Put them into a folder for each class, or"
            " elsewhere if their classes are not known."
        )
    if not any(files_of.values()):
        raise UserError(
            f"data.root={part}: no image found in its class folders (looked for"
            f" <class>/*{{{','.join(ENDINGS)}}}). Point data.root at a folder of class folders."
        )
    empty = [name for name, files in files_of.items() if not files]
    if empty:
        raise UserError(f"{part / empty[0]}: this class folder holds no image. Fill or remove it.")
    note_not_read(part, others)
    if loose := _pictures_in(part):
        log.warning(
            "note       %s: %d pictures are in no class folder, and not read: %s",
            *(part, len(loose), first_few(loose, 3)),
        )
    return files_of


def _by_name(root: Path) -> tuple[Path | None, Path | None, list[Path]]:
    """Its folders for training and for validation, and the others."""
    folders = _folders(root)
    train, valid = (_named(root, folders, names) for names in (_TRAIN_NAMES, VALID_NAMES))
    others = [folder for folder in folders if folder.name.lower() not in (*_TRAIN_NAMES, *VALID_NAMES)]
    return train, valid, others


def _named(root: Path, folders: list[Path], names: tuple[str, ...]) -> Path | None:
    """The first of these names that a folder has, in capitals or not."""
    for name in names:
        matching = [folder for folder in folders if folder.name.lower() == name]
        if len(matching) > 1:
            raise UserError(
                f"{root}: holds {matching[0].name} and {matching[1].name}. Rename or remove one of them."
            )
        if matching:
            return matching[0]
    return None


def _folders(root: Path) -> list[Path]:
    """Those that people made, sorted: not ``.git``, nor what macOS puts beside a folder in an archive."""
    names = [entry.name for entry in _entries(root) if entry.is_dir() and not entry.name.startswith(".")]
    return [root / name for name in sorted(names) if name != "__MACOSX"]


def _pictures_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in _entries(folder) if _is_picture(entry.name) and entry.is_file())


def _files_below(folder: str, name: str) -> Iterator[str]:
    """In the order of their paths, part by part, without hidden ones (``.ipynb_checkpoints`` holds copies).
    name: the folder's, with which the names begin."""
    for entry in sorted(_entries(folder), key=lambda entry: entry.name):
        inner = f"{name}/{entry.name}"
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(entry.path, inner)
        else:
            yield inner


def _is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in ENDINGS


def _entries(folder: Path | str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise UserError(f"{folder}: can't be read ({error.strerror}).", everywhere=False) from error
