"""Translation from one short text to another: the Task of the encoder-decoder."""

from collections.abc import Callable, Iterator, Mapping
from typing import cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.api import Figure, Loss, Progress, Report, Task, TextSample, UserError
from ddptrain.data.text.dates import BEGIN, END, VOCABULARY, DatePairs, Pairs, decoded, padded
from ddptrain.recipes.encoder_decoder import EncoderDecoder
from ddptrain.recipes.limits import check_label_smoothing

_SHOWN = 12
"""Held-out pairs in the figure."""


@final
class Translation(Task):
    """Cross-entropy of the target given the source; exact match is the share of held-out sources whose whole
    target is found by greedy decoding.

    label_smoothing: in [0, 1), in training only.
    """

    best_metric = "exact_match"
    higher_is_better = True

    def __init__(
        self, model: Callable[..., nn.Module], data: DatePairs, label_smoothing: float = 0.0
    ) -> None:
        check_label_smoothing(label_smoothing)
        self._model = model
        self._data = data
        self._label_smoothing = label_smoothing

    def build(self) -> nn.Module:
        return self._model(
            vocabulary=VOCABULARY, longest_source=self._data.longest, longest_target=self._data.target_length
        )

    def loss(self, model: nn.Module, batch: Pairs, progress: Progress) -> Loss:
        loss = self._nats(model, batch, self._label_smoothing)
        return Loss(loss, batch.target[:, 1:].numel())

    def evaluate(self, model: nn.Module, batch: Pairs) -> Mapping[str, Tensor]:
        predicted = greedy(cast(EncoderDecoder, model), batch.source, self._data.target_length)
        right = (predicted == batch.target[:, 1:]).all(dim=1)
        return {
            "nats": self._nats(model, batch),
            "tokens": torch.tensor(batch.target[:, 1:].numel(), device=right.device),
            "right": right.sum(),
            "count": torch.tensor(len(right), device=right.device),
        }

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        return Report(
            {
                "exact_match": int(sums["right"]) / int(sums["count"]),
                "loss": float(sums["nats"]) / int(sums["tokens"]),
            }
        )

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        pairs = self._data.examples(_SHOWN)
        predicted = greedy(cast(EncoderDecoder, model), pairs.source, self._data.target_length)
        lines = []
        for source, target, own in zip(pairs.source, pairs.target, predicted, strict=True):
            right, answer = decoded(target.tolist()), decoded(own.tolist())
            lines.append(
                f"{decoded(source.tolist()):32} {answer:12} {'' if answer == right else right}".rstrip()
            )
        return {"sample": TextSample("\n".join(lines))}

    def predict(self, model: nn.Module, text: str, beam: int = 1) -> Iterator[str]:
        """The translation of a text. beam: how many beginnings are followed at once; 1 is greedy."""
        if beam < 1:
            raise UserError(f"beam={beam}: must be 1 or more.")
        source = torch.tensor([padded(text, "text")], device=next(model.parameters()).device)
        yield decoded(
            beam_search(cast(EncoderDecoder, model), source, self._data.target_length, beam).tolist()
        )

    def _nats(self, model: nn.Module, batch: Pairs, label_smoothing: float = 0.0) -> Tensor:
        logits = model(batch.source, batch.target[:, :-1])
        return functional.cross_entropy(
            logits.flatten(0, 1).float(),
            batch.target[:, 1:].flatten(),
            reduction="sum",
            label_smoothing=label_smoothing,
        )


def greedy(model: EncoderDecoder, source: Tensor, length: int) -> Tensor:
    """int64 (n, length): the most probable token each time."""
    memory, mask = model.encode(source)
    target = source.new_full((len(source), 1), BEGIN)
    for _ in range(length):
        best = model.decode(memory, mask, target)[:, -1].argmax(dim=-1, keepdim=True)
        target = torch.cat([target, best], dim=1)
    return target[:, 1:]


def beam_search(model: EncoderDecoder, source: Tensor, length: int, beam: int) -> Tensor:
    """int64 (length,): the most probable target found by following the ``beam`` best beginnings.

    source: int64 (1, source length). What follows an END costs nothing and is END again.
    """
    memory, mask = model.encode(source)
    targets = source.new_full((1, 1), BEGIN)
    scores = torch.zeros(1, device=source.device)
    for _ in range(length):
        each = len(targets)
        logits = model.decode(memory.expand(each, -1, -1), mask.expand(each, -1, -1, -1), targets)[:, -1]
        log_probabilities = logits.float().log_softmax(dim=-1)
        ended = targets[:, -1] == END
        log_probabilities[ended] = -torch.inf
        log_probabilities[ended, END] = 0.0
        together = (scores[:, None] + log_probabilities).flatten()
        scores, chosen = together.topk(min(beam, len(together)))
        vocabulary = logits.shape[1]
        targets = torch.cat([targets[chosen // vocabulary], (chosen % vocabulary)[:, None]], dim=1)
    return targets[0, 1:]
