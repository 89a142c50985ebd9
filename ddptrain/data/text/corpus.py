"""Where text comes from: which files, and which of them are held out for validation."""

import fnmatch
import logging
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ddptrain.data.pictures import note_links
from ddptrain.data.stream.manifest import NAME as MANIFEST
from ddptrain.data.stream.write import is_begun
from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean_path

log = logging.getLogger("ddptrain")

TOKENS = "tokens"
"""The folder of all token files, in ``data.root``."""
HELD_OUT = 20
"""Every 20th file, or the last 20th of a single one, is held out."""
_BLOCK = 1 << 24
CONTINUATION = bytes(range(0x80, 0xC0))  # Bytes that in UTF-8 continue a character
_MARKS = (("config.yaml", "command.txt"), (".lock", "log.txt"), (".lock", "ledger.jsonl"), (MANIFEST,))
"""Files by which a folder is known to be a run of ddptrain, one that has just begun, a sweep, or a set."""


@dataclass(frozen=True, slots=True)
class Document:
    """The bytes [start, stop) of a file; stop None is its end."""

    path: Path
    start: int = 0
    stop: int | None = None

    def blocks(self) -> Iterator[bytes]:
        """The document, a few megabytes at a time. Raises UserError where the file can't be read."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                left = None if self.stop is None else self.stop - self.start
                while block := file.read(_BLOCK if left is None else min(_BLOCK, left)):
                    left = None if left is None else left - len(block)
                    yield block
        except OSError as error:
            raise UserError(f"{self.path}: can't be read ({error.strerror}).", everywhere=False) from error


@dataclass(frozen=True, slots=True)
class Corpus:
    """The documents to train on and those held out; each part is read in this order."""

    train: Sequence[Document]
    valid: Sequence[Document]


class TextSource(ABC):
    """A collection of text files."""

    name: str

    @abstractmethod
    def corpus(self, root: Path | None = None) -> Corpus:
        """Which files there are, in the same order on every machine. Reads their names and sizes only.

        root: ``data.root``, which is no part of the text, unless that lies in it.
        Raises UserError where there is no text.
        """


@final
class TextFiles(TextSource):
    """A text file, or all files in a folder and its subfolders, in sorted order.

    Of a folder every 20th file is held out, of a single file its last 20th, from a line's beginning on.

    path: the file or folder. pattern: which files of a folder, as a shell pattern; hidden ones never.
    """

    name = "text"

    def __init__(self, path: str | None = None, pattern: str = "*") -> None:
        if not path:
            raise UserError("data.source.path: say which text: data.source.path=<file or folder>")
        self._path = Path(path)
        self._pattern = pattern

    def corpus(self, root: Path | None = None) -> Corpus:
        try:
            if self._path.is_file():
                return _split_file(self._path)
            if not self._path.is_dir():
                problem = "is no file or folder" if self._path.exists() else "there is no such file or folder"
                where = "" if self._path.is_absolute() else f" (it counts from {Path.cwd()})"
                raise UserError(
                    f"data.source.path={self._path}: {problem}{where}.{did_you_mean_path(self._path)}"
                )
            matching = _files(self._path, self._pattern, root)
            files = [file for file in matching if file.stat().st_size > 0]
            if not files:
                raise UserError(
                    f"data.source.path={self._path}: holds no file with text in it that matches"
                    f" data.source.pattern={self._pattern}."
                )
            return _split_file(files[0]) if len(files) == 1 else _split_files(files)
        except OSError as error:
            raise UserError(
                f"data.source.path={self._path}: {error.filename or self._path} can't be read"
                f" ({error.strerror})."
            ) from error


@final
class StandardLibrary(TextSource):
    """The source of the running Python's standard library, without its tests: real text of some
    10 MB on every machine. Which files it has depends on the Python version."""

    name = "stdlib_text"

    def corpus(self, root: Path | None = None) -> Corpus:
        library = Path(sysconfig.get_path("stdlib"))
        foreign = {"site-packages", "dist-packages", "test", "tests"}
        files = [
            file
            for file in _files(library, "*.py", root)
            if not foreign & set(file.relative_to(library).parts)
        ]
        if len(files) < HELD_OUT:
            raise UserError(f"data=stdlib_text: {library} holds no Python source; use data=text.")
        return _split_files(files)


def _files(path: Path, pattern: str, root: Path | None) -> list[Path]:
    """The files whose names match, sorted; without hidden ones, what ddptrain keeps in ``data.root``, and the
    folders of its own runs, sweeps and sets. Raises OSError where a folder can't be read."""
    matching: list[Path] = []
    left_out = set() if root is None else _left_out(path.resolve(), root.resolve())
    for folder, inner, names in os.walk(path, onerror=_raised):
        here = Path(folder)
        note_links(folder, [name for name in inner if not name.startswith(".")])
        for name in [name for name in inner if (here / name).resolve() in left_out]:
            inner.remove(name)
            log.info("note       data: %s is left out: ddptrain keeps sets and tokens there", here / name)
        inner[:] = [name for name in inner if not name.startswith(".") and not _is_ours(here / name)]
        chosen = [here / name for name in fnmatch.filter(names, pattern) if not name.startswith(".")]
        matching += [path for path in chosen if path.is_file()]
    return sorted(matching)


def _is_ours(folder: Path) -> bool:
    """Whether ddptrain has written it."""
    return is_begun(folder) or any(all((folder / name).is_file() for name in mark) for mark in _MARKS)


def _left_out(path: Path, root: Path) -> set[Path]:
    """All of data.root, which may hold other sets; of a text in it what ddptrain makes of sets."""
    return {root / TOKENS, root / "stream"} if path.is_relative_to(root) else {root}


def _raised(error: OSError) -> None:
    raise error


def _split_files(files: Sequence[Path]) -> Corpus:
    return Corpus(
        train=[Document(file) for i, file in enumerate(files) if i % HELD_OUT],
        valid=[Document(file) for file in files[::HELD_OUT]],
    )


def _split_file(path: Path) -> Corpus:
    """Cut before the last 20th: after the next line's end or, where that line is long, character."""
    size = path.stat().st_size
    cut = size * (HELD_OUT - 1) // HELD_OUT
    at_most = min(_BLOCK, (size - cut) // 2)  # of it goes to training
    with path.open("rb") as file:
        file.seek(cut)
        head = file.read(max(3, at_most))
    line_end = head.find(b"\n", 0, at_most)
    begun = len(head[:3]) - len(head[:3].lstrip(CONTINUATION))
    cut += line_end + 1 if line_end >= 0 else begun
    return Corpus(train=[Document(path, 0, cut)], valid=[Document(path, cut)])
