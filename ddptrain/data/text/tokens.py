"""Text as whole numbers, by bytes or by characters; a corpus as two files of them, mapped into memory."""

import codecs
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, final

import torch
from torch import Tensor

from ddptrain.data.disk import exclusive_lock, folder_by_content, map_file, size_and_time
from ddptrain.data.text.corpus import TOKENS, Corpus, Document
from ddptrain.errors import UserError
from ddptrain.text import parse_json

Level = Literal["bytes", "characters"]
_FORMAT = 2
_ABOUT = "about.json"
_PARTS = ("train", "valid")
_HELP = "Convert the file, or use data.level=bytes."


@final
class Vocabulary:
    """The tokens of a text.

    characters: the alphabet, sorted; None where a token is a byte, which needs none.
    """

    def __init__(self, characters: str | None = None) -> None:
        self.characters = characters
        self._index = {character: i for i, character in enumerate(characters or "")}

    def __len__(self) -> int:
        return 256 if self.characters is None else len(self.characters)

    @property
    def start(self) -> int:
        """What a text with no beginning follows: a line's end, where there is one."""
        return ord("\n") if self.characters is None else self._index.get("\n", 0)

    def bytes_per_token(self) -> Tensor:
        """int64 (tokens,): how many bytes of UTF-8 each token stands for."""
        return torch.tensor(
            [1] * 256 if self.characters is None else [len(c.encode()) for c in self.characters]
        )

    def encode(self, text: str, key: str) -> list[int]:
        """The tokens of a text that a user typed; ``key`` names it in errors.

        Raises UserError where the alphabet lacks one of its characters.
        """
        if self.characters is None:
            return list(text.encode(errors="surrogateescape"))  # as the shell passed it
        unknown = sorted(set(text) - self._index.keys())
        if unknown:
            raise UserError(
                f"{key}: {', '.join(map(repr, unknown))} {'is' if len(unknown) == 1 else 'are'} not among the"
                f" {len(self)} characters of the text it was trained on."
            )
        return [self._index[character] for character in text]

    def decode(self, tokens: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        """The text of tokens as they come, piece by piece; bytes that are no UTF-8 become U+FFFD. after:
        those before them, on which it does not depend."""
        if self.characters is not None:
            for token in tokens:
                yield self.characters[token]
            return
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            if piece := decoder.decode(bytes([token])):
                yield piece
        if rest := decoder.decode(b"", final=True):
            yield rest


@dataclass(frozen=True, slots=True)
class Tokens:
    """An opened corpus: 1-d tensors of tokens, uint8 or int32, that lie in files and not in memory.

    documents: how many of them make up the training and the validation part.
    digest: SHA-256 of the vocabulary and all tokens.
    """

    train: Tensor
    valid: Tensor
    vocabulary: Vocabulary
    documents: tuple[int, int]
    digest: str


def tokens_folder(root: Path, name: str, corpus: Corpus, level: Level) -> Path:
    """Where the token files of a corpus belong: another folder for each state of its files.

    Told by their real paths, sizes and times, for reading all of a large corpus would take too long.
    """
    documents = [
        [os.path.realpath(document.path), document.start, document.stop, *size_and_time(document.path)]
        for document in (*corpus.train, *corpus.valid)
    ]
    return folder_by_content(root / TOKENS, f"{name}-{level}", [_FORMAT, level, *documents])


def write_tokens(folder: Path, corpus: Corpus, level: Level) -> None:
    """Write the token files, aside and then renamed, unless they are there. Runs in one process a node; of
    several jobs one writes, and the others wait.

    Raises UserError where a file can't be read, is no UTF-8 (for characters), or the disk refuses.
    """
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = folder.with_name(f".{folder.name}.part")
        with exclusive_lock(folder.parent / ".lock"):
            if folder.is_dir():
                return
            for left in folder.parent.glob(".*.part"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            aside.mkdir()
            try:
                _write_parts(aside, corpus, level)
                aside.rename(folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{folder}: the tokens can't be written ({error.strerror}). Make room, or name another"
            " folder with data.root=...",
            everywhere=False,
        ) from error


def _write_parts(folder: Path, corpus: Corpus, level: Level) -> None:
    alphabet = None if level == "bytes" else _alphabet([*corpus.train, *corpus.valid])
    digest = hashlib.sha256(json.dumps(alphabet).encode())
    sizes = [
        _write(folder / part, _encoded(documents, alphabet), digest)
        for part, documents in zip(_PARTS, (corpus.train, corpus.valid), strict=True)
    ]
    about = {
        "alphabet": alphabet,
        "documents": [len(corpus.train), len(corpus.valid)],
        "sizes": sizes,
        "sha256": digest.hexdigest(),
    }
    _write(folder / _ABOUT, [json.dumps(about).encode()], digest)


def open_tokens(folder: Path) -> Tokens:
    """Map the token files into memory. Raises UserError where they are damaged."""
    try:
        about = parse_json((folder / _ABOUT).read_text())
        sizes = [(folder / part).stat().st_size for part in _PARTS]
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: its token files can't be read ({error}). Delete it.") from error
    match about:
        case {
            "sizes": written,
            "alphabet": None | str() as alphabet,
            "documents": [int() as train_documents, int() as valid_documents],
            "sha256": str() as digest,
        }:
            pass
        case _:
            raise UserError(f"{folder}: its {_ABOUT} is damaged. Delete the folder; it is made anew.")
    if sizes != written:
        raise UserError(f"{folder}: its token files are cut short. Delete it; it is made anew.")
    vocabulary = Vocabulary(alphabet)
    dtype = _dtype(len(vocabulary))
    train, valid = (
        map_file(folder / part, size // dtype.itemsize, dtype) if size else torch.empty(0, dtype=dtype)
        for part, size in zip(_PARTS, sizes, strict=True)
    )
    return Tokens(train, valid, vocabulary, (train_documents, valid_documents), digest)


def _write(path: Path, blocks: Iterable[bytes], digest: "hashlib._Hash") -> int:
    """Write and flush a file, taking what is written into the digest; returns its size."""
    with path.open("wb") as file:
        for block in blocks:
            file.write(block)
            digest.update(block)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _dtype(vocabulary: int) -> torch.dtype:
    return torch.uint8 if vocabulary <= 256 else torch.int32


def _alphabet(documents: Sequence[Document]) -> str:
    characters: set[str] = set()
    for document in documents:
        for text in decoded(document, _HELP):
            characters |= set(text)
    return "".join(sorted(characters))


def _encoded(documents: Sequence[Document], alphabet: str | None) -> Iterator[bytes]:
    if alphabet is None:
        for document in documents:
            yield from document.blocks()
        return
    codes = _codes(alphabet)
    for document in documents:
        for text in decoded(document, _HELP):
            tokens = torch.searchsorted(codes, _codes(text)).to(_dtype(len(alphabet)))
            yield tokens.numpy().tobytes()


def decoded(document: Document, helps: str) -> Iterator[str]:
    """A document's text, a few megabytes at a time. Raises UserError where it is no UTF-8; helps: what to do
    about that."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = document.start
    for block in chain(document.blocks(), [b""]):
        held_back = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = read - held_back + error.start
            raise UserError(
                f"{document.path}: byte {at} is not UTF-8 (0x{error.object[error.start]:02x}), so it has no"
                f" characters. {helps}",
                everywhere=False,
            ) from error
        read += len(block)
        if text:
            yield text


def _codes(text: str) -> Tensor:
    """int32: the code points of a text that is not empty."""
    return torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
