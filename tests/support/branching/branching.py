"""A recipe whose trainings may depend on their length, in ways that are hard to see.

Which steps each process trains is written down in the folder ``trained`` of the current folder.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddptrain.api.controller import Controller
from ddptrain.api.observer import Evaluated
from ddptrain.api.recipe import At, Data, Loss, Report, Task
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.errors import UserError

TRAIN, VALID, FEATURES = 80, 20, 4


class Points(Data):
    """Noisy points of a plane. With ``fading``, training inputs shrink over the length of the run."""

    def __init__(self, fading: bool = False, note: Any = None) -> None:
        self._fading = fading

    def prepare(self, world: World, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._x = torch.randn(TRAIN + VALID, FEATURES, generator=generator)
        self._y = self._x.sum(1) + 0.1 * torch.randn(TRAIN + VALID, generator=generator)

    @property
    def train_size(self) -> int:
        return TRAIN

    @property
    def valid_size(self) -> int:
        return VALID

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
        for i, (ids, _) in enumerate(sampler.samples(steps, torch.device("cpu"))):
            done = (steps.start + i) / steps.stop if self._fading else 0.0
            yield self._x[ids] * (1 - done / 2), self._y[ids]

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in chunks:
            chosen = slice(TRAIN + chunk.start, TRAIN + chunk.stop)
            yield self._x[chosen], self._y[chosen]

    def preview(self) -> None:
        return None

    def describe(self) -> str:
        return "points of a plane"


class PlainPoints(Points):
    """Says that its samples do not depend on the run's length."""

    @property
    def reads_progress(self) -> bool:
        return False


class Missing(PlainPoints):
    """Is not there."""

    def prepare(self, world: World, seed: int) -> None:
        raise UserError("data: there is none")


class Fit(Task):
    """Squares, scaled by what is read of `At`, if anything is."""

    best_metric = "loss"
    higher_is_better = False

    def __init__(
        self, reads: str = "", since: int = 0, rank: int = -1, lost: int = -1, failing: int = -1,
        note: Any = None,
    ) -> None:  # fmt: skip
        """reads: how. since: from this step on. rank: on this one only; -1: on all. lost: the step whose
        loss is no number. failing: the step that raises."""
        self._reads, self._since, self._rank = reads, since, rank
        self._lost, self._failing = lost, failing
        self._gain = 1.0 + len(str(note)) / 100

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )

    def loss(self, model: nn.Module, batch: Any, at: At) -> Loss:
        rank = int(os.environ.get("RANK", "0"))
        if rank == 0:
            Path("trained").mkdir(exist_ok=True)
            with Path("trained", str(os.getpid())).open("a") as file:
                file.write(f"{at.step}\n")
        if at.step == self._failing:
            raise ZeroDivisionError("this recipe was told to fail")
        x, y = batch
        scale = self._gain
        if at.step >= self._since and self._rank in (-1, rank):
            scale += read(self._reads, at)
        if at.step == self._lost:
            scale = float("nan")
        return Loss((model(x).squeeze(1) - y).square().sum() * scale, len(y))

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        x, y = batch
        squares = (model(x).squeeze(1) - y).square().sum().double()
        return {"squares": squares, "count": torch.tensor(len(y))}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        return Report({"loss": float(sums["squares"]) / int(sums["count"])})


def read(how: str, at: At) -> float:
    """The progress, or something that follows from it; 0 for ''."""
    match how:
        case "name":
            return at.progress
        case "unpacked":
            _, _, progress = at
            return progress
        case "index":
            return at[-1]
        case "slice":
            return sum(at[1:]) - at.epoch
        case "spread":
            return max(0.0, *at) - max(at.step, at.epoch)
        case "matched":
            match at:
                case At(progress=progress):
                    return progress
    return 0.0


class Patient(Controller):
    """Ends nothing."""

    def goes_on(self, event: Evaluated) -> bool:
        return True


def trained_steps(cwd: Path) -> int:
    """Of all processes that ran in a folder; each has trained each of its steps once."""
    return sum(len(set(path.read_text().split())) for path in (cwd / "trained").iterdir())
