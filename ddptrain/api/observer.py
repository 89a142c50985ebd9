"""Observers receive events on rank 0, with plain numbers. They change nothing and never communicate with
other ranks. One that raises is reported once and switched off."""

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
    """Readings of all ranks' devices, on rank 0."""

    def latest(self) -> Mapping[str, float]:
        """The last readings, as ``gpu0/utilisation``, ``host0/cpu``, ..."""

    def summary(self) -> Mapping[str, Any]:
        """Means and peaks of the whole run, for JSON."""


@final
class NoDevices:
    """No readings."""

    def latest(self) -> Mapping[str, float]:
        return {}

    def summary(self) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class Run:
    """A description of the run."""

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
    """Steps done before: 0 unless resumed."""
    steps: int
    evaluates: bool
    """The evaluation at ``step`` is still to come, or is repeated."""
    preview: Tensor | None
    """Augmented training samples as pictures, uint8 (n, 3, H, W)."""
    run: Run = Run()


class Log(NamedTuple):
    """At a log step. ``values`` are reproducible; ``timing`` is not."""

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
    """Since the last evaluation, including this one."""
    metric: str
    """The task's ``best_metric``."""
    higher_is_better: bool
    """Whether higher is better in that metric."""
    steps: int
    """Of the whole run."""

    @property
    def value(self) -> float:
        """The value of ``metric``."""
        return self.metrics[self.metric]


@dataclass(frozen=True, slots=True)
class Saved:
    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run."""

    outcome: str
    """``done``, ``stopped early`` (by a controller, which is as good as done), ``stopped``, ``diverged`` or
    ``failed``."""
    metrics: Mapping[str, float]
    """The last evaluation's."""
    best: Mapping[str, float]
    """The best value of the task's ``best_metric``, and its step."""
    higher_is_better: bool
    """Whether higher is better in that metric."""


@dataclass(frozen=True, slots=True)
class Times:
    """Times of this process."""

    timing: Timing
    """Rank 0's."""
    ranks: Sequence[Timing]
    """All ranks', up to the last evaluation; empty if there was none."""
    seconds: float
    """Including set-up."""
    peak_memory_mib: float


@dataclass(frozen=True, slots=True)
class End:
    """After the last step of this process, also if an error ended it."""

    step: int
    steps: int
    result: Result
    times: Times


class Observer:
    """Override the events of interest; the others do nothing.

    Runs on rank 0. If it raises, it is switched off, with one message. `log` is called in a thread, so it
    does not delay the training. With ``slow = True`` all events are handled in a separate thread, for which
    the run's end waits a minute at most.
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
        """Once, at the end of the process, whatever ended the run."""
