"""Recipes that break a promise, each in a way that looks harmless. `prove` has to find them.

They go beside my_recipe.py, whose recipe they change: ``task._target_=unkept.Counting``.
"""

from collections.abc import Iterator, Mapping

import torch
from my_recipe import Line, Points, Regression
from torch import Tensor, nn

from ddptrain.api.recipe import Loss, Progress, Report
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World


class Counting(Regression):
    """Weighs the loss by how many batches it has seen, which no checkpoint knows."""

    def __init__(self, features: int = 8) -> None:
        super().__init__(features)
        self._seen = 0

    def loss(self, model: nn.Module, batch: Points, progress: Progress) -> Loss:
        self._seen += 1
        loss = super().loss(model, batch, progress)
        return Loss(loss.sum * (1 + self._seen / 100), loss.count)


class Noisy(Regression):
    """Draws noise from a generator that nobody has seeded."""

    def __init__(self, features: int = 8) -> None:
        super().__init__(features)
        self._generator = torch.Generator()
        self._generator.seed()

    def loss(self, model: nn.Module, batch: Points, progress: Progress) -> Loss:
        x, y = batch
        return super().loss(model, (x + 0.1 * torch.randn(x.shape, generator=self._generator), y), progress)


class Mean(Regression):
    """Gives the loss as a mean, though it is asked for a sum."""

    def loss(self, model: nn.Module, batch: Points, progress: Progress) -> Loss:
        loss = super().loss(model, batch, progress)
        return Loss(loss.sum / len(batch[1]), loss.count)


class Normed(Regression):
    """Breaks nothing: BatchNorm and dropout see one rank's part of the batch."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(self._features), nn.Dropout(0.1), super().build())


class Averages(Regression):
    """Reports the mean of the batches' means."""

    def evaluate(self, model: nn.Module, batch: Points) -> Mapping[str, Tensor]:
        return {"error": super().evaluate(model, batch)["error"] / len(batch[1]), "batches": torch.tensor(1)}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        return Report({"error": float(sums["error"]) / int(sums["batches"])})


class OwnShare(Regression):
    """Divides what all ranks have added up by what this one has seen."""

    def __init__(self, features: int = 8) -> None:
        super().__init__(features)
        self._seen = 0

    def evaluate(self, model: nn.Module, batch: Points) -> Mapping[str, Tensor]:
        self._seen += len(batch[1])
        return super().evaluate(model, batch)

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        seen, self._seen = self._seen, 0
        return Report({"error": float(sums["error"]) / seen})


class Shifted(Line):
    """Takes other samples on each rank than the sampler says."""

    def prepare(self, world: World, seed: int) -> None:
        super().prepare(world, seed)
        self._rank = world.rank

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Points]:
        for ids, _ in sampler.samples(steps, self._x.device):
            other = (ids + self._rank) % self.train_size
            yield self._x[other], self._y[other]
