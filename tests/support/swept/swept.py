"""A recipe to sweep: a line is fitted, and the point ``best`` of the grid is known to fit it best.

Points may also crash or hang. Which GPUs each attempt saw is written down in the current folder.
"""

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddptrain.api.recipe import Data, Loss, Progress, Report, Task
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World

TRAIN, VALID = 96, 32


class Line(Data):
    """Noisy points on y = 2 x + 1; the noise follows from the seed."""

    def prepare(self, world: World, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._x = torch.randn(TRAIN + VALID, 1, generator=generator)
        self._y = 2 * self._x + 1 + 0.1 * torch.randn(TRAIN + VALID, 1, generator=generator)

    @property
    def train_size(self) -> int:
        return TRAIN

    @property
    def valid_size(self) -> int:
        return VALID

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
        for ids, _ in sampler.samples(steps, torch.device("cpu")):
            yield self._x[ids], self._y[ids]

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in chunks:
            chosen = slice(TRAIN + chunk.start, TRAIN + chunk.stop)
            yield self._x[chosen], self._y[chosen]

    def preview(self) -> None:
        return None

    def describe(self) -> str:
        return "points on a line"


class Fit(Task):
    """Squares. The further ``point`` is from ``best``, the further off the line's foot is held."""

    best_metric = "loss"
    higher_is_better = False

    def __init__(
        self,
        point: int = 0,
        best: int = 0,
        pace: float = 0.0,
        failing: Sequence[int] = (),
        hanging: Sequence[int] = (),
        note: str = "",
    ) -> None:
        """pace: seconds a step takes. failing, hanging: points that do so in the middle."""
        self._off = 0.2 * abs(point - best)
        self._pace = pace
        self._fails, self._hangs = point in failing, point in hanging
        if "DDPTRAIN_CORES" in os.environ:
            names = ("CUDA_VISIBLE_DEVICES", "DDPTRAIN_CORES", "RANK", "PYTORCH_ALLOC_CONF")
            seen = {name: os.environ.get(name) for name in names}
            Path("seen").mkdir(exist_ok=True)
            Path("seen", f"{point}-{uuid.uuid4().hex}").write_text(repr((seen, note)))

    def build(self) -> nn.Module:
        line = nn.Linear(1, 1)
        nn.init.ones_(line.bias)  # at its best: else what is off in its direction looks better for a while
        return line

    def loss(self, model: nn.Module, batch: Any, progress: Progress) -> Loss:
        x, y = batch
        time.sleep(self._pace)
        if self._fails and progress.fraction >= 0.5:
            raise ZeroDivisionError("this point was told to fail")
        if self._hangs and progress.fraction >= 0.5:
            time.sleep(3600)
        return Loss(((model(x) + self._off - y) ** 2).sum() + len(y) * self._drag(model), len(y))

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        x, y = batch
        return {"squares": ((model(x) + self._off - y) ** 2).sum().double(), "count": torch.tensor(len(y))}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        return Report({"loss": float(sums["squares"]) / int(sums["count"])})

    def _drag(self, model: nn.Module) -> Tensor:
        """Keeps the foot near 1, so that being off costs."""
        return torch.stack([(p - 1).square().sum() for p in model.parameters() if p.dim() == 1]).sum()
