"""Text that lies in a bucket, on a web server or in a folder, as blocks of tokens."""

from typing import NamedTuple, final

import torch

from ddptrain.data.stream.opened import OpenedPart, Streamed
from ddptrain.data.stream.tokens import TokenBlocks
from ddptrain.data.text.tokenizer import BYTES, Tokenizer
from ddptrain.errors import UserError

KIND = "tokens"
TOKENIZER = "tokenizer"


class OpenedText(NamedTuple):
    """documents: how many of them make up the training and the validation part. digest: of all tokens and of
    their order."""

    train: TokenBlocks
    valid: TokenBlocks
    vocabulary: Tokenizer
    documents: tuple[int, int]
    digest: str


@final
class StreamText:
    """A text of ``layout=stream``.

    url, valid_url, cache, cache_gb, shuffle_blocks, retry_s: as `Streamed` has them.
    """

    name = "stream_text"

    def __init__(
        self,
        url: str | None = None,
        valid_url: str | None = None,
        cache: str | None = "data/stream",
        cache_gb: float = 50.0,
        shuffle_blocks: int = 16,
        retry_s: float = 120.0,
    ) -> None:
        self._streamed = Streamed(url, valid_url, cache, cache_gb, shuffle_blocks, retry_s)
        self._shuffle_blocks = shuffle_blocks

    def fetch(self) -> None:
        """Bring what is needed at once to this node. Runs in one process a node."""
        self._streamed.fetch()

    def open(self) -> OpenedText:
        """The text, once `fetch` has run on this node."""
        opened = self._streamed.open(KIND)
        saved, other = (_saved(part) for part in (opened.train, opened.valid))
        if saved != other:
            raise UserError("data.source.valid_url: has another tokenizer than data.source.url.")
        dtype = getattr(torch, opened.about["dtype"])
        train, valid = (
            TokenBlocks(part.samples.cache, dtype, self._shuffle_blocks)
            for part in (opened.train, opened.valid)
        )
        vocabulary = Tokenizer(saved, "data.source.url: its tokenizer")
        first, second = opened.about["documents"][0], opened.valid_about["documents"][1]
        return OpenedText(train, valid, vocabulary, (first, second), opened.identity)


def _saved(part: OpenedPart) -> str:
    """The tokenizer, which comes with a set's small facts."""
    column = part.columns.get(TOKENIZER)
    return BYTES if column is None else column.read().numpy().tobytes().decode()
