"""Makes a streamed set of a text: its documents, packed one after the other into blocks of tokens."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddptrain.api.rng import derive_seed
from ddptrain.data.disk import size_and_time
from ddptrain.data.stream.text import KIND, TOKENIZER
from ddptrain.data.stream.write import SetFolder, bytes_of_block
from ddptrain.data.text.corpus import CONTINUATION, Corpus, Document
from ddptrain.data.text.tokenizer import BYTES, Tokenizer
from ddptrain.data.text.tokens import decoded
from ddptrain.errors import UserError

_LOOK = 2**16
"""Bytes in which a line's end is looked for."""
_PIECE = 2**18
"""Characters, at least, that a tokenizer is given at a time, up to a line's end."""
_LOOKED_AT = 16
"""Documents by whose beginnings it is told how many tokens a byte makes."""
_HELP = "Convert the file, or write bytes: tokenizer=bytes."


class TokenRun(NamedTuple):
    """The bytes of a document that go into one block. ends: the document ends with them."""

    of: Document
    ends: bool


def write_text(folder: Path, corpus: Corpus, tokenizer: Tokenizer, block_mb: float) -> Iterator[str]:
    """Yields a line for each thing written. Documents to train on are shuffled, once; a document is followed
    by the token ``end``, and goes on in the next block where one is full."""
    block_bytes = bytes_of_block(block_mb)
    documents = {"train": _shuffled(corpus.train), "valid": list(corpus.valid)}
    sizes = {part: [_size(document) for document in some] for part, some in documents.items()}
    for part, of in sizes.items():
        if sum(of) == 0:
            raise UserError(f"write: the {part} part has no text. Take a longer text.")
    files = [
        [str(document.path), document.start, document.stop, *size_and_time(document.path)]
        for some in documents.values()
        for document in some
    ]
    set_folder = SetFolder(folder, [KIND, tokenizer.saved, block_bytes, files])
    columns = {}
    if tokenizer.saved != BYTES:
        columns[TOKENIZER] = set_folder.column("tokenizer.json", _as_tensor(tokenizer.saved.encode()))
    per_byte = _tokens_per_byte(documents["train"], tokenizer)
    raw = max(1, int(block_bytes / tokenizer.dtype.itemsize / per_byte))
    after = after_line if tokenizer.saved != BYTES else lambda document, at: at
    parts: dict[str, Any] = {}
    for part, some in documents.items():
        runs = cut(some, sizes[part], raw, after)
        blocks = set_folder.blocks(part, len(runs), partial(_content, runs, tokenizer))
        parts[part] = {"fields": [KIND], "blocks": blocks, "columns": columns}
        tokens, size = sum(block.samples for block in blocks), sum(block.size for block in blocks)
        yield (
            f"{part}: {tokens:,} tokens of {len(some):,} documents in {len(blocks):,} blocks,"
            f" {size / 1e6:,.1f} MB"
        )
    dtype = str(tokenizer.dtype).removeprefix("torch.")
    about = {"dtype": dtype, "documents": [len(some) for some in documents.values()]}
    yield set_folder.finish(KIND, about, parts)


def cut(
    documents: Sequence[Document], sizes: Sequence[int], raw: int, after: Callable[[Document, int], int]
) -> list[list[TokenRun]]:
    """What goes into each block: about ``raw`` bytes of text, all blocks nearly equally many.

    sizes: bytes of each document. after: from which place on, of those from one of a document on, it may be
    cut.
    """
    total = sum(sizes)
    count = max(1, round(total / raw))
    ends = iter([total * i // count for i in range(1, count + 1)])
    blocks: list[list[TokenRun]] = [[]]
    before, end = 0, next(ends)
    for document, size in zip(documents, sizes, strict=True):
        begin = 0
        while begin < size and before + size > end:
            at = min(size, after(document, max(0, end - before)))  # a long line may lie in several blocks
            if at > begin:
                blocks[-1].append(_run(document, begin, at, size))
                begin = at
            blocks.append([])
            end = next(ends)
        if begin < size:
            blocks[-1].append(_run(document, begin, size, size))
        before += size
    return [runs for runs in blocks if runs]


def after_line(document: Document, at: int) -> int:
    """A place in a document: after the next line's end or, where that line is long, before a character."""
    if at == 0:
        return 0
    with document.path.open("rb") as file:
        file.seek(document.start + at - 1)
        head = file.read(_LOOK)
    line_end = head.find(b"\n")
    if line_end >= 0:
        return at + line_end
    return at + len(head[1:5]) - len(head[1:5].lstrip(CONTINUATION))


def _run(document: Document, begin: int, stop: int, size: int) -> TokenRun:
    return TokenRun(Document(document.path, document.start + begin, document.start + stop), stop == size)


def _size(document: Document) -> int:
    stop = size_and_time(document.path)[0] if document.stop is None else document.stop
    return stop - document.start


def _shuffled(documents: Sequence[Document]) -> list[Document]:
    generator = torch.Generator().manual_seed(derive_seed(0, len(documents)))
    return [documents[i] for i in torch.randperm(len(documents), generator=generator).tolist()]


def _tokens_per_byte(documents: Sequence[Document], tokenizer: Tokenizer) -> float:
    if tokenizer.saved == BYTES:
        return 1.0
    heads = [next(document.blocks(), b"")[:_LOOK] for document in documents[:_LOOKED_AT]]
    tokens = tokenizer.encode_all([head.decode(errors="ignore") for head in heads])
    return max(1, sum(map(len, tokens))) / max(1, sum(map(len, heads)))


def _content(blocks: Sequence[Sequence[TokenRun]], tokenizer: Tokenizer, i: int) -> tuple[bytes, int]:
    """The i-th block, and how many tokens it has."""
    end = torch.tensor([tokenizer.end], dtype=tokenizer.dtype)
    pieces: list[Tensor] = []
    for run in blocks[i]:
        pieces += _tokens(run.of, tokenizer)
        pieces += [end] * run.ends
    tokens = torch.cat(pieces)
    return tokens.numpy().tobytes(), len(tokens)


def _tokens(document: Document, tokenizer: Tokenizer) -> Iterator[Tensor]:
    if tokenizer.saved == BYTES:
        for block in document.blocks():
            yield _as_tensor(block).to(tokenizer.dtype)
        return
    for text in decoded(document, _HELP):
        for ids in tokenizer.encode_all(list(_pieces(text))):
            yield torch.tensor(ids, dtype=tokenizer.dtype)


def _pieces(text: str) -> Iterator[str]:
    """Up to line ends where there are some."""
    at = 0
    while at < len(text):
        line_end = text.find("\n", at + _PIECE)
        stop = len(text) if line_end < 0 else line_end + 1
        yield text[at:stop]
        at = stop


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
