"""Observers: told what happened, on rank 0, with plain numbers. They change nothing and never talk
to other ranks; one that raises is reported once and dropped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

from torch import Tensor

from ddptrain.api.recipe import Figure, Loading
from ddptrain.api.timing import Lap, Timing
from ddptrain.api.world import World
from ddptrain.config.schema import Config


class Devices(Protocol):
    """What the devices of all ranks do, on rank 0."""

    def latest(self) -> Mapping[str, float]:
        """The last readings, as ``gpu0/utilisation``, ``host0/cpu``, ..."""

    def summary(self) -> Mapping[str, Any]:
        """Means and peaks of the whole run, for JSON."""


@final
class NoDevices:
    """Nothing is read."""

    def latest(self) -> Mapping[str, float]:
        return {}

    def summary(self) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class Run:
    """What a run is."""

    folder: Path = Path()
    config: Config = field(default_factory=Config)
    world: World = World()
    precision: str = "fp32"
    """As chosen: not ``auto``."""
    loading: Loading = Loading()
    convolves: bool = False
    """The model has 2-d convolutions."""
    gradient_bytes: int = 0
    fused: bool = False
    """The optimizer is one kernel a step."""
    steps_per_epoch: int = 0
    steps: int = 0
    """Of the whole run."""
    valid_size: int = 0
    devices: Devices = NoDevices()


@dataclass(frozen=True, slots=True)
class Start:
    """Before the first step of this process."""

    step: int
    """Steps done in earlier processes: 0 unless resumed."""
    steps: int
    evaluates: bool
    """The evaluation at ``step`` is still to come, or comes again."""
    preview: Tensor | None
    """Augmented training samples as pictures, uint8 (n, 3, H, W)."""
    run: Run = Run()


class Log(NamedTuple):
    """At a log step. ``values`` are the same whenever the run is repeated; ``timing`` is not."""

    step: int
    epoch: float
    samples: int
    values: Mapping[str, float]
    lap: Lap

    @property
    def timing(self) -> Timing:
        """Since the last log step."""
        return self.lap.timing


@dataclass(frozen=True, slots=True)
class Evaluated:
    step: int
    epoch: float
    samples: int
    metrics: Mapping[str, float]
    figures: Mapping[str, Figure]
    seconds: float
    is_best: bool
    timing: Timing
    """Since the last evaluation, this one included."""
    metric: str
    """The task's ``best_metric``."""
    higher_is_better: bool
    """In that metric."""
    steps: int
    """Of the whole run."""

    @property
    def value(self) -> float:
        """Of the metric that counts."""
        return self.metrics[self.metric]


@dataclass(frozen=True, slots=True)
class Saved:
    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Result:
    """What a run has come to."""

    outcome: str
    """done, or what ended it."""
    metrics: Mapping[str, float]
    """Of the last evaluation."""
    best: Mapping[str, float]
    """The best value of the metric that counts, and its step."""
    higher_is_better: bool
    """In that metric."""


@dataclass(frozen=True, slots=True)
class Times:
    """Of this process."""

    timing: Timing
    """Of rank 0."""
    ranks: Sequence[Timing]
    """Of all ranks, up to the last evaluation; empty where there was none."""
    seconds: float
    """With the set-up."""
    peak_memory_mib: float


@dataclass(frozen=True, slots=True)
class End:
    """After the last step of this process, also where an error ended it."""

    step: int
    steps: int
    result: Result
    times: Times


class Observer:
    """Implement the events of interest; the others do nothing.

    On rank 0. It may raise: then it is switched off, with one message. It may take its time: of log steps it
    is told by a thread. Where ``slow`` is true it has a thread of its own for everything, and the run's end
    waits for it a minute at most.
    """

    slow = False

    def start(self, event: Start) -> None:
        """Before the first step."""

    def log(self, event: Log) -> None:
        """Every ``log.every`` steps."""

    def evaluated(self, event: Evaluated) -> None:
        """After an evaluation."""

    def saved(self, event: Saved) -> None:
        """After a checkpoint."""

    def end(self, event: End) -> None:
        """Once, whatever ended the run."""
