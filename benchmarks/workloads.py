"""What throughput.py trains: so little that a loop's own cost shows, and a real network."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddptrain.api.recipe import Data
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.images.augment import Augment, Normalise
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.shapes import Shapes
from ddptrain.recipes.mobilenet import mobilenet_v3_small_32

SEED = 0

Batch = tuple[Tensor, Tensor]


@final
class Rows(Data):
    """Labelled samples in memory, cut as one would by hand; the first 256 are the validation set too.

    prepare_rows: some of the inputs to what the model takes.
    """

    def __init__(
        self, inputs: Tensor, labels: Tensor, prepare_rows: Callable[[Tensor], Tensor], world: World
    ) -> None:
        self._inputs = inputs.to(world.device)
        self._labels = labels.to(world.device)
        self._prepare_rows = prepare_rows
        self._world = world

    def prepare(self, world: World, seed: int) -> None:
        """It is."""

    @property
    def train_size(self) -> int:
        return len(self._labels)

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Batch]:
        for ids, _ in sampler.samples(steps, self._inputs.device):
            yield self.batch(ids)

    def batch(self, ids: Tensor) -> Batch:
        return self._prepare_rows(self._inputs[ids]), self._labels[ids]

    @property
    def valid_size(self) -> int:
        return 256

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Batch]:
        for chunk in chunks:
            rows = slice(chunk.start, chunk.stop)
            yield self._prepare_rows(self._inputs[rows]), self._labels[rows]

    def preview(self) -> None:
        return None

    def describe(self) -> str:
        return f"{self.train_size:,} rows in memory"


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its samples. rows: for the peers. data: for ddptrain, the same samples."""

    build: Callable[[], nn.Module]
    rows: Rows
    data: Data
    channels_last: bool

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Cross-entropy added up, and of how many labels."""
        inputs, labels = batch
        logits = model(inputs)
        total = cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
        return total, labels.numel()


def tiny(world: World) -> Workload:
    """An MLP of 26,122 parameters on rows of 64 floats."""

    def build() -> nn.Module:
        hidden = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(128, 10))

    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(8192, 64, generator=generator)
    labels = torch.randint(10, (8192,), generator=generator)
    rows = Rows(inputs, labels, lambda chosen: chosen, world)
    return Workload(build, rows, rows, channels_last=False)


@final
class _Lstm(nn.Module):
    """Two layers of 256 on 96 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 256)
        self.cells = nn.LSTM(256, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 96)

    def forward(self, characters: Tensor) -> Tensor:
        hidden, _ = self.cells(self.embedding(characters))
        logits: Tensor = self.head(hidden)
        return logits


def lstm(world: World) -> Workload:
    """An LSTM of 1.1 million parameters on windows of 128 characters."""
    generator = torch.Generator().manual_seed(SEED)
    windows = torch.randint(96, (2048, 129), generator=generator)
    rows = Rows(windows[:, :-1], windows[:, 1:], lambda chosen: chosen, world)
    return Workload(_Lstm, rows, rows, channels_last=False)


def mobilenet(world: World) -> Workload:
    """The recipe's MobileNetV3-small for 32x32 images, without dropout: its masks would differ."""
    return _images(world, lambda: mobilenet_v3_small_32(num_classes=10, in_channels=3, dropout=0.0))


def mobilenet_as_torchvision_has_it(world: World) -> Workload:
    """MobileNetV3-small made for 224x224, on 32x32 images: little arithmetic in many layers."""
    from torchvision.models import mobilenet_v3_small  # takes a second

    return _images(world, lambda: mobilenet_v3_small(num_classes=10, dropout=0.0))


def _images(world: World, build: Callable[[], nn.Module]) -> Workload:
    """32x32 images kept as bytes; ddptrain takes them from its own `ImageData`."""
    source = Shapes(train=2000, valid=128)
    data = ImageData(source, Augment(), resident=True)
    data.prepare(world, SEED)
    opened = source.open(Path())
    images = opened.train.images(torch.arange(len(opened.train)))
    mean, std = (torch.tensor(values, device=world.device) for values in (opened.mean, opened.std))
    normalise = Normalise(mean, std, channels_last=True)
    return Workload(build, Rows(images, opened.train.labels, normalise, world), data, channels_last=True)
