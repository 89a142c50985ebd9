"""What both Transformers are made of: attention with rotary positions, the feed-forward branch, and their
first weights."""

from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.api import UserError

_LONGEST_WAVE = 10_000.0


class Cache(NamedTuple):
    """Keys and values of earlier tokens, (n, heads, length, width / heads) each."""

    keys: Tensor
    values: Tensor


class Rotation(NamedTuple):
    """Cosines and sines of the positions' angles: (length, width / heads / 2) each."""

    cos: Tensor
    sin: Tensor


def rotation(length: int, head_width: int, device: torch.device) -> Rotation:
    """Angles for the positions from 0 to length - 1: rotary embedding (Su et al., arXiv 2104.09864). Under
    autocast in its dtype, as queries and keys are: in float32 their products would take twice the memory."""
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = positions[:, None] * _LONGEST_WAVE**-exponents
    # "meta" has no autocast; torch.amp.is_autocast_available would break torch 2.11's compiled graphs in two
    autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else angles.dtype
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotated(x: Tensor, by: Rotation) -> Tensor:
    """(n, heads, length, head width): each pair of channels (i, i + half) turned by its position's angle;
    x stands at the last of the positions."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = by.cos[-x.shape[2] :], by.sin[-x.shape[2] :]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


@final
class Attention(nn.Module):
    """Multi-head attention (Vaswani et al., arXiv 1706.03762) by torch's scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if heads < 1 or width % (2 * heads):
            raise UserError(
                f"model.heads={heads}: model.width={width} must be a multiple of twice the heads."
            )
        self.heads = heads
        self.dropout = dropout
        self.queries = nn.Linear(width, width, bias=False)
        self.keys_values = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def attended(self, source: Tensor) -> Cache:
        """Keys, not yet rotated, and values of (n, length, width)."""
        keys, values = (self._split(x) for x in self.keys_values(source).chunk(2, dim=-1))
        return Cache(keys, values)

    def forward(
        self,
        x: Tensor,
        to: Cache,
        by: Rotation | None = None,
        window: int | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """x: (n, length, width) attends to keys and values.

        by: rotates both, by positions counted from the first key, for only their distance matters.
        window: the last keys are x's own, and each looks back at so many at most, its own included.
        mask: bool, True where it may look, broadcastable to (n, heads, length, keys).
        """
        queries = self._split(self.queries(x))
        keys = to.keys
        if by is not None:
            queries, keys = rotated(queries, by), rotated(keys, by)
        length, known = queries.shape[2], to.keys.shape[2]
        all_causal = window is not None and length == known <= window
        if window is not None and not all_causal:
            causal = torch.ones(length, known, dtype=torch.bool, device=x.device).tril(known - length)
            mask = causal.triu(known - length - window + 1)
        attended = functional.scaled_dot_product_attention(
            queries,
            keys,
            to.values,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=all_causal,
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads


def feed_forward(width: int, dropout: float) -> nn.Module:
    """Two linear layers, four times as wide between."""
    return nn.Sequential(
        nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
    )


def initialise(model: nn.Module, layers: int) -> None:
    """Normal weights, of deviation 1/sqrt(inputs); those that end a residual branch are smaller, by the
    number of branches (Radford et al., GPT-2, 2019, section 2.3)."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            ends_branch = name.endswith((".out", "feed_forward.2"))
            scale = (2 * layers) ** -0.5 if ends_branch else 1.0
            nn.init.normal_(layer.weight, std=scale * layer.in_features**-0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
