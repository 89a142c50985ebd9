"""The same work as a recipe."""

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
import work
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddptrain.api.recipe import Batch, Data, Loss, Progress, Report, Task
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World


@final
class Rows(Data):
    """In memory; the first 256 are the validation set too."""

    def prepare(self, world: World, seed: int) -> None:
        self._inputs, self._labels = work.rows()

    @property
    def train_size(self) -> int:
        return len(self._labels)

    @property
    def valid_size(self) -> int:
        return 256

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Batch]:
        for ids, _ in sampler.samples(steps, self._inputs.device):
            yield self._inputs[ids], self._labels[ids]

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Batch]:
        for chunk in chunks:
            yield self._inputs[chunk.start : chunk.stop], self._labels[chunk.start : chunk.stop]

    def preview(self) -> None:
        return None

    def describe(self) -> str:
        return f"{self.train_size:,} rows in memory"


@final
class Classification(Task):
    """Tells of the first step when the second one asks for its loss."""

    best_metric = "accuracy"
    higher_is_better = True

    def build(self) -> nn.Module:
        return work.model()

    def loss(self, model: nn.Module, batch: Batch, progress: Progress) -> Loss:
        if progress.step == 1:
            work.first_step_is_done()
        inputs, labels = batch
        return Loss(cross_entropy(model(inputs), labels, reduction="sum"), len(labels))

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        inputs, labels = batch
        right = model(inputs).argmax(dim=1) == labels
        return {"right": right.sum(), "all": torch.tensor(len(labels))}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        return Report({"accuracy": int(sums["right"]) / int(sums["all"])})
