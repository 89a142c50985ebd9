"""Text as whole numbers and back: by bytes, or by characters."""

import codecs
from collections.abc import Iterable, Iterator
from typing import final

import torch
from torch import Tensor

from ddptrain.errors import UserError


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

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of tokens as they come, piece by piece; bytes that are no UTF-8 become U+FFFD."""
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
