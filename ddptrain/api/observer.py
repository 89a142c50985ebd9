"""Observers receive events on rank 0, with plain numbers. They change nothing and never communicate with
other ranks. One that raises is reported once and switched off."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

from torch import Tensor

from ddptrain.api.recipe import Figure, Loading
from ddptrain.api.timing import Lap, Timing
from ddptrain.api.world import World
from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean


class Devices(Protocol):
    """Readings of all ranks' devices, on rank 0."""

    def latest(self) -> Mapping[str, float]:
        """The last readings, as ``gpu0/utilisation``, ``host0/cpu``, ..."""

    def summary(self) -> Mapping[str, Any]:
        """Means and peaks of the whole run, for JSON."""

    def timings(self) -> Mapping[int, Timing]:
        """What each rank has spent its time on so far, as last told."""


@final
class NoDevices:
    """No readings."""

    def latest(self) -> Mapping[str, float]:
        return {}

    def summary(self) -> Mapping[str, Any]:
        return {}

    def timings(self) -> Mapping[int, Timing]:
        return {}


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A description of the run."""

    folder: Path = Path()
    config: Mapping[str, Any] = field(default_factory=dict)
    """All of it, as config.yaml has it: ``config["train"]["batch_size"]``."""
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
    further_gpus: int = 0
    """Of a rank, beside its device (``strategy=dp``)."""
    devices: Devices = NoDevices()


def no_such_metric(key: str, name: str, known: Collection[str]) -> UserError:
    """The error for a name that ``key`` gives, of a metric that the evaluation lacks."""
    main = ", ".join(metric for metric in known if "/" not in metric)
    return UserError(f"{key}={name}: the evaluation has {main}.{did_you_mean(name, known)}")


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
    run: RunInfo = RunInfo()
    metrics: Collection[str] = ()
    """The names of the evaluation's metrics, as its first batches show them. Empty where that is not known:
    an evaluation comes first, or `Task.report` can't do with so few samples."""

    def check_metric(self, key: str, name: str) -> None:
        """Raise UserError where the evaluation has no metric of the name that ``key`` gives. A detail (with a
        slash) may be missing: those of a class that the first batches lack."""
        if self.metrics and name not in self.metrics and "/" not in name:
            raise no_such_metric(key, name, self.metrics)


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
    reads_metrics_file = False
    """Whether it reads metrics.jsonl, which the observer ``jsonl`` writes."""

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
