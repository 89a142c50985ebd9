"""Language modelling: the Task that recurrent models and Transformers share."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.api import Figure, Loss, Progress, Report, Task, TextSample, UserError
from ddptrain.data.text.data import TextData, Windows
from ddptrain.recipes.outputs import check_outputs

State = dict[str, Tensor]
"""What a model knows of the text so far; each tensor's rows are those of the batch."""


@final
class LanguageModelling(Task):
    """The next token of a text: cross-entropy; nats per token, perplexity, and bits per byte, which is
    comparable over tokenisations.

    model: called with those of ``vocabulary`` (tokens) and ``window`` (tokens of a training sample) that
    it has parameters for. It takes (tokens int64 (n, length), state or None) and returns logits (n, length,
    vocabulary) and the `State` after the last token, from which it goes on.

    Where the data comes in streams, the state is carried from window to window and detached: truncated
    back-propagation through time (Williams and Peng 1990).

    sample: the beginning of the text that TensorBoard shows after each evaluation.
    sample_tokens: its length.
    """

    best_metric = "bits_per_byte"
    higher_is_better = False

    def __init__(
        self, model: Callable[..., nn.Module], data: TextData, sample: str = "", sample_tokens: int = 400
    ) -> None:
        if sample_tokens < 0:
            raise UserError(f"task.sample_tokens={sample_tokens}: must be 0 or more.")
        self._model = model
        self._data = data
        self._sample = sample
        self._sample_tokens = sample_tokens
        self._rank_state = _Carried()

    def build(self) -> nn.Module:
        vocabulary = self._data.vocabulary
        vocabulary.encode(self._sample, "task.sample")  # refuses it now, not after an hour
        return self._model(vocabulary=len(vocabulary), window=self._data.window)

    @cached_property
    def _bytes_per_token(self) -> Tensor:
        return self._data.vocabulary.bytes_per_token()

    def loss(self, model: nn.Module, batch: Windows, progress: Progress) -> Loss:
        inputs, targets = batch.tokens[:, :-1], batch.tokens[:, 1:]
        logits, state = model(inputs, self._rank_state.state_of(batch.rows) if batch.rows else None)
        self._check(logits, model)
        if batch.rows:
            self._rank_state.keep(batch.rows, state)
        return Loss(_nats(logits, targets).sum(), targets.numel())

    def rank_state(self) -> Mapping[str, Tensor]:
        return self._rank_state.all_rows()

    def load_rank_state(self, rows: Mapping[str, Tensor]) -> None:
        self._rank_state = _Carried(rows)

    def evaluate(self, model: nn.Module, batch: Windows) -> Mapping[str, Tensor]:
        assert batch.scored is not None
        inputs, targets = batch.tokens[:, :-1], batch.tokens[:, 1:]
        bytes_of = self._bytes_per_token.to(targets.device)
        nats: list[Tensor] = []
        state: State | None = None
        for span in _spans(inputs.shape[1], self._data.window):
            logits, state = model(inputs[:, span], state)
            self._check(logits, model)
            nats.append((_nats(logits, targets[:, span]) * batch.scored[:, span].flatten()).sum())
        return {
            "nats": torch.stack(nats).sum(),
            "tokens": batch.scored.sum(),
            "bytes": (bytes_of[targets] * batch.scored).sum(),
        }

    def _check(self, logits: Tensor, model: nn.Module) -> None:
        """Raise UserError where the model tells more or fewer tokens than there are."""
        check_outputs(logits, len(self._data.vocabulary), model, "tokens", "(n, length, tokens)")

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        nats = float(sums["nats"])
        loss = nats / int(sums["tokens"])
        return Report(
            {
                "bits_per_byte": nats / math.log(2) / int(sums["bytes"]),
                "loss": loss,
                "perplexity": math.exp(min(loss, 700.0)),  # beyond, a float can't hold it
            }
        )

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        text = self.predict(model, prompt=self._sample, tokens=self._sample_tokens)
        return {"sample": TextSample("".join(text))}

    def predict(
        self,
        model: nn.Module,
        prompt: str = "",
        tokens: int = 500,
        temperature: float = 0.8,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Iterator[str]:
        """The prompt and its continuation.

        temperature: 0 takes the most probable token each time; 1 draws as the model believes. top_k: draw
        from the k most probable only.
        """
        for name, value, least in (("tokens", tokens, 0), ("temperature", temperature, 0), ("seed", seed, 0)):
            if value < least:
                raise UserError(f"{name}={value}: must be {least} or more.")
        if seed >= 2**63:
            raise UserError(f"seed={seed}: must be below 2**63.")
        if top_k is not None and top_k < 1:
            raise UserError(f"top_k={top_k}: must be 1 or more.")
        vocabulary = self._data.vocabulary
        begun = vocabulary.encode(prompt, "prompt") or [vocabulary.start]
        device = next(model.parameters()).device
        generated = continuation(
            model,
            torch.tensor([begun], device=device),
            temperature,
            top_k,
            torch.Generator(device).manual_seed(seed),
        )
        yield prompt
        continued = (token for _, token in zip(range(tokens), generated, strict=False))
        yield from vocabulary.decode(continued, after=begun if prompt else ())


def continuation(
    model: nn.Module, begun: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> Iterator[int]:
    """Tokens drawn one after the other, without an end, after those begun: int64 (1, length).

    The model's state is kept, so the text is not read again for each token. A sync point a token.
    """
    logits, state = model(begun, None)
    while True:
        token = _sample(logits[0, -1].float(), temperature, top_k, generator)
        yield int(token)
        logits, state = model(token.view(1, 1), state)


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    logits = logits.nan_to_num()  # a model that has diverged writes rubbish; it is the loss that says so
    if temperature < torch.finfo(logits.dtype).tiny:
        return logits.argmax()
    if top_k is not None and top_k < len(logits):
        best = logits.topk(top_k)  # of equal ones some
        logits = torch.full_like(logits, -math.inf).scatter(0, best.indices, best.values)
    logits = (logits - logits.max()) / temperature  # at most 0
    return torch.multinomial(logits.softmax(dim=0), 1, generator=generator)


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """(n * length,): of each target, in float32 at least."""
    precise = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.flatten(0, 1).to(precise), targets.flatten(), reduction="none")


def _spans(length: int, window: int) -> Iterator[slice]:
    return (slice(start, min(start + window, length)) for start in range(0, length, window))


class _Carried:
    """The state of this rank's rows, micro-batch by micro-batch."""

    def __init__(self, rows: Mapping[str, Any] | None = None) -> None:
        self._before = dict(rows or {})
        """Of all rows, as this process found it; empty at a run's beginning."""
        self._since: dict[int, State] = {}
        """Of each micro-batch since then, by its first row."""

    def state_of(self, rows: slice) -> State | None:
        if rows.start in self._since:
            return self._since[rows.start]
        return {name: value[rows] for name, value in self._before.items()} or None

    def keep(self, rows: slice, state: State) -> None:
        # cloned, for a compiled model may overwrite its outputs in its next call
        self._since[rows.start] = {name: value.detach().clone() for name, value in state.items()}

    def all_rows(self) -> State:
        if not self._since:
            return dict(self._before)
        parts = [self._since[first] for first in sorted(self._since)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
