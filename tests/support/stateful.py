"""A model of any kinds of state that a module can have, with a task and data to train it.

Each kind is a layer that moves its state in training, and whose state says something in evaluation: state
that is lost, left behind or taken from elsewhere shows in the loss.
"""

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ddptrain.api.observer import Evaluated, Observer
from ddptrain.api.recipe import Data, Deployed, Loss, Progress, Report, Task
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.config.targets import open_package

open_package("stateful")  # configs may name what is here

FEATURES, WIDTH, CLASSES = 12, 16, 5
VALID = 50


class InPlace(nn.Module):
    """A buffer that training changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.8).add_(0.2 * x.detach().mean(dim=0))
        return x + self.mean


class Replaced(InPlace):
    """A buffer that is another tensor after each pass."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * x.detach().mean(dim=0).to(self.mean)
        return x + self.mean


class Extra(nn.Module):
    """State that is in no buffer: a number, a tensor that is handed out as it is, and nested ones."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.scale = torch.ones(())
        self.tables: dict[str, Any] = {"of": [torch.zeros(WIDTH), 0.0]}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.scale.mul_(1.05)
            table, share = self.tables["of"]
            self.tables = {"of": [table + 0.02, share + 0.01]}
        table, share = self.tables["of"]
        return x * self.scale.to(x) + table.to(x) + share + 0.01 * (self.passes % 7)

    def get_extra_state(self) -> dict[str, Any]:
        return {"passes": self.passes, "scale": self.scale, "tables": self.tables}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.passes, self.scale, self.tables = state["passes"], state["scale"], state["tables"]


class Complex(nn.Module):
    """A complex parameter and a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // 2 + 1
        self.filter = nn.Parameter(torch.randn(size, dtype=torch.complex64))
        self.register_buffer("phase", torch.ones(size, dtype=torch.complex64))
        self.phase: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.phase.mul_(0.98 + 0.1j)
        return torch.fft.irfft(torch.fft.rfft(x.float()) * self.filter * self.phase, n=WIDTH).to(x)


class Tied(nn.Module):
    """A parameter and a buffer under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight
        self.register_buffer("drift", torch.zeros(WIDTH))
        self.down.register_buffer("drift", self.drift)
        self.drift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.drift.add_(0.05)
        return torch.tanh(self.down(torch.tanh(self.up(x)))) + self.drift


class NoGradient(nn.Module):
    """Parameters that want no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class MadeLate(nn.Module):
    """A buffer that there is from the first pass on, and that is no part of a checkpoint: it is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        self.table: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, WIDTH, device=x.device)
        return x * self.table.to(x)


class NotSaved(nn.Module):
    """The same, made with the module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(1, 2, WIDTH), persistent=False)
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


class Integers(nn.Module):
    """Buffers of whole numbers and of truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.bool))
        self.calls: Tensor
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.seen |= torch.arange(WIDTH, device=x.device) == self.calls % WIDTH
        return x * (1 + 0.1 * (self.calls % 5)) + 0.5 * self.seen.to(x)


class OtherTypes(nn.Module):
    """Parameters of other floating types than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return torch.tanh(self.narrow(self.wide(x.double()).bfloat16())).to(x)


class Scalars(nn.Module):
    """A parameter without dimensions, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.nothing.sum()


class Convolved(nn.Module):
    """A convolution, whose filters channels_last lays out in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.spread, self.layer = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.spread(x.view(-1, 1, 4, 4)))).mean(dim=1).flatten(1)


class Turned(nn.Module):
    """A parameter that is not contiguous, nor dense."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).div(4)[:, ::2].t())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Looked(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.table((x[:, 0].detach().float().abs() * 4).long().clamp(0, 8))
        return x + found


class Spectral(nn.Module):
    """A parametrization with buffers, which training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "in_place": InPlace,
    "replaced": Replaced,
    "extra": Extra,
    "complex": Complex,
    "tied": Tied,
    "no_gradient": NoGradient,
    "made_late": MadeLate,
    "not_saved": NotSaved,
    "integers": Integers,
    "types": OtherTypes,
    "scalars": Scalars,
    "conv": Convolved,
    "turned": Turned,
    "spectral": Spectral,
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "sparse": Looked,
}
ONLY_CONSTANT = ("no_gradient", "made_late", "not_saved", "dropout")
"""Kinds without state that training moves."""


class Stateful(nn.Module):
    """A layer, one of each of these kinds, and a layer."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.middle = nn.ModuleDict({name: KINDS[name]() for name in kinds})
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        for layer in self.middle.values():
            x = layer(x)
        logits: Tensor = self.last(torch.tanh(x).to(self.last.weight.dtype))
        return logits


class Guess(Task):
    """Cross-entropy of a `Stateful` model.

    kinds: keys of `KINDS`. dtype: of its parameters and buffers. bad_steps: their loss is not finite.
    carried: each row of the batch has a number that goes on from step to step, made ``anew`` in each or
    changed ``in_place``. drawn: the generators of Python and NumPy have a say.
    """

    best_metric = "accuracy"
    higher_is_better = True

    def __init__(
        self,
        kinds: Sequence[str] = (),
        dtype: str = "float32",
        bad_steps: Sequence[int] = (),
        carried: Literal["", "anew", "in_place"] = "",
        drawn: bool = False,
    ) -> None:
        self._kinds, self._bad_steps, self._carried = tuple(kinds), tuple(bad_steps), carried
        self._drawn = drawn
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._rows: Tensor | None = None

    def build(self) -> nn.Module:
        usual = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            return Stateful(self._kinds)
        finally:
            torch.set_default_dtype(usual)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
        features, labels = batch
        if self._carried:
            before = torch.zeros(len(labels), 1) if self._rows is None else self._rows
            features = features + 0.1 * before
            after = 0.5 * before + features.mean(dim=1, keepdim=True)
            if self._carried == "in_place" and self._rows is not None:
                self._rows.copy_(after)
            else:
                self._rows = after
        if self._drawn:
            features = features * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))
        logits = model(features).float()
        total = nn.functional.cross_entropy(logits, labels, reduction="sum")
        if progress.step in self._bad_steps:
            total = total * float("nan")
        return Loss(total, len(labels), {"right": (logits.argmax(dim=1) == labels).sum()})

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        features, labels = batch
        logits = model(features).float()
        return {
            "loss": nn.functional.cross_entropy(logits, labels, reduction="sum"),
            "right": (logits.argmax(dim=1) == labels).sum(),
            "count": torch.tensor(len(labels)),
        }

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        count = int(sums["count"])
        return Report({"accuracy": int(sums["right"]) / count, "loss": float(sums["loss"]) / count})

    def rank_state(self) -> Mapping[str, Tensor]:
        return {} if self._rows is None else {"rows": self._rows}

    def load_rank_state(self, rows: Mapping[str, Tensor]) -> None:
        self._rows = rows.get("rows")

    def deploy(self, model: nn.Module) -> Deployed:
        example = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(1))
        return Deployed(model, (example,), ("features",), ("logits",), any_batch=True)


class Dying(Observer):
    """Ends the process, with nothing flushed or closed, after the evaluation at a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def evaluated(self, event: Evaluated) -> None:
        if event.step >= self._step:
            os._exit(137)


class Points(Data):
    """Gaussian vectors with linear labels, of which the first ``train`` are trained on."""

    def __init__(self, train: int = 60) -> None:
        self._train = train

    def prepare(self, world: World, seed: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.features = torch.randn(self._train + VALID, FEATURES, generator=generator)
        truth = torch.randn(FEATURES, CLASSES, generator=generator)
        self.labels = (self.features @ truth).argmax(dim=1)

    @property
    def train_size(self) -> int:
        return self._train

    @property
    def valid_size(self) -> int:
        return VALID

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
        for ids, _ in sampler.samples(steps, torch.device("cpu")):
            yield self.features[ids], self.labels[ids]

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in chunks:
            chosen = slice(self._train + chunk.start, self._train + chunk.stop)
            yield self.features[chosen], self.labels[chosen]

    def preview(self) -> None:
        return None

    def describe(self) -> str:
        return "points"
