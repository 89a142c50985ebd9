"""A small recipe on vectors, and the shortest way to train it with the real engine."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from ddptrain.api.controller import Controller
from ddptrain.api.observer import Observer, RunInfo
from ddptrain.api.recipe import Data, Loss, Progress, Report, Task
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.config.schema import Config, Ema, Train
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.freeze import freeze
from ddptrain.engine.loop import Engine, StepIterator
from ddptrain.engine.plan import Plan
from ddptrain.engine.precision import Precision
from ddptrain.engine.saved_checkpoint import unpack
from ddptrain.engine.state import TrainState
from ddptrain.engine.step import TrainStep
from ddptrain.engine.step_graph import StepGraph
from ddptrain.observe.dispatch import Observers
from ddptrain.run.assemble import make_step
from ddptrain.run.setup import make_strategy
from ddptrain.testing import RankFailed, run_ranks

FEATURES, CLASSES = 12, 5


class Vectors(Data):
    """Gaussian vectors with linear labels; remembers which samples it was asked for."""

    def __init__(self, train: int, valid: int = 101, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(7)
        features = torch.randn(train + valid, FEATURES, generator=generator, dtype=torch.float64)
        truth = torch.randn(FEATURES, CLASSES, generator=generator, dtype=torch.float64)
        self.features, self.labels = features.to(dtype), (features @ truth).argmax(dim=1)
        self._train = train
        self.asked: list[Tensor] = []
        """Sample indices of each micro-batch this rank was given."""

    def prepare(self, world: World, seed: int) -> None:
        pass

    @property
    def train_size(self) -> int:
        return self._train

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
        for ids, _ in sampler.samples(steps, torch.device("cpu")):
            self.asked.append(ids)
            yield self.features[ids], self.labels[ids]

    @property
    def valid_size(self) -> int:
        return len(self.labels) - self._train

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in chunks:
            chosen = slice(self._train + chunk.start, self._train + chunk.stop)
            yield self.features[chosen], self.labels[chosen]

    def preview(self) -> None:
        return None

    def describe(self) -> str:
        return "vectors"


class Classify(Task):
    """Cross-entropy over a small network."""

    best_metric = "accuracy"
    higher_is_better = True

    def __init__(self, make_model: Callable[[], nn.Module]) -> None:
        self._make_model = make_model

    def build(self) -> nn.Module:
        return self._make_model()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
        features, labels = batch
        return Loss(nn.functional.cross_entropy(model(features), labels, reduction="sum"), len(labels))

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


class CountPositives(Classify):
    """Normalises by a count that only the device knows: the samples of classes above 1."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
        features, labels = batch
        positive = labels > 1
        each = nn.functional.cross_entropy(model(features), labels, reduction="none")
        return Loss((each * positive).sum(), positive.sum())


class Lasso(Classify):
    """With a penalty over the parameters of the model that it is given: the wrapped one."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
        plain = super().loss(model, batch, progress)
        penalty = torch.stack([parameter.abs().sum() for parameter in model.parameters()]).sum()
        return Loss(plain.sum + 0.01 * len(batch[1]) * penalty, plain.count)


def plain(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES)).to(dtype)


def with_noise() -> nn.Module:
    """BatchNorm and dropout: what a resume has to get right beside the weights."""
    return nn.Sequential(
        nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, CLASSES)
    )


def auto(**arguments: Any) -> dict[str, Any]:
    """A config's strategy node, as conf/strategy/auto.yaml has it."""
    file = Path(__file__).parents[2] / "conf/strategy/auto.yaml"
    return {**yaml.safe_load(file.read_text()), **arguments}


def lr_schedule(name: str = "cosine", **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"ddptrain.engine.lr_schedules.{name}", **arguments}


def strict(shards: int = 8) -> dict[str, Any]:
    return {"_target_": "ddptrain.strategies.strict.Strict", "shards": shards}


SGD: dict[str, Any] = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}


@dataclass
class Fit:
    """One training, by the real engine."""

    plan: Plan
    make_model: Callable[[], nn.Module] = plain
    task: Callable[[Callable[[], nn.Module]], Task] = Classify
    dtype: torch.dtype = torch.float32
    optim: dict[str, Any] = field(default_factory=lambda: dict(SGD))
    sched: dict[str, Any] = field(default_factory=lambda: lr_schedule("cosine", warmup=0.1))
    ema: float | None = None
    strategy: dict[str, Any] = field(default_factory=auto)
    precision: str = "fp32"
    weight_decay_on: str = "all"
    freeze: Sequence[str] = ()
    thaw_at: int | None = None
    observers: Sequence[Observer] = ()
    controllers: dict[str, Controller] = field(default_factory=dict)
    step_iterator: StepIterator = iter
    graph: Callable[[TrainStep], StepGraph] | None = None
    background: bool = False

    @property
    def nonfinite(self) -> str:
        return "skip" if self.plan.skips_nonfinite else "stop"

    def run(
        self, world: World, folder: Path, stop_at: int | None = None
    ) -> tuple[TrainState, Vectors, Report]:
        """Train to the plan's end, going on from what ``folder`` holds; this process is killed when it
        has saved step ``stop_at``."""
        data, task = Vectors(self.plan.train_size, dtype=self.dtype), self.task(self.make_model)
        state, report = self.train(task, data, world, folder, stop_at)
        return state, data, report

    def train(
        self, task: Task, data: Data, world: World, folder: Path, stop_at: int | None = None
    ) -> tuple[TrainState, Report]:
        """The same for a task and data of one's own."""
        data.prepare(world, self.plan.seed)
        torch.manual_seed(self.plan.seed)
        precision = Precision(self.precision, world.device)
        config = Config(
            recipe="toy", task={}, data={}, optim=self.optim, sched=self.sched, ema=Ema(self.ema),
            strategy=self.strategy,
            train=Train(weight_decay_on=self.weight_decay_on, nonfinite=self.nonfinite),
        )  # fmt: skip
        strategy = make_strategy(self.strategy, world)
        model = strategy.prepare(task.build().to(world.device))
        checkpointer = Checkpointer(folder, keep=2, background=self.background)
        saved = checkpointer.newest()
        done = 0 if saved is None else saved.manifest["step"]
        frozen = freeze(model, self.optim, self.freeze, self.thaw_at, done)
        step = make_step(config, task, model, strategy, precision, self.plan, Watchdog(world), frozen)
        step.state.thawed = self.thaw_at is not None and frozen is None
        step.state.controllers.update(self.controllers)
        if saved is not None:
            step.state.load_state_dict(unpack(saved), "test")
            step.state.metrics = saved.manifest["metrics"]
            step.state.metrics_step = saved.manifest["metrics_step"]
        observers = Observers([*self.observers, *([_Killer(stop_at)] if stop_at else [])])
        run = RunInfo(folder, asdict(config), world)
        report = Engine(data, step, checkpointer, observers, self.graph).fit(run, self.step_iterator)
        return step.state, report


class _Killer(Observer):
    """Ends this process, with nothing flushed or closed, right after the save of a given step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def saved(self, event: Any) -> None:
        if event.step >= self._step:
            os._exit(137)


def weights(state: TrainState) -> Tensor:
    """All parameters and buffers in one float64 vector."""
    tensors = [*state.model.parameters(), *state.model.buffers()]
    return torch.cat([t.detach().double().flatten() for t in tensors])


def run_killed_at(stop_at: int | None, rank: Callable[[World], object], size: int, folder: Path) -> None:
    """Run ranks that save to a folder: to the end, or, where the first one is killed after a save, until
    then."""
    folder.mkdir(exist_ok=True)
    if stop_at is None:
        run_ranks(rank, size)
        return
    with pytest.raises(RankFailed, match=DIED):
        run_ranks(rank, size)
    assert newest_state(folder)["step"] >= stop_at


DIED = r"died without a message|Connection (closed|reset) by peer"
"""A rank that was killed, or one that talked to it: either may be heard first."""


def newest_state(folder: Path) -> dict[str, Any]:
    """What the newest checkpoint of a folder holds."""
    saved = Checkpointer(folder, keep=2).newest()
    assert saved is not None, f"{folder} holds no checkpoint"
    return unpack(saved)
