"""The Transformer as first published: an encoder that reads one text, a decoder that writes another."""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.recipes.attention import Attention, Cache, feed_forward, initialise
from ddptrain.recipes.limits import check_model


@final
class EncoderDecoder(nn.Module):
    """Logits of a target's next tokens, given a source (Vaswani et al., arXiv 1706.03762; with the norms
    before each branch). Token 0 is padding. Learned positions; one embedding for source, target and output.

    layers: of the encoder, and as many of the decoder. longest_source, longest_target: in tokens.
    """

    def __init__(
        self,
        vocabulary: int,
        longest_source: int,
        longest_target: int,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_model(width, layers, dropout)
        self.encoder = nn.ModuleList(_EncoderBlock(width, heads, dropout) for _ in range(layers))
        self.decoder = nn.ModuleList(_DecoderBlock(width, heads, dropout) for _ in range(layers))
        initialise(self, layers)
        self.tokens = nn.Embedding(vocabulary, width)
        self.source_positions = nn.Parameter(torch.empty(longest_source, width))
        self.target_positions = nn.Parameter(torch.empty(longest_target, width))
        for weight in (self.tokens.weight, self.source_positions, self.target_positions):
            nn.init.normal_(weight, std=0.1)
        self.dropout = nn.Dropout(dropout)
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder_norm = nn.LayerNorm(width)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """source: int64 (n, source length), padded with 0. target: int64 (n, length), from the begin token
        on. Returns (n, length, vocabulary)."""
        return self.decode(*self.encode(source), target)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The source as read, (n, source length, width), and its mask for attention."""
        mask = (source != 0)[:, None, None, :]
        x = self.dropout(self.tokens(source) + self.source_positions[: source.shape[1]])
        for block in self.encoder:
            x = block(x, mask)
        return self.encoder_norm(x), mask

    def decode(self, memory: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """Logits (n, length, vocabulary) of the tokens that follow each of the target's."""
        x = self.dropout(self.tokens(target) + self.target_positions[: target.shape[1]])
        for block in self.decoder:
            x = block(x, memory, mask)
        return functional.linear(self.decoder_norm(x), self.tokens.weight)


@final
class _EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = feed_forward(width, dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, self.attention.attended(normed), mask=mask)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


@final
class _DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.source_norm = nn.LayerNorm(width)
        self.source_attention = Attention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = feed_forward(width, dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        own = self.attention.attended(normed)
        x = x + self.attention(normed, own, window=x.shape[1])
        source: Cache = self.source_attention.attended(memory)
        x = x + self.source_attention(self.source_norm(x), source, mask=mask)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out
