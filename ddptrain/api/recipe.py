"""What a recipe implements and what the engine hands it. A recipe imports this and nothing deeper.

A recipe is a `Task` (which model, which loss, which metrics) and a `Data` (which batches). The
engine owns the rest: devices, ranks, precision, the loop, checkpoints and logs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

if TYPE_CHECKING:
    from ddptrain.api.sampler import Sampler
    from ddptrain.api.world import World

Batch = Any
"""What `Data` yields and `Task` reads: tensors in tuples, lists or dicts, already on the device."""


class At(NamedTuple):
    """Where the training stands, for losses and augmentations that change with time."""

    step: int
    """Optimizer steps done so far."""
    epoch: int
    """Epoch of the first sample of this step's global batch."""
    progress: float
    """Share of the whole training that is done, in [0, 1)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as a sum and a count, so that the engine can divide by the count over all ranks.

    That division is what gives 1, 2 or 4 ranks, with or without accumulation, the same gradient.
    """

    sum: Tensor
    """0-d floating tensor: the loss added over the batch's items, with its graph."""
    count: int | Tensor
    """How many items were added. An ``int`` promises the same count for every sample of the batch
    (images: 1 each; text: tokens of a window), so the global count needs no communication. A 0-d
    ``Tensor`` may differ from sample to sample (positive anchors): it costs one small all-reduce."""
    logs: Mapping[str, Tensor] = field(default_factory=dict)
    """Further 0-d sums to log beside the loss, each divided by the same count; the same names on every
    rank."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What `Task.evaluate` lists rather than adds up: detections, say. All batches' rows reach `Task.report`
    as one tensor, in the order of the data set, whatever the number of ranks."""

    values: Tensor
    """(k, ...), any k."""


@dataclass(frozen=True, slots=True)
class ConfusionMatrix:
    """A figure for `Report`: ``counts[t][p]`` samples of true class t were predicted as p."""

    counts: Sequence[Sequence[int]]
    classes: Sequence[str]


@dataclass(frozen=True, slots=True)
class TextSample:
    """A figure for `Task.figures`: what the model writes."""

    text: str


@dataclass(frozen=True, slots=True)
class Curves:
    """A figure: lines in one square from 0 to 1."""

    lines: Mapping[str, Sequence[tuple[float, float]]]
    """Points (x, y) of each, by name."""
    x: str
    y: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure: an image as it is."""

    pixels: Tensor
    """uint8 (3, H, W), on the CPU."""


Figure = ConfusionMatrix | TextSample | Curves | Picture


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one evaluation: plain numbers, and figures for those who look."""

    metrics: Mapping[str, float]
    """A name with a slash (``AP/cat``) is a detail: it is recorded, but kept off the terminal and the
    curves."""
    figures: Mapping[str, Figure] = field(default_factory=dict)


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two tensors of one shape, as a share of the largest value of ours."""
    scale = ours.abs().max().clamp(min=1e-30)
    return float((theirs - ours).abs().max() / scale)


@dataclass(frozen=True, slots=True)
class Deployed:
    """A model as the verb ``export`` writes it."""

    module: nn.Module
    """In evaluation mode, on the CPU; takes tensors and gives one tensor or a tuple of them."""
    inputs: tuple[Tensor, ...]
    """An example, by which the written file is checked against ``module``."""
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    difference: Callable[[Tensor, Tensor], float | None] = relative_difference
    """How far an output is from eager's, in shares: a tiny number where they agree but for rounding, None
    where there is nothing to compare."""
    any_batch: bool = False
    """The first dimension of every input and output may be any number, and is not the example's, which has
    to be 2 or more."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How data reaches the device, as it has come out. None where there is no such setting."""

    workers: int | None = None
    """Loader processes of a rank."""
    resident: bool | None = None
    """The whole set is kept in memory; without ``workers``, it is cut into batches by the training itself."""


class Task(ABC):
    """What is trained: model, loss and metrics. Not an nn.Module.

    The engine passes the *wrapped* model to `loss`, so DDP's forward is always the one called.
    """

    best_metric: str
    """Name of the validation metric that picks ``checkpoints/best``."""
    higher_is_better: bool

    @abstractmethod
    def build(self) -> nn.Module:
        """The model, on the CPU. Called once per rank, after the seed is set and `Data.prepare`."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, at: At) -> Loss:
        """Forward one micro-batch in training mode, under the engine's autocast."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor | Rows]:
        """Sums over one validation batch, under ``inference_mode``, and rows.

        Integer tensors are counts, added exactly. 0-d floating tensors are kept per batch in
        float64 and added in the order of the data set, so every world size gives the same bits.
        """

    @abstractmethod
    def report(self, sums: Mapping[str, Tensor]) -> Report:
        """Metrics from `evaluate`'s sums and rows over the whole validation set (on the CPU). On rank 0
        alone; every rank gets what it returns."""

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        """What to look at beside the report's figures: sampled text, say. On rank 0 alone, after each
        evaluation, under ``inference_mode`` and autocast; no collectives."""
        return {}

    def rank_state(self) -> Mapping[str, Tensor]:
        """What this rank carries from step to step beside the weights (the state of a recurrent model).

        Row i of each tensor belongs to this rank's i-th row of the global batch. Checkpoints hold the
        rows of all ranks, and each gets its own back by `load_rank_state`.
        """
        return {}

    def load_rank_state(self, rows: Mapping[str, Tensor]) -> None:
        """Go on from what `rank_state` returned at this step, in this process or another; empty at step 0."""
        assert not rows, "a task that carries something has to implement load_rank_state"

    def predict(self, model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[str]:
        """The answer of the verb ``predict``, piece by piece as it is found, under ``inference_mode`` and
        autocast.

        Where there is one, give it parameters with annotations and defaults: they are what the command line
        takes.
        """
        raise NotImplementedError

    def deploy(self, model: nn.Module, *args: Any, **kwargs: Any) -> Deployed:
        """What the verb ``export`` writes; its parameters as for `predict`."""
        raise NotImplementedError


class Data(ABC):
    """What it is trained on."""

    @abstractmethod
    def prepare(self, world: "World", seed: int) -> None:
        """Download (once a node), check and open the data. Called on every rank, together."""

    @property
    @abstractmethod
    def train_size(self) -> int:
        """Training samples in one epoch."""

    @property
    @abstractmethod
    def valid_size(self) -> int:
        """Validation samples in the whole set."""

    @property
    def identity(self) -> str:
        """A hash of what the samples are and how they are ordered. Ranks that see different data are refused,
        and so is a resume on other data. '' leaves that to the sizes."""
        return ""

    @property
    def outputs(self) -> Sequence[str]:
        """What the model's outputs stand for, one by one: class names, characters. A checkpoint is refused
        for data where they mean something else. Empty where they have no names."""
        return ()

    @property
    def loading(self) -> Loading:
        """For the verdict on where the time goes. Known after `prepare`."""
        return Loading()

    def metadata(self) -> Mapping[str, Any]:
        """What the verbs predict and export have to know of the data (class names, the size of a picture),
        as plain values. Kept in checkpoints, so that these verbs need no data set; empty where they do."""
        return {}

    def load_metadata(self, metadata: Mapping[str, Any], world: "World") -> None:
        """Instead of `prepare`: know what `metadata` said when the model was trained, and no more."""
        assert not metadata, "data that has metadata has to implement load_metadata"

    def write(self, folder: Path, *args: Any, **kwargs: Any) -> Iterator[str]:
        """Write the whole set to disk, for the verb ``write``; a line for each thing written.

        Where there is one, give it parameters with annotations and defaults: they are what the command line
        takes.
        """
        raise NotImplementedError

    @abstractmethod
    def train_batches(self, sampler: "Sampler", steps: range) -> Iterator[Batch]:
        """This rank's micro-batches for the given optimizer steps, in order, on the device.

        Which samples those are is the sampler's to say (``sampler.samples(steps, device)``); how each
        is augmented must follow from (seed, epoch, sample index) and, where it changes with time, from
        ``step / steps.stop``, which is `At.progress`: the last step is the run's.
        """

    @abstractmethod
    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Batch]:
        """A batch for each run of consecutive validation samples, in order, on the device.

        The engine cuts the set into the same runs on any world size and gives each rank some.
        """

    @abstractmethod
    def preview(self) -> Tensor | None:
        """A few augmented training samples as pictures: uint8 (n, 3, H, W) or None. On rank 0 alone."""

    @abstractmethod
    def describe(self) -> str:
        """One line for the log: what it is, how much, and how it is loaded."""
