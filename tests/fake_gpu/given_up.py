"""compile=auto where a capture breaks off in the middle: the training goes on eagerly, with the losses of one
that was eager from the start; where its passes can't be taken back, one message says so.

python tests/fake_gpu python -m pytest tests/fake_gpu/given_up.py
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_in_graphs import losses_of, small
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from toy import Fit, auto, strict

from ddptrain.api.recipe import Batch, Loss, Progress
from ddptrain.api.sampler import Sampler
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.shapes import Shapes
from ddptrain.engine.plan import Plan
from ddptrain.engine.step import TrainStep
from ddptrain.engine.step_graph import StepGraph
from ddptrain.errors import UserError
from ddptrain.recipes.image import ImageClassification

PLAN = Plan(
    steps=24,
    train_size=64,
    batch_size=8,
    micro_batch=4,
    log_every=1,
    eval_every=24,
    save_every=100,
    shards=None,
)


class Carrying(ImageClassification):
    """Carries a number of each sample's row. Memory runs out in a pass while a step is captured: the first
    such pass is a trial before step 1, the next two are those of a step."""

    def __init__(self, *arguments: Any, breaks_at: int) -> None:
        super().__init__(*arguments)
        self._breaks_at, self._passes = breaks_at, 0
        self._seen: Tensor | None = None

    def loss(self, model: nn.Module, batch: Batch, progress: Progress) -> Loss:
        loss = super().loss(model, batch, progress)
        mean = batch[0].mean(dim=(1, 2, 3))
        self._seen = mean.clone() if self._seen is None else 0.9 * self._seen + mean
        if torch.cuda.is_current_stream_capturing():
            self._passes += 1
            if self._passes == self._breaks_at:
                raise torch.OutOfMemoryError("planted")
        return Loss(loss.sum * (1 + self._seen.mean()), loss.count)

    def rank_state(self) -> Mapping[str, Tensor]:
        return {} if self._seen is None else {"seen": self._seen}

    def load_rank_state(self, rows: Mapping[str, Tensor]) -> None:
        self._seen = rows.get("seen")


def measured(step: TrainStep) -> StepGraph:
    return StepGraph(step, where_launches_limit=True)


def train(
    folder: Path, graph: Callable[[TrainStep], StepGraph] | None, breaks_at: int, shards: int | None = None
) -> list[float]:
    """The losses of its steps."""
    folder.mkdir()
    data = ImageData(Shapes(train=64, valid=16), Augment(4, True), workers=0, resident=False)
    strategy = strict(shards) if shards else auto()
    fit = Fit(replace(PLAN, shards=shards), graph=graph, strategy=strategy)
    return losses_of(fit, Carrying(small, data, breaks_at=breaks_at), data, folder)


@pytest.mark.parametrize("breaks_at", [2, 3])
def test_the_losses_are_those_of_eager_steps(
    tmp_path: Path, breaks_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "ddptrain"):
        found = train(tmp_path / "auto", measured, breaks_at)
    assert (
        "auto: steps are not captured: there is no room for the memory that a graph keeps (planted"
        in caplog.text
    )
    assert len(found) == PLAN.steps
    assert found == train(tmp_path / "eager", None, breaks_at)


@pytest.mark.parametrize("breaks_at", [2, 3])
def test_shards_can_not_be_taken_back(tmp_path: Path, breaks_at: int) -> None:
    with pytest.raises(UserError, match=r"compile=auto: steps can't be captured: .*planted.*compile=off"):
        train(tmp_path / "auto", measured, breaks_at, shards=2)


class Packing(ImageData):
    """Pictures as sequences of their rows, of different lengths."""

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Any]:
        for images, labels in super().train_batches(sampler, steps):
            rows = images.flatten(0, 1).flatten(1)
            lengths = torch.arange(len(rows), 0, -1).clamp(max=rows.shape[1])
            yield pack_padded_sequence(rows[..., None], lengths, batch_first=True), labels


class Averaging(ImageClassification):
    def loss(self, model: nn.Module, batch: Batch, progress: Progress) -> Loss:
        sequence, labels = batch
        mean = sequence.data.mean().expand(len(labels), 3, 32, 32)
        return Loss(nn.functional.cross_entropy(model(mean), labels, reduction="sum"), len(labels))


def test_lengths_on_the_host_are_refused(tmp_path: Path) -> None:
    data = Packing(Shapes(train=64, valid=16), Augment(4, True), workers=0, resident=False)
    with pytest.raises(UserError, match=r"compile=graph: a batch holds a PackedSequence, and"):
        losses_of(Fit(PLAN, graph=StepGraph), Averaging(small, data), data, tmp_path)
