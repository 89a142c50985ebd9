"""Token embeddings that also know the tokens just before: hashed n-grams."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.api import UserError

_PRIME = 1_000_003
"""Of the rolling hash; any odd number far from a power of two will do."""


@final
class NgramEmbedding(nn.Module):
    """The embedding of a token plus one of each n-gram that ends in it, looked up by its hash.

    A byte alone says little. The n-grams give a small model for the price of a table look-up what it would
    else spend its width on: Pagnoni et al., Byte Latent Transformer, arXiv 2412.09871, section 3.2.1.
    Different n-grams may share a row; the model learns to live with it.

    orders: lengths of the n-grams, such as [2, 3, 4]; none for a plain embedding. rows: of each length's
    table. ngram_width: of a row; their sum is projected to ``width``.
    """

    def __init__(
        self, vocabulary: int, width: int, orders: Sequence[int], rows: int, ngram_width: int
    ) -> None:
        super().__init__()
        if any(order < 2 for order in orders) or len(set(orders)) < len(orders):
            raise UserError(f"model.ngrams={list(orders)}: must be different whole numbers from 2 on.")
        for name, value in (("ngram_rows", rows), ("ngram_width", ngram_width)):
            if value < 1:
                raise UserError(f"model.{name}={value}: must be 1 or more.")
        self._orders = tuple(sorted(orders))
        self._rows = rows
        self.past = max(self._orders, default=1) - 1
        """How many earlier tokens an embedding depends on."""
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=0.1)
        if orders:
            self.ngrams = nn.EmbeddingBag(rows * len(orders), ngram_width, mode="sum")
            nn.init.normal_(self.ngrams.weight, std=0.05)
            self.project = nn.Linear(ngram_width, width, bias=False)

    def forward(self, tokens: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """tokens: int64 (n, length). past: int64 (n, `past`), the tokens before them; None at a text's
        beginning. Returns (n, length, width) and the past of what follows."""
        if past is None:
            past = tokens.new_zeros(len(tokens), self.past)
        known = torch.cat([past, tokens], dim=1)
        embedded: Tensor = self.tokens(tokens)
        if self._orders:
            keys = self._keys(known, tokens.shape[1])
            sums = self.ngrams(keys.flatten(0, 1))
            embedded = embedded + self.project(sums).view_as(embedded)
        return embedded, known[:, known.shape[1] - self.past :]

    def logits(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """(..., vocabulary) by the embedding itself, tied (Press and Wolf, arXiv 1608.05859)."""
        return functional.linear(hidden, self.tokens.weight, bias)

    def _keys(self, known: Tensor, length: int) -> Tensor:
        """int64 (n, length, orders): the row of each n-gram that ends in one of the last tokens."""
        end = known.shape[1]
        keys: list[Tensor] = []
        rolling = known[:, end - length :]
        for back in range(1, self.past + 1):
            rolling = rolling * _PRIME + known[:, end - length - back : end - back] + 1
            if back + 1 in self._orders:
                row = (rolling ^ (rolling >> 17)) % self._rows
                keys.append(row + len(keys) * self._rows)
        return torch.stack(keys, dim=2)
