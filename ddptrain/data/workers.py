"""Batches read by a DataLoader's workers, in order, and brought to the device."""

import atexit
import multiprocessing
import pickle
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, NamedTuple, final

import torch
from torch.utils.data import DataLoader, Dataset

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.prefetch import on_device
from ddptrain.distributed.cpu import cores_of_rank, workers_of
from ddptrain.distributed.launcher.process import end_with_rank, start_forkserver
from ddptrain.errors import UserError
from ddptrain.text import counted

AS_IT_IS = -1
"""In place of an epoch: the sample as an evaluation has it."""


class Key(NamedTuple):
    """What a sample is asked for by."""

    epoch: int
    sample: int
    """Its index in its part of the set."""
    progress: float = 0.0
    """Share of the whole training that is done."""


class TrainingKeys:
    """A batch sampler over the whole run: workers are started once, not every epoch."""

    def __init__(self, sampler: Sampler, steps: range) -> None:
        self._sampler = sampler
        self._steps = steps

    def __iter__(self) -> Iterator[list[Key]]:
        per_step = len(self._sampler.micro_sizes)
        for i, (ids, epochs) in enumerate(self._sampler.samples(self._steps, torch.device("cpu"))):
            progress = (self._steps.start + i // per_step) / self._steps.stop
            yield [Key(*key, progress) for key in zip(epochs.tolist(), ids.tolist(), strict=True)]

    def __len__(self) -> int:
        return len(self._steps) * len(self._sampler.micro_sizes)


def validation_keys(chunks: Sequence[Iterable[int]]) -> list[list[Key]]:
    """Samples as they are, a batch for each chunk."""
    return [[Key(AS_IT_IS, i) for i in chunk] for chunk in chunks]


def check_workers(workers: int | Literal["auto"]) -> None:
    """Raises UserError where it is no number of loader processes."""
    if workers != "auto" and workers < 0:
        raise UserError(f"data.workers={workers}: must be 0 or more, or auto.")


def read_by(workers: int) -> str:
    """For the line of the log that describes the data."""
    return f"read by {counted(workers, 'worker')} a rank"


def spare_cores(world: World) -> int:
    """How many loader processes ``auto`` gives a rank."""
    return workers_of(cores_of_rank(world), on_cpu=world.device.type == "cpu")


def worker_count(workers: int | Literal["auto"], world: World) -> int:
    """As many as ``data.workers`` says."""
    return spare_cores(world) if workers == "auto" else workers


def read_by_workers(
    dataset: Dataset[Any], keys: Iterable[list[Any]], workers: int, device: torch.device
) -> Iterator[Any]:
    """A batch for each list of keys, by the dataset's ``__getitems__``, on the device.

    A UserError that it returns, for a broken file, is raised here.
    """
    return on_device(_when_asked(_loader(dataset, keys, workers, device)), device)


@final
class KeptLoader:
    """Reads as `read_by_workers` does, again and again, by processes that are started once."""

    def __init__(self, dataset: Dataset[Any], workers: int, device: torch.device) -> None:
        self._dataset = dataset
        self._workers = workers
        self._device = device
        self._keys = _Keys()
        self._loader: DataLoader[Any] | None = None
        self._in_use = False
        """Batches have been asked for, and not been read to their end."""
        self._copy: Dataset[Any] | None = None
        """As a worker has it: a file that a dataset opens when it is first read, and keeps open, could not be
        sent to workers later."""

    def batches(self, keys: Iterable[list[Any]]) -> Iterator[Any]:
        """The processes begin to read at once if ``keys`` is a list, else when the first batch is asked for.
        While they are in use others are started. A list of one is read in this process: to start a worker
        takes a second."""
        if self._workers and isinstance(keys, list) and len(keys) == 1:
            if self._copy is None:
                self._copy = pickle.loads(ForkingPickler.dumps(self._dataset))
            return read_by_workers(self._copy, keys, 0, self._device)
        if not self._workers or self._in_use:
            return read_by_workers(self._dataset, keys, self._workers, self._device)
        self._in_use = True
        if self._loader is None:
            self._loader = _loader(self._dataset, self._keys, self._workers, self._device, stay=True)
            _release_with(self, self._loader)
        self._keys.keys = keys
        # of a stream the keys fetch blocks, which a training needs more
        batches = _begun(self._loader) if isinstance(keys, list) else _when_asked(self._loader)
        return on_device(self._to_the_end(batches), self._device)

    def _to_the_end(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        self._in_use = False


class _Keys:
    """A batch sampler that gives other keys each time."""

    def __init__(self) -> None:
        self.keys: Iterable[list[Any]] = ()

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.keys)


def _loader(
    dataset: Dataset[Any], keys: Iterable[list[Any]], workers: int, device: torch.device, stay: bool = False
) -> DataLoader[Any]:
    # forkserver: a fork of this process would inherit the locks of its threads (gloo, loggers)
    context = multiprocessing.get_context("forkserver") if workers else None
    if context is not None:
        # started by another thread, the forkserver would end with that
        preloads = ["ddptrain.distributed.launcher.forkserver_preload"] * (
            threading.current_thread() is threading.main_thread()
        )
        context.set_forkserver_preload([*preloads, type(dataset).__module__])
        start_forkserver()
    return DataLoader(
        dataset,
        batch_sampler=keys,
        collate_fn=_as_is,
        num_workers=workers,
        multiprocessing_context=context,
        worker_init_fn=end_with_rank,
        pin_memory=device.type == "cuda",
        persistent_workers=stay,
    )


def _as_is(batch: Any) -> Any:
    return batch


def _when_asked(loader: DataLoader[Any]) -> Iterator[Any]:
    """The workers start, or read on, when the first batch is asked for."""
    yield from _begun(loader)


def _begun(loader: DataLoader[Any]) -> Iterator[Any]:
    """The workers start, or read on, at once."""
    batches = iter(loader)
    # what is registered last runs first: before DataLoader's own, which waits five seconds for each worker
    # and then sends it SIGTERM, which it does not hear
    atexit.unregister(_end_workers)
    atexit.register(_end_workers)
    owner = _Owner()
    _release_with(owner, batches)
    return _sound(batches, owner)


class _Owner:
    """Of a generator's frame, which lives longer than the generator where a traceback holds it."""


def _release_with(owner: object, held: object) -> None:
    """Hold what has workers as long as its owner lives. In a cycle of garbage the queues would be closed
    before the workers are told to end, and each be waited for in vain, for five seconds; what a finalizer
    holds is in no cycle."""
    weakref.finalize(owner, _nothing, held).atexit = False


def _nothing(held: object) -> None:
    """``held`` is let go when this returns."""


def _sound(batches: Iterator[Any], owner: _Owner) -> Iterator[Any]:
    for batch in batches:
        if isinstance(batch, UserError):
            raise batch
        yield batch


def _end_workers() -> None:
    """At exit, end the workers of an iterator that an exception has left behind."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
