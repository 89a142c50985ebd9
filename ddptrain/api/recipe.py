"""The interface of recipes.

A recipe is a `Task` (model, loss, metrics) and a `Data` (batches). The engine does the rest: devices, ranks,
precision, the loop, checkpoints and logs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from ddptrain.api.order import EpochOrder, Shuffled
from ddptrain.errors import UserError

if TYPE_CHECKING:
    from ddptrain.api.sampler import Sampler
    from ddptrain.api.timing import FetchTimes
    from ddptrain.api.world import World

Batch = Any
"""What `Data` yields and `Task` reads: tensors in tuples, lists or dicts, already on the device."""


class Progress(NamedTuple):
    """How far the training is, for losses and augmentations that change with time."""

    step: int
    """Optimizer steps done so far."""
    epoch: int
    """Epoch of the first sample of this step's global batch."""
    fraction: float
    """Of the training, in [0, 1)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as a sum and a count. The engine divides by the count over all ranks, so 1, 2 or 4 ranks, with
    or without accumulation, have the same gradient."""

    sum: Tensor
    """0-d floating tensor: the loss added over the batch's items, with its graph."""
    count: int | Tensor
    """How many items were added. An ``int`` promises the same count for every sample of the batch
    (images: 1 each; text: tokens of a window), so the global count needs no communication. A 0-d
    ``Tensor`` may differ from sample to sample (positive anchors): it costs one small all-reduce."""
    logs: Mapping[str, Tensor] = field(default_factory=dict)
    """Further 0-d sums to log beside the loss, each divided by the same count. A name that is not there in
    every step, or not on every rank, has the mean of those that have it."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Results that `Task.evaluate` does not add up, for example detections. `Task.report` gets all batches'
    rows as one tensor, in the order of the data set, for any number of ranks."""

    values: Tensor
    """(k, ...), any k."""


@dataclass(frozen=True, slots=True)
class ConfusionMatrix:
    """A figure for `Report`: ``counts[t][p]`` samples of true class t were predicted as p."""

    counts: Sequence[Sequence[int]]
    classes: Sequence[str]


@dataclass(frozen=True, slots=True)
class TextSample:
    """A figure for `Task.figures`: text from the model."""

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
    """A figure: an image."""

    pixels: Tensor
    """uint8 (3, H, W), on the CPU."""


Figure = ConfusionMatrix | TextSample | Curves | Picture


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one evaluation: numbers and figures."""

    metrics: Mapping[str, float]
    """A name with a slash (``AP/cat``) is a detail: recorded, but not shown in the terminal and the
    curves."""
    figures: Mapping[str, Figure] = field(default_factory=dict)


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference of two tensors, relative to the largest value of ``ours``."""
    scale = ours.abs().max().clamp(min=1e-30)
    return float((theirs - ours).abs().max() / scale)


class Validation(ABC):
    """How the file of an exported model is compared with the model on the validation set: by the metrics of
    `Task.report`. Its outputs are those of `Deployed.module`."""

    @abstractmethod
    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """What the file is given of a batch; the first dimension is the samples'."""

    @abstractmethod
    def evaluate(self, outputs: Sequence[Tensor], batch: Batch) -> Mapping[str, Tensor | Rows]:
        """As `Task.evaluate`, by the file's outputs."""

    def pictures(self, batch: Batch, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Both answers, the model's and the file's, drawn on a batch's samples: uint8 (3, H, W) of one
        size."""
        return ()


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
    """The relative difference of an output from the eager model's; None if there is nothing to compare."""
    any_batch: bool = False
    """Export the first dimension of every input and output as dynamic; the example's must be 2 or more."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What a program has to know to prepare the inputs and read the outputs, as JSON has it; written beside
    the file, and into it where it has a place for that."""
    validation: Validation | None = None
    """None where there is no comparison but of the example."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How data is loaded. None where there is no such setting."""

    workers: int | None = None
    """Loader processes per rank."""
    resident: bool | None = None
    """The whole set is in memory; without ``workers``, batches are made in the training process."""
    reading: "Callable[[], FetchTimes] | None" = None
    """Of a set that lies elsewhere."""
    left_out: int = 0
    """How much of the set ``on_error=skip`` has left out."""


class Task(ABC):
    """Model, loss and metrics. Not an nn.Module.

    In a step the engine passes the *wrapped* model to `loss`, so that DDP's forward is the one called; checks
    before the first step pass the bare one.
    """

    best_metric: str
    """Name of the validation metric that decides on ``checkpoints/best``."""
    higher_is_better: bool
    least_count: float = 0.0
    """The global sum of a loss's counts, where these are Tensors, is taken for no less: so that a batch with
    next to nothing to learn does not have the largest gradient. A sum of 0 counts as 1."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The model, on the CPU, after the seed is set and `Data.prepare`, or `Data.load_metadata` for a
        prediction or an export. Called on each rank; under ``strategy=fsdp`` on the device ``meta`` first."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, progress: Progress) -> Loss:
        """Forward one micro-batch in training mode, under the engine's autocast."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor | Rows]:
        """Sums over one validation batch, under ``no_grad``, and rows. What it draws is seeded by the batch's
        place in the set: the same in each evaluation, on any number of ranks.

        Integer tensors are counts, added exactly. 0-d floating tensors are kept per batch in
        float64 and added in the order of the data set, so every world size gives the same bits.
        """

    @abstractmethod
    def report(self, sums: Mapping[str, Tensor]) -> Report:
        """Metrics from `evaluate`'s sums and rows over the whole validation set (on the CPU). Called on rank
        0 only; every rank gets the result.

        Before the first step it is called with those of a few batches: metrics without a slash must have the
        same names then (NaN for one that has no value); what it raises then is only logged."""

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        """Figures of the model itself, for example sampled text. Called on rank 0 only, after each
        evaluation, under ``no_grad`` and autocast; no collectives."""
        return {}

    def rank_state(self) -> Mapping[str, Tensor]:
        """State that this rank keeps from step to step beside the weights (of a recurrent model, for
        example).

        Row i of each tensor belongs to this rank's i-th row of the global batch. Checkpoints hold the rows of
        all ranks, and `load_rank_state` gives each rank its own.
        """
        return {}

    def load_rank_state(self, rows: Mapping[str, Tensor]) -> None:
        """Restore what `rank_state` returned at this step, in this process or another; empty at step 0."""
        assert not rows, "a task with a rank_state has to implement load_rank_state"

    def predict(self, model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[str]:
        """The output of the verb ``predict``, in pieces, under ``inference_mode`` and autocast.

        Its further parameters, with annotations and defaults, are the options on the command line.
        """
        raise NotImplementedError

    def predict_sample(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the model says of one thing that a program brings: ``ddptrain.load(run).predict(sample)``. The
        model is in evaluation mode and has no gradients."""
        raise UserError(
            f"predict: {type(self).__name__} offers none to a program. Use `python -m ddptrain predict`, or"
            " the model itself: .module."
        )

    def deploy(self, model: nn.Module, *args: Any, **kwargs: Any) -> Deployed:
        """The model for the verb ``export``; its parameters as in `predict`."""
        raise NotImplementedError


class Data(ABC):
    """The training and validation data."""

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
        """A hash of the samples of both parts, training and validation, and of their order. Ranks with
        different data are refused, and so is a resume on other data; an evaluation on other data says so. '':
        only sizes are compared. Known after `prepare`."""
        return ""

    @property
    def outputs(self) -> Sequence[str]:
        """The meaning of the model's outputs: class names, characters. A checkpoint is refused for data with
        other outputs. Empty if they have no names."""
        return ()

    @property
    def epoch_order(self) -> EpochOrder:
        """In which order the training samples come. Known after `prepare`. By default each once an epoch, all
        shuffled; `Weighted` draws some more often, `Blocks` reads a few stored blocks at a time."""
        return Shuffled()

    @property
    def loading(self) -> Loading:
        """For the advice on where the time goes. Known after `prepare`."""
        return Loading()

    def metadata(self) -> Mapping[str, Any]:
        """What the verbs predict and export need to know about the data (class names, image size), as JSON
        has it: keys are text. Stored in checkpoints, so that these verbs need no data; empty if they do."""
        return {}

    def adopt_metadata(self, metadata: Mapping[str, Any]) -> None:  # noqa: B027 # what differs is refused
        """Called before `prepare` where a trained model is evaluated, with the `metadata` of its training:
        what belongs to the model (size and normalisation of pictures) is to be as there, whatever this set
        has. An evaluation whose `metadata` then differs all the same is refused."""

    def normalise_as(self, mean: Sequence[float], std: Sequence[float]) -> bool:
        """Called before `prepare` with what a library's weights (``init.weights``) were trained with, of the
        channels in 0..255. Whether pictures are normalised so from now on, in place of the set's own way."""
        return False

    def load_metadata(self, metadata: Mapping[str, Any], world: "World") -> None:
        """Called instead of `prepare`, with the `metadata` of the training."""
        raise UserError(f"data: {type(self).__name__} has no load_metadata. Was another kind trained on?")

    def preprocess(self, sample: Any) -> Tensor:
        """The model's input for one thing that a program or a user brings, as a batch of one on the device:
        what `ddptrain.load` offers. Called after `prepare` or `load_metadata`."""
        raise UserError(
            f"preprocess: {type(self).__name__} offers none. The verbs predict and export do without."
        )

    def write(self, folder: Path, *args: Any, **kwargs: Any) -> Iterator[str]:
        """Write the whole set to disk, for the verb ``write``; yields a line for each thing written. Its
        further parameters as in `Task.predict`."""
        raise NotImplementedError

    @abstractmethod
    def train_batches(self, sampler: "Sampler", steps: range) -> Iterator[Batch]:
        """This rank's micro-batches for the given optimizer steps, in order, on the device.

        The sampler decides on the samples (``sampler.samples(steps, device)``). Augmentation must follow from
        (seed, epoch, sample index) and, if it changes with time, from ``step / steps.stop``, which is
        `Progress.fraction`.
        """

    @abstractmethod
    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Batch]:
        """A batch for each range of validation samples, in order, on the device.

        The engine cuts the set into the same ranges for any world size and gives each rank some of them. It
        calls this well before it reads the batches: make each one when it is asked for, or read a few ahead.
        """

    @abstractmethod
    def preview(self) -> Tensor | None:
        """A few augmented training samples as images: uint8 (n, 3, H, W), or None. Called on rank 0 only."""

    @abstractmethod
    def describe(self) -> str:
        """One line for the log: name, size, and how it is loaded."""
