"""A recipe of your own: linear regression on generated points."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.api import Data, Loss, Progress, Report, Sampler, Task, World

Points = tuple[Tensor, Tensor]


class Line(Data):
    """Points (x, y) about a line y = slope . x, the last ``valid`` of them for validation."""

    def __init__(self, features: int = 8, train: int = 1000, valid: int = 200) -> None:
        self._features, self._train, self._valid = features, train, valid

    def prepare(self, world: World, seed: int) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self._train + self._valid, self._features, generator=generator)
        y = x @ torch.linspace(-1, 1, self._features) + 0.1 * torch.randn(len(x), generator=generator)
        self._x, self._y = x.to(world.device), y.to(world.device)

    @property
    def train_size(self) -> int:
        return self._train

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Points]:
        for ids, _ in sampler.samples(steps, self._x.device):
            yield self._x[ids], self._y[ids]

    @property
    def valid_size(self) -> int:
        return self._valid

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Points]:
        x, y = self._x[self._train :], self._y[self._train :]
        for chunk in chunks:
            yield x[chunk.start : chunk.stop], y[chunk.start : chunk.stop]

    def preview(self) -> None:
        return None

    def describe(self) -> str:
        return f"{self._train:,} points to train on, {self._valid:,} to validate"


class Regression(Task):
    """Least squares with one linear layer."""

    best_metric = "error"
    higher_is_better = False

    def __init__(self, features: int = 8) -> None:
        self._features = features

    def build(self) -> nn.Module:
        return nn.Linear(self._features, 1)

    def loss(self, model: nn.Module, batch: Points, progress: Progress) -> Loss:
        x, y = batch
        return Loss(functional.mse_loss(model(x).squeeze(1), y, reduction="sum"), len(y))

    def evaluate(self, model: nn.Module, batch: Points) -> Mapping[str, Tensor]:
        x, y = batch
        error = functional.mse_loss(model(x).squeeze(1), y, reduction="sum")
        return {"error": error, "count": torch.tensor(len(y))}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        return Report({"error": float(sums["error"]) / int(sums["count"])})
