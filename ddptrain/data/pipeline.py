"""The way of a sample into a batch, for every set whose samples are read by their indices.

    source           len, and [index] -> a sample as it is stored
    transform        (source, key) -> sample, on the CPU
    collate          samples -> batch
    batch_transform  batch -> batch, on the device

The first three are done by loader processes, the last by the training's own (normalising, for example).
"""

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, final

import cloudpickle
import torch
from torch.utils.data import Dataset, default_collate

from ddptrain.api.recipe import Batch, Loading
from ddptrain.api.rng import derive_seed
from ddptrain.api.sampler import Sampler
from ddptrain.data.generators import restored, seed_all
from ddptrain.data.sendable import only_by_value
from ddptrain.data.stream.samples import StreamSamples, training_keys, valid_keys
from ddptrain.data.workers import AS_IT_IS as AS_IT_IS
from ddptrain.data.workers import KeptLoader, read_by, read_by_workers
from ddptrain.data.workers import Key as Key
from ddptrain.errors import UserError

_PURPOSE = 8  # of the seeds: the order of an epoch has another


class MapStyle(Sized, Protocol):
    """Samples as they are stored, by their indices, 0 to len - 1: any map-style dataset is one."""

    def __getitem__(self, index: int, /) -> Any: ...


Transform = Callable[[Any, Key], Any]
"""``(source, key) -> sample``. It is given the source, because a sample may be read in part, or be made of
several."""


def stored(source: MapStyle, key: Key) -> Any:
    """The transform that changes nothing."""
    return source[key.sample]


@final
class Samples(Dataset[Any]):
    """A part of a set, training or validation, read a batch at a time, here or in a loader process.

    transform: what it draws from torch's, NumPy's and Python's global generators follows from (seed, epoch,
    sample index), so it is the same for any number of ranks and workers. collate: called with a list of
    samples; must not draw. seed: None where nothing is drawn: no generator is seeded, nor restored after the
    batch. stream: where the source is read from, if it is streamed.

    All of them are sent to loader processes. Their tensors are shared, unless they can be sent
    `only_by_value`.
    """

    def __init__(
        self,
        source: MapStyle,
        transform: Transform = stored,
        collate: Callable[[list[Any]], Batch] = default_collate,
        seed: int | None = None,
        stream: StreamSamples | None = None,
    ) -> None:
        self.source = source
        self.stream = stream
        self._transform = transform
        self._collate = collate
        self._seed = seed
        self._by_value: bool | None = None
        """Whether it is sent as a copy. None until `check_sendable`: to pickle a large set takes time."""

    def __reduce__(self) -> tuple[Callable[..., "Samples"], tuple[Any, ...]]:
        self.check_sendable()
        arguments = self._arguments
        return (_unpacked, (cloudpickle.dumps(arguments),)) if self._by_value else (Samples, arguments)

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return self.source, self._transform, self._collate, self._seed, self.stream

    def check_sendable(self) -> None:
        """Raises UserError where loader processes can't be given it."""
        if self._by_value is None:
            self._by_value = only_by_value(self._arguments)

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, key: Key) -> Any:
        """One, not collated. Raises UserError where it can't be read."""
        if self._seed is not None:
            seed_all(derive_seed(self._seed, key.epoch, key.sample, _PURPOSE))
        return self._transform(self.source, key)

    def check(self, index: int) -> None:
        """Raises UserError where a sample can't be read."""
        with _restored_by_one_thread():
            self.sample(Key(AS_IT_IS, index))

    def batch(self, keys: Iterable[Key]) -> Batch:
        """On the CPU. Raises UserError where a sample can't be read."""
        with nullcontext() if self._seed is None else _restored_by_one_thread():
            return self._collate([self.sample(key) for key in keys])

    def first(self, count: int, epoch: int) -> Batch:
        """A batch of the first ones, as an epoch has them; `AS_IT_IS`: as an evaluation has them."""
        return self.batch(Key(epoch, i) for i in range(min(count, len(self))))

    def __getitems__(self, keys: list[Key]) -> Batch | UserError:
        """A file that can't be read is returned as its UserError: an exception would reach the training as
        the traceback of a loader process."""
        try:
            return self.batch(keys)
        except UserError as error:
            return error


def _unpacked(arguments: bytes) -> Samples:
    return Samples(*pickle.loads(arguments))


def unchanged(batch: Batch) -> Batch:
    """The batch transform that changes nothing."""
    return batch


@final
class Pipeline:
    """Both parts of a set as batches on the device.

    workers: loader processes of this rank. in_memory: whether the source holds all samples in memory.
    """

    def __init__(
        self,
        train: Samples,
        valid: Samples,
        workers: int,
        device: torch.device,
        batch_transform: Callable[[Batch], Batch] = unchanged,
        in_memory: bool = False,
    ) -> None:
        self.train = train
        self.valid = valid
        self.workers = workers
        self._device = device
        self._batch_transform = batch_transform
        self.in_memory = in_memory
        self._valid_loader = KeptLoader(valid, workers, device)
        if workers:
            train.check_sendable()
            valid.check_sendable()

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Batch]:
        """`Data.train_batches`."""
        keys = training_keys(self.train.stream, sampler, steps)
        return map(self._batch_transform, read_by_workers(self.train, keys, self.workers, self._device))

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Batch]:
        """`Data.valid_batches`. Loader processes begin to read at once."""
        keys = valid_keys(self.valid.stream, chunks)
        return map(self._batch_transform, self._valid_loader.batches(keys))

    @property
    def loading(self) -> Loading:
        """`Data.loading`."""
        stream = self.train.stream
        return Loading(self.workers, self.in_memory, None if stream is None else stream.reading)

    def describe(self) -> str:
        """How the data is loaded, in words."""
        return read_by(self.workers)


@contextmanager
def _restored_by_one_thread() -> Iterator[None]:
    """The generators are as before afterwards. A sum over a picture (contrast's mean) is rounded otherwise by
    another number of threads: a worker has one, the trainer's own process all of its cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with restored():
            yield
    finally:
        torch.set_num_threads(threads)
