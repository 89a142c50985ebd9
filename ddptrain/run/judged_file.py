"""An exported file beside its model on the validation set."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ddptrain.api.recipe import Data, Deployed, Task
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.engine.evaluate import Totals, chunks_of
from ddptrain.run.file_formats import Inputs, Runner, as_list

_CALIBRATION = 300
"""Training samples by which int8's ranges are measured."""
_BATCH = 32
"""Of a file that takes any number."""
_SHOWN = 8
"""Samples that are drawn with both answers."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Of the file or of the model."""

    metrics: Mapping[str, float]
    ms: float
    """Milliseconds a sample, on the CPU."""


@final
class CalibrationInputs:
    """A file's inputs of the first augmented training samples, so that the validation set stays unseen; made
    anew whenever they are read. Of a model with a `Deployed.validation`."""

    def __init__(self, data: Data, deployed: Deployed, seed: int) -> None:
        assert deployed.validation is not None
        self._data = data
        self._validation = deployed.validation
        self._sampler = Sampler(data.train_size, _batch_size(deployed), seed, epoch_order=data.epoch_order)

    def __iter__(self) -> Iterator[Inputs]:
        steps = -(-min(_CALIBRATION, self._data.train_size) // self._sampler.batch_size)
        for batch in self._data.train_batches(self._sampler, range(steps)):
            yield self._validation.inputs(batch)


def judge(task: Task, data: Data, deployed: Deployed, file: Runner, picture: Path) -> tuple[Answers, Answers]:
    """The model's answers and the file's, of a model with a `Deployed.validation`. Both answers to the first
    samples are drawn into ``picture``, if the task draws any."""
    validation = deployed.validation
    assert validation is not None
    size = _batch_size(deployed)
    chunks = chunks_of(data.valid_size, size)
    runners: tuple[Runner, Runner] = (lambda inputs: as_list(deployed.module(*inputs)), file)
    totals = [Totals(type(validation).__name__, len(chunks), World()) for _ in runners]
    seconds = [0.0, 0.0]
    pictures: list[Tensor] = []
    with torch.no_grad():
        for slot, batch in enumerate(data.valid_batches(chunks)):
            inputs, outputs = validation.inputs(batch), []
            for i, run in enumerate(runners):
                begun = time.perf_counter()
                outputs.append(_on_all(run, inputs, None if deployed.any_batch else size))
                seconds[i] += time.perf_counter() - begun
                for name, value in validation.evaluate(outputs[-1], batch).items():
                    totals[i].add(slot, name, value)
            if len(pictures) < _SHOWN:
                pictures += validation.pictures(batch, *outputs)
    _write_sheet(pictures[:_SHOWN], picture)
    ours, theirs = (
        Answers(task.report(total.totals(interrupted=False)).metrics, 1000 * spent / data.valid_size)
        for total, spent in zip(totals, seconds, strict=True)
    )
    return ours, theirs


def _batch_size(deployed: Deployed) -> int:
    return _BATCH if deployed.any_batch else len(deployed.inputs[0])


def _on_all(run: Runner, inputs: Inputs, size: int | None) -> Sequence[Tensor]:
    """The outputs for fewer samples than the file takes at once, too."""
    count = len(inputs[0])
    if size is None or count == size:
        return run(inputs)
    filled = tuple(torch.cat([of, of[-1:].expand(size - count, *of.shape[1:])]) for of in inputs)
    return [of[:count] for of in run(filled)]


def _write_sheet(pictures: Sequence[Tensor], file: Path) -> None:
    if pictures:
        from torchvision.transforms.v2.functional import to_pil_image
        from torchvision.utils import make_grid

        to_pil_image(make_grid(list(pictures), nrow=4, padding=4, pad_value=255)).save(file)
