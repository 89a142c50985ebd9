"""Where text comes from: which files, and which of them are held out for validation."""

import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ddptrain.errors import UserError

HELD_OUT = 20
"""Every 20th file, or the last 20th of a single one, is held out."""
_BLOCK = 1 << 24
_CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes that in UTF-8 continue a character."""


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
    def corpus(self) -> Corpus:
        """Which files there are, in the same order on every machine. Reads their names and sizes only.

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
        if path is None:
            raise UserError("data.source.path: say which text: data.source.path=<file or folder>")
        self._path = Path(path)
        self._pattern = pattern

    def corpus(self) -> Corpus:
        if self._path.is_file():
            return _split_file(self._path)
        if not self._path.is_dir():
            raise UserError(f"data.source.path={self._path}: there is no such file or folder.")
        files = _files(self._path, self._pattern)
        if not files:
            raise UserError(
                f"data.source.path={self._path}: holds no file that matches"
                f" data.source.pattern={self._pattern}."
            )
        return _split_file(files[0]) if len(files) == 1 else _split_files(files)


@final
class StandardLibrary(TextSource):
    """The source of the running Python's standard library, without its tests: real text of some
    10 MB on every machine. Which files it has depends on the Python version."""

    name = "stdlib_text"

    def corpus(self) -> Corpus:
        root = Path(sysconfig.get_path("stdlib"))
        foreign = {"site-packages", "dist-packages", "test", "tests"}
        files = [file for file in _files(root, "*.py") if not foreign & set(file.relative_to(root).parts)]
        if len(files) < HELD_OUT:
            raise UserError(f"data=stdlib_text: {root} holds no Python source; use data=text.")
        return _split_files(files)


def _files(root: Path, pattern: str) -> list[Path]:
    found = (path for path in root.rglob(pattern) if path.is_file())
    return sorted(path for path in found if not _hidden(path.relative_to(root)))


def _hidden(inner: Path) -> bool:
    return any(part.startswith(".") for part in inner.parts)


def _split_files(files: Sequence[Path]) -> Corpus:
    return Corpus(
        train=[Document(file) for i, file in enumerate(files) if i % HELD_OUT],
        valid=[Document(file) for file in files[::HELD_OUT]],
    )


def _split_file(path: Path) -> Corpus:
    """Cut before the last 20th: after the next line's end or, where lines are too long, character."""
    size = path.stat().st_size
    cut = size * (HELD_OUT - 1) // HELD_OUT
    try:
        with path.open("rb") as file:
            file.seek(cut)
            line = file.readline(_BLOCK)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}).") from error
    if line.endswith(b"\n") and cut + len(line) < size:
        cut += len(line)
    else:
        cut += len(line[:3]) - len(line[:3].lstrip(_CONTINUATION))
    return Corpus(train=[Document(path, 0, cut)], valid=[Document(path, cut)])
