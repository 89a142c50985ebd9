"""Observers: told what happened, on rank 0, with plain numbers. They change nothing and never talk
to other ranks; one that raises is reported once and dropped."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ddptrain.api.recipe import Figure
from ddptrain.api.timing import Lap, Timing


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


class Observer(ABC):
    """Implement the events; leave those of no interest empty. The training waits for all but ``log``."""

    at_once = False
    """Whether it waits for ``log`` too."""

    @abstractmethod
    def start(self, event: Start) -> None: ...

    @abstractmethod
    def log(self, event: Log) -> None: ...

    @abstractmethod
    def evaluated(self, event: Evaluated) -> None: ...

    @abstractmethod
    def saved(self, event: Saved) -> None: ...

    @abstractmethod
    def end(self, event: End) -> None: ...
