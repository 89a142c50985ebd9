"""A decoder-only Transformer language model."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from ddptrain.recipes.attention import Attention, Cache, Rotation, feed_forward, initialise, rotation
from ddptrain.recipes.limits import check_model
from ddptrain.recipes.ngrams import NgramEmbedding
from ddptrain.recipes.text import State


@final
class TransformerModel(nn.Module):
    """Logits of the next token: pre-norm blocks (Xiong et al., arXiv 2002.04745), rotary positions, causal
    attention, RMSNorm (Zhang and Sennrich, arXiv 1910.07467), the output tied to the embedding.

    window: tokens that a token attends to at most, itself included. heads: of attention. dropout: on
    embedding, attention and residual branches. ngrams, ngram_rows, ngram_width: see `NgramEmbedding`.
    """

    def __init__(
        self,
        vocabulary: int,
        window: int,
        width: int = 256,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
        ngrams: Sequence[int] = (2, 3, 4, 5, 6),
        ngram_rows: int = 32768,
        ngram_width: int = 64,
    ) -> None:
        super().__init__()
        check_model(width, layers, dropout)
        self._window = window
        self._head_width = width // max(heads, 1)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout, window) for _ in range(layers))
        initialise(self, layers)
        self.embedding = NgramEmbedding(vocabulary, width, ngrams, ngram_rows, ngram_width)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.RMSNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """tokens: int64 (n, length). Returns logits (n, length, vocabulary) and the state after the last
        one: each layer's keys and values of the last ``window - 1`` tokens, and the past."""
        x, past = self.embedding(tokens, state["past"] if state else None)
        known = state["keys.0"].shape[2] if state else 0
        by = rotation(known + tokens.shape[1], self._head_width, tokens.device)
        x = self.dropout(x)
        after: State = {"past": past}
        for i, block in enumerate(self.blocks):
            names = f"keys.{i}", f"values.{i}"
            x, own = block(x, by, Cache(*(state[name] for name in names)) if state else None)
            for name, of in zip(names, own, strict=True):
                after[name] = of[:, :, max(0, of.shape[2] - self._window + 1) :]
        return self.embedding.logits(self.norm(x), self.bias), after


@final
class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, window: int) -> None:
        super().__init__()
        self._window = window
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.dropout = nn.Dropout(dropout)
        self.feed_forward_norm = nn.RMSNorm(width)
        self.feed_forward = feed_forward(width, dropout)

    def forward(self, x: Tensor, by: Rotation, known: Cache | None) -> tuple[Tensor, Cache]:
        normed = self.attention_norm(x)
        own = self.attention.attended(normed)
        if known is not None:
            own = Cache(*(torch.cat(pair, dim=2) for pair in zip(known, own, strict=True)))
        x = x + self.dropout(self.attention(normed, own, by, self._window))
        return x + self.feed_forward(self.feed_forward_norm(x)), own
