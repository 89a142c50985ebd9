"""A recipe that behaves, but for one fault at one place: what the guards are tested with.

The network has BatchNorm, dropout and several DDP buckets. ``fault`` names what happens on ``rank`` when
``step`` is at ``place`` (forward, backward, evaluate, report, save); with ``once`` a file keeps it from
happening again after a restart.
"""

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddptrain.api.observer import Observer, Start
from ddptrain.api.recipe import Data, Loss, Progress, Report, Task
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.errors import UserError

FEATURES, CLASSES, WIDTH = 16, 6, 64


class Points(Data):
    """Gaussian points with linear labels."""

    def __init__(
        self, fault: str = "", rank: int = 0, step: int = 0, seconds: float = 0.0, once: bool = True,
        pace: float = 0.0,
    ) -> None:  # fmt: skip
        self._fault, self._rank, self._step, self._seconds, self._once = fault, rank, step, seconds, once
        self._pace = pace

    def prepare(self, world: World, seed: int) -> None:
        self._world = world
        generator = torch.Generator().manual_seed(3)
        self._features = torch.randn(331, FEATURES, generator=generator)
        truth = torch.randn(FEATURES, CLASSES, generator=generator)
        self._labels = (self._features @ truth).argmax(dim=1)

    @property
    def train_size(self) -> int:
        return 250

    @property
    def valid_size(self) -> int:
        return 81

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
        per_step = len(sampler.micro_batches)
        for i, (ids, _) in enumerate(sampler.samples(steps, torch.device("cpu"))):
            if self._pace:
                time.sleep(self._pace)
            if self._world.rank == self._rank and steps.start + i // per_step == self._step:
                happen(self._fault, self._seconds, self._once)
            yield self._on_device(ids)

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in chunks:
            yield self._on_device(slice(250 + chunk.start, 250 + chunk.stop))

    def _on_device(self, chosen: Tensor | slice) -> tuple[Tensor, Tensor]:
        device = self._world.device
        return self._features[chosen].to(device), self._labels[chosen].to(device)

    def preview(self) -> None:
        return None

    def describe(self) -> str:
        return "points"


class Faulty(Task):
    """Cross-entropy; see the module."""

    best_metric = "accuracy"
    higher_is_better = True

    def __init__(
        self, fault: str = "", rank: int = 0, step: int = 0, place: str = "forward", seconds: float = 0.0,
        once: bool = True,
    ) -> None:  # fmt: skip
        self._fault, self._rank, self._step, self._place = fault, rank, step, place
        self._seconds, self._once = seconds, once
        self._begun = False
        self._evaluated = 0

    def build(self) -> nn.Module:
        layers: list[nn.Module] = []
        for i in range(4):
            width = FEATURES if i == 0 else WIDTH
            layers += [nn.Linear(width, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2)]
        return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))

    def loss(self, model: nn.Module, batch: Any, progress: Progress) -> Loss:
        features, labels = batch
        self._begun = progress.step > 0
        here = int(os.environ.get("RANK", "0")) == self._rank and progress.step == self._step
        if here and self._place == "forward":
            if self._fault == "nan_input":
                features = features * float("nan")
            elif self._fault != "skip":
                happen(self._fault, self._seconds, self._once)
        if self._fault == "skip" and progress.step == self._step and not here:
            dist.barrier()  # which ``rank`` leaves out
        logits = model(features)
        if here and self._place == "backward":
            logits.register_hook(lambda gradient: self._in_backward(gradient))
        total = nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        if here and self._fault == "nan_loss":
            total = total * float("nan")
        return Loss(total, len(labels))

    def _in_backward(self, gradient: Tensor) -> Tensor:
        if self._fault == "inf_gradient":
            return gradient * float("inf")
        happen(self._fault, self._seconds, self._once)
        return gradient

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        features, labels = batch
        self._evaluated += 1  # the first batch of all may take long
        here = self._evaluated > 1 and int(os.environ.get("RANK", "0")) == self._rank
        if self._place == "evaluate" and here:
            happen(self._fault, self._seconds, self._once)
        logits = model(features).float()
        return {
            "loss": nn.functional.cross_entropy(logits, labels, reduction="sum"),
            "right": (logits.argmax(dim=1) == labels).sum(),
            "count": torch.tensor(len(labels), device=labels.device),
        }

    def rank_state(self) -> Mapping[str, Tensor]:
        if self._place == "save" and self._begun and int(os.environ.get("RANK", "0")) == self._rank:
            happen(self._fault, self._seconds, self._once)  # asked for by each save
        return {}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        if self._place == "report" and self._begun:  # not in the rehearsal
            happen(self._fault, self._seconds, self._once)
        count = int(sums["count"])
        return Report({"accuracy": int(sums["right"]) / count, "loss": float(sums["loss"]) / count})


def happen(fault: str, seconds: float, once: bool) -> None:
    """The fault, if it has not happened yet in this folder."""
    if not fault or not _first_time(once):
        return
    if fault == "raise":
        raise ZeroDivisionError("this recipe was told to fail")
    if fault == "memory":
        torch.empty(1 << 50, device="cuda" if torch.cuda.is_available() else "cpu")
    if fault == "user_error":
        raise UserError("data/7.png: is no picture.")  # as a recipe's author writes it
    if fault == "sleep":
        time.sleep(seconds or 3600)
    if fault == "loop":
        while True:
            pass
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    if fault == "extra":
        dist.barrier()


class SlowDisk(Observer):
    """Each flush takes so many seconds, from the start of the run on."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def start(self, event: Start) -> None:
        flush = os.fsync

        def slow(file: int) -> None:
            time.sleep(self._seconds)
            flush(file)

        os.fsync = slow


def _first_time(once: bool) -> bool:
    mark = Path("happened.txt")
    if not once:
        return True
    if mark.exists():
        return False
    mark.touch()
    return True
