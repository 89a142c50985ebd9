"""The tokens of text that lies in documents: bytes, or those of a tokenizer of the `tokenizers` library."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ddptrain.data.text.tokens import Vocabulary
from ddptrain.errors import UserError

BYTES = "bytes"
_BYTE_VALUES = 256
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eot_id|>", "[SEP]")
"""What tokenizers call the token after a document."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@final
class Tokenizer:
    """Tokens of documents, each of which is followed by the token ``end``.

    saved: a tokenizer.json's content, or ``bytes``: a token is then a byte, and 256 the end of a document.
    where: named in errors. One without any of the usual end tokens gets one.
    """

    def __init__(self, saved: str, where: str) -> None:
        self.saved = saved
        self._of = None if saved == BYTES else _loaded(saved, where)
        self._tokens = {} if self._of is None else self._of.get_vocab(with_added_tokens=True)
        self.end = (
            _BYTE_VALUES if self._of is None else next(self._tokens[n] for n in _ENDS if n in self._tokens)
        )

    def __len__(self) -> int:
        return _BYTE_VALUES + 1 if self._of is None else max(self._tokens.values()) + 1

    @property
    def start(self) -> int:
        """What a text with no beginning follows: the end of another one."""
        return self.end

    @property
    def names(self) -> list[str]:
        """Of all tokens; none of bytes, as elsewhere."""
        names = {} if self._of is None else {i: name for name, i in self._tokens.items()}
        return [names.get(i, "") for i in range(len(self))] if names else []

    @property
    def dtype(self) -> torch.dtype:
        """The smallest that holds every token."""
        return torch.uint16 if len(self) <= 2**16 else torch.int32

    def bytes_per_token(self) -> Tensor:
        """int64 (tokens,): how many bytes of UTF-8 each stands for; tokens like ``end`` for none.

        So bits per byte count what it costs to tell where a document ends, over the document's bytes. Of a
        tokenizer that changes its text (lower case, unknown words) they are those of the changed text.
        """
        counts = torch.zeros(len(self), dtype=torch.int64)
        if self._of is None:
            counts[:_BYTE_VALUES] = 1
            return counts
        about = json.loads(self._of.to_str())
        added = self._of.get_added_tokens_decoder()
        letters_are_bytes = '"ByteLevel"' in json.dumps(about["decoder"])
        begins_words = '"WordPiece"' in json.dumps(about["decoder"])
        decoder = about["decoder"] or {}
        suffix = decoder["suffix"] if decoder.get("type") == "BPEDecoder" else ""  # stands for a blank
        for name, i in self._tokens.items():
            if i in added:
                counts[i] = 0 if added[i].special else len(added[i].content.encode())
            elif letters_are_bytes:
                counts[i] = len(name)
            elif begins_words:
                counts[i] = len(name[2:].encode()) if name.startswith("##") else len(name.encode()) + 1
            elif suffix and name.endswith(suffix):
                counts[i] = len(name.removesuffix(suffix).encode()) + 1
            else:
                counts[i] = 1 if _BYTE.fullmatch(name) else len(name.replace("\u2581", " ").encode())
        return counts

    def encode(self, text: str, key: str) -> list[int]:
        """The tokens of a text that a user typed, without an end."""
        raw = text.encode(errors="surrogateescape")  # as the shell passed it
        return list(raw) if self._of is None else self.encode_all([raw.decode(errors="replace")])[0]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each, by several threads; of a tokenizer only. What looks like a special token is
        text."""
        assert self._of is not None
        return [encoding.ids for encoding in self._of.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        """The text of tokens as they come, piece by piece, until a document ends. after: those before them,
        which are shown already: a word's blank may be part of its first token."""
        if self._of is None:
            yield from Vocabulary().decode(_until(self.end, tokens))
            return
        ids = list(after)
        before, shown = 0, len(ids)  # a token's text may depend on those before it: these are decoded again
        for token in _until(self.end, tokens):
            ids.append(token)
            if not (piece := self._piece(ids, before, shown)).endswith("\ufffd"):  # else a character's part
                yield piece
                before, shown = shown, len(ids)
        if rest := self._piece(ids, before, shown):
            yield rest

    def _piece(self, ids: list[int], before: int, shown: int) -> str:
        assert self._of is not None
        known = self._of.decode(ids[before:shown], skip_special_tokens=True)
        text: str = self._of.decode(ids[before:], skip_special_tokens=True)
        return text[len(known) :]


def read_tokenizer(name: str) -> Tokenizer:
    """``bytes``, or the tokenizer in a file. Raises UserError naming it."""
    if name == BYTES:
        return Tokenizer(BYTES, "")
    try:
        saved = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(
            f"tokenizer={name}: can't be read ({reason}). Name a tokenizer.json of the tokenizers library, or"
            " bytes."
        ) from error
    return Tokenizer(saved, f"tokenizer={name}")


def _loaded(saved: str, where: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"{where}: needs tokenizers: pip install 'ddptrain[tokenizers]'") from None
    try:
        tokenizer = tokenizers.Tokenizer.from_str(saved)
    except Exception as error:  # of no class of its own
        raise UserError(
            f"{where}: is no tokenizer.json of the tokenizers library ({str(error)[:200]})."
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    if not any(tokenizer.token_to_id(name) is not None for name in _ENDS):
        tokenizer.add_special_tokens([_ENDS[0]])
    return tokenizer


def _until(end: int, tokens: Iterable[int]) -> Iterator[int]:
    for token in tokens:
        if token == end:
            return
        yield token
