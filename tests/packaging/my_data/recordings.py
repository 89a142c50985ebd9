"""A kind of data of your own: recordings, each in a .npy file in the folder of its class."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddptrain.api import Data, Loading, Sampler, World
from ddptrain.data.identity import digest, of_file
from ddptrain.data.pipeline import AS_IT_IS, Key, Pipeline, Samples

Labelled = tuple[Tensor, int]


class Files:
    """The source: float32 (samples,), and the class, as they are stored."""

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        self.files = [
            (file, i) for i, name in enumerate(classes) for file in sorted(folder.glob(f"{name}/*.npy"))
        ]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Labelled:
        file, label = self.files[index]
        return torch.from_numpy(np.load(file)).float(), label


class Spectrogram:
    """The transform: float32 (1, 17, 33) of the middle 256 samples; in training of any, with noise.

    Draw from torch's, NumPy's or Python's generator: they are seeded by (seed, epoch, sample index).
    """

    def __init__(self, noise: float) -> None:
        self._noise = noise

    def __call__(self, source: Files, key: Key) -> Labelled:
        recording, label = source[key.sample]
        room = len(recording) - 256
        if key.epoch == AS_IT_IS:  # of an evaluation
            window = recording[room // 2 :][:256]
        else:
            window = recording[int(torch.randint(room + 1, ())) :][:256] + self._noise * torch.randn(256)
        spectrum = torch.stft(window, 32, window=torch.hann_window(32), return_complex=True)
        return spectrum.abs()[None], label


class Recordings(Data):
    """Batches of float32 (n, 1, 17, 33) and int64 (n,), of root/train/<class>/*.npy and root/valid."""

    def __init__(self, root: str, noise: float = 0.1, workers: int = 0) -> None:
        self._root, self._noise, self._workers = Path(root), noise, workers
        self._classes = sorted(folder.name for folder in (self._root / "train").iterdir())
        self._pipeline: Pipeline | None = None

    def prepare(self, world: World, seed: int) -> None:
        train, valid = (
            Samples(Files(self._root / part, self._classes), Spectrogram(self._noise), seed=seed)
            for part in ("train", "valid")
        )
        self._pipeline = Pipeline(train, valid, self._workers, world.device, batch_transform=standardised)

    @property
    def _ready(self) -> Pipeline:
        assert self._pipeline is not None, "prepare comes first"
        return self._pipeline

    @property
    def outputs(self) -> Sequence[str]:
        return self._classes

    @property
    def identity(self) -> str:
        parts = (self._ready.train.source.files, self._ready.valid.source.files)
        return digest(
            of_file(str(file), str(file.relative_to(self._root)), len(files))
            for files in parts
            for file, _ in files
        )

    @property
    def train_size(self) -> int:
        return len(self._ready.train)

    @property
    def valid_size(self) -> int:
        return len(self._ready.valid)

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
        return self._ready.train_batches(sampler, steps)

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        return self._ready.valid_batches(chunks)

    @property
    def loading(self) -> Loading:
        return self._ready.loading

    def preview(self) -> None:
        return None

    def describe(self) -> str:
        return f"recordings: {self.train_size} train, {self.valid_size} valid, {self._ready.describe()}"


def standardised(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The batch transform: levels of zero mean and unit deviation, on the device."""
    spectra, labels = batch
    levels = spectra.add(1e-3).log()
    deviation, mean = torch.std_mean(levels, (1, 2, 3), keepdim=True)
    return (levels - mean) / deviation, labels
