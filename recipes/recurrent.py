"""RNN, GRU and LSTM language models on torch's fused cells."""

from collections.abc import Callable, Sequence
from typing import Literal, final

import torch
from torch import Tensor, nn

from ddptrain.recipes.limits import check_model
from ddptrain.recipes.ngrams import NgramEmbedding
from ddptrain.recipes.text import State

_CELLS: dict[str, Callable[..., nn.RNNBase]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
_LSTM_GATES = ("input", "forget", "cell", "output")
"""Their order in torch's weights."""


@final
class RecurrentModel(nn.Module):
    """Logits of the next token by an RNN (Elman 1990), a GRU (Cho et al., arXiv 1406.1078) or an LSTM
    (Hochreiter and Schmidhuber 1997), with the output tied to the embedding.

    cell: rnn (tanh), gru, lstm. width: of embedding and hidden state. layers: each normalises its inputs and
    adds its outputs to them (He et al., arXiv 1512.03385). dropout: before, between and after the layers.
    ngrams, ngram_rows, ngram_width: see `NgramEmbedding`.

    Recurrent matrices start orthogonal, gate by gate (Saxe et al., arXiv 1312.6120), an LSTM's forget gates
    open, with a bias of 1 (Jozefowicz et al. 2015).
    """

    def __init__(
        self,
        vocabulary: int,
        cell: Literal["rnn", "gru", "lstm"] = "lstm",
        width: int = 384,
        layers: int = 2,
        dropout: float = 0.0,
        ngrams: Sequence[int] = (2, 3, 4, 5, 6),
        ngram_rows: int = 32768,
        ngram_width: int = 64,
    ) -> None:
        super().__init__()
        check_model(width, layers, dropout)
        self.embedding = NgramEmbedding(vocabulary, width, ngrams, ngram_rows, ngram_width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        make = _CELLS[cell]
        self.cells = nn.ModuleList(make(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        for layer in self.cells:
            for name, weight in layer.named_parameters():
                _initialise(name, weight, width, is_lstm=cell == "lstm")

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """tokens: int64 (n, length). Returns logits (n, length, vocabulary) and the state after the last one:
        ``hidden`` (n, layers, 1 or 2, width), and the last tokens as ``past``."""
        x, past = self.embedding(tokens, state["past"] if state else None)
        hidden = []
        for i, (norm, cell) in enumerate(zip(self.norms, self.cells, strict=True)):
            outputs, last = cell(self.dropout(norm(x)), self._parts(state["hidden"][:, i]) if state else None)
            x = x + outputs
            hidden.append(torch.stack(last if isinstance(last, tuple) else (last,), dim=2)[0])
        logits = self.embedding.logits(self.dropout(x), self.bias)
        # in the weights' dtype, so that a run may go on in another precision
        return logits, {"hidden": torch.stack(hidden, dim=1).to(self.bias.dtype), "past": past}

    def _parts(self, hidden: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """A layer's state (n, 1 or 2, width) as torch's cells take it: (1, n, width), for an LSTM two."""
        parts = [part.contiguous()[None] for part in hidden.unbind(1)]
        return (parts[0], parts[1]) if len(parts) == 2 else parts[0]


def _initialise(name: str, weight: nn.Parameter, width: int, is_lstm: bool) -> None:
    if name.startswith("weight_hh"):
        for gate in weight.data.split(width):
            nn.init.orthogonal_(gate)
    elif name.startswith("weight_ih"):
        nn.init.normal_(weight, std=width**-0.5)
    else:
        nn.init.zeros_(weight)
        if is_lstm and name.startswith("bias_ih"):  # torch adds two biases; one of them is enough
            forget = _LSTM_GATES.index("forget")
            nn.init.ones_(weight.data[forget * width : (forget + 1) * width])
