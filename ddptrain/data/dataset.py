"""Any map-style dataset as a recipe's data: torchvision's, Hugging Face's, or a class of one's own."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, final

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from ddptrain.api.recipe import Batch, Data, Loading
from ddptrain.api.rng import state_of_generators
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data import held_out
from ddptrain.data.agreement import check_alike, check_renamed
from ddptrain.data.identity import digest, of_samples
from ddptrain.data.left_out import BROKEN, HINT, OnError, UnusableSample, in_words, readable, tell
from ddptrain.data.pipeline import MapStyle, Pipeline, Samples
from ddptrain.data.workers import check_workers, worker_count
from ddptrain.errors import UserError, reason
from ddptrain.text import first_few


@final
class _Part:
    """Some samples of a dataset.

    ids: of the samples, in the dataset. key: the config key of the dataset.
    """

    def __init__(self, dataset: MapStyle, ids: Sequence[int], key: str = "data.dataset") -> None:
        self._dataset = dataset
        self._ids = ids
        self._key = key

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Any:
        sample = self._ids[index]
        try:
            return self._dataset[sample]
        except BROKEN as error:
            raise UnusableSample(
                f"{self._key}: sample {sample} can't be read ({error}).{HINT}", everywhere=False
            ) from error
        except Exception as error:
            error.add_note(f"(in sample {sample} of {self._key})")
            raise

    def only(self, indices: Sequence[int]) -> "_Part":
        return _Part(self._dataset, [self._ids[index] for index in indices], self._key)

    def fingerprints(self) -> list[bytes]:
        """A hash of what tells each sample from others, without reading it."""
        return [hashlib.sha256(fact).digest() for fact in of_samples(self._dataset, self._ids)]


@final
class _Collate:
    """A collate of the user's own. Raises UserError where its first batch draws random numbers: they would
    follow from what is in the batch, and so from the number of ranks."""

    def __init__(self, collate: Callable[[list[Any]], Batch], key: str) -> None:
        self._collate = collate
        self._key = key
        self._is_checked = False

    def __call__(self, samples: list[Any]) -> Batch:
        if self._is_checked:
            return self._called(samples)
        before = state_of_generators()
        batch = self._called(samples)
        if state_of_generators() != before:
            raise UserError(
                f"{self._key} (of ddptrain.fit: a DataLoader's collate_fn): draws random numbers, which would"
                " be others on another number of ranks. Draw in the dataset's __getitem__ (they follow from"
                " seed, epoch and sample), or in the loss (Task.loss; of ddptrain.fit: step=), where a batch"
                " can be mixed: they follow from seed and step.",
                everywhere=False,
            )
        self._is_checked = True
        return batch

    def _called(self, samples: list[Any]) -> Batch:
        try:
            return self._collate(samples)
        except Exception as error:
            error.add_note(f"(in {self._key})")
            raise


class _Prepared(NamedTuple):
    """skipped: a line for each sample that is left out."""

    pipeline: Pipeline
    skipped: Sequence[str]
    identity: str


@final
class DatasetData(Data):
    """Batches as ``collate`` makes them of a dataset's samples, on the device.

    dataset: training samples. valid: validation samples; without it every tenth sample of ``dataset`` is held
    out. collate: called with a list of samples (default: torch's ``default_collate``); must not draw random
    numbers. valid_collate: for validation samples (default: ``collate``). classes: their names, or how many
    there are; by default those that the dataset names (``dataset.classes``, or a Hugging Face dataset's
    ``label``). workers: loader processes of a rank. on_error: of samples whose file can't be read, "stop"
    ends the run at the first; "skip" reads all before the training and leaves those out.

    Whatever a sample draws from torch's, NumPy's and Python's global generators follows from (seed, epoch,
    sample index), so it is the same for any number of ranks and workers.
    """

    def __init__(
        self,
        dataset: MapStyle,
        valid: MapStyle | None = None,
        collate: Callable[[list[Any]], Batch] | None = None,
        classes: list[str] | int | None = None,
        workers: int | Literal["auto"] = "auto",
        on_error: OnError = "stop",
        valid_collate: Callable[[list[Any]], Batch] | None = None,
    ) -> None:
        check_workers(workers)
        check_map_style(dataset, "data.dataset")
        if valid is not None:
            check_map_style(valid, "data.valid")
        self._dataset = dataset
        self._valid = valid
        self._collates = _collates(collate, valid_collate)
        self._classes = class_names(dataset, classes, "data.classes")
        _check_classes(dataset, valid, classes)
        self._workers = workers
        self._on_error = on_error
        self._prepared: _Prepared | None = None

    def prepare(self, world: World, seed: int) -> None:
        workers = worker_count(self._workers, world)
        train_part, valid_part = self._parts()
        # of each rank's own objects, for a random split may differ; before a sample is read, which some keep
        train_facts, valid_facts = train_part.fingerprints(), valid_part.fingerprints()
        skipped: list[str] = []
        if self._on_error == "skip":
            train_ids, broken = _readable(world, "training", train_part, seed, workers)
            valid_ids, broken_valid = _readable(world, "validation", valid_part, seed, workers)
            train_facts, valid_facts = (
                [train_facts[i] for i in train_ids],
                [valid_facts[i] for i in valid_ids],
            )
            train_part, valid_part = train_part.only(train_ids), valid_part.only(valid_ids)
            skipped = [*broken, *broken_valid]
            tell(skipped)
        sizes = repr((self._classes, len(train_facts), len(valid_facts))).encode()
        identity = digest([sizes, *train_facts, *valid_facts])
        train, valid = self._samples((train_part, valid_part), seed)
        self._prepared = _Prepared(Pipeline(train, valid, workers, world.device), skipped, identity)

    def _samples(self, parts: tuple[_Part, _Part], seed: int | None = None) -> tuple[Samples, Samples]:
        train, valid = (
            Samples(part, collate=collate, seed=seed)
            for part, collate in zip(parts, self._collates, strict=True)
        )
        return train, valid

    def _parts(self) -> tuple[_Part, _Part]:
        """For training and validation."""
        everything = range(len(self._dataset))
        if self._valid is not None:
            valid = _Part(self._valid, range(len(self._valid)), "data.valid")
            return _Part(self._dataset, everything), valid
        train_ids, valid_ids = held_out.split(everything)
        return _Part(self._dataset, train_ids), _Part(self._dataset, valid_ids)

    @property
    def _ready(self) -> _Prepared:
        assert self._prepared is not None, "prepare comes first"
        return self._prepared

    @property
    def train_size(self) -> int:
        return len(self._ready.pipeline.train)

    @property
    def valid_size(self) -> int:
        return len(self._ready.pipeline.valid)

    @property
    def identity(self) -> str:
        return self._ready.identity

    @property
    def outputs(self) -> Sequence[str]:
        return self._classes

    def metadata(self) -> Mapping[str, Any]:
        return {"classes": list(self._classes)}

    def load_metadata(self, metadata: Mapping[str, Any], world: World) -> None:
        """The shape of the samples is that of the first. Raises UserError where the dataset names other
        classes."""
        trained = tuple(metadata["classes"])
        if self._classes not in ((), trained):
            raise UserError(
                f"data.dataset: its classes are {first_few(self._classes, 5)}, and the model was trained on"
                f" {first_few(trained, 5)}. Use the data it was trained with."
            )
        self._classes = trained
        train, valid = self._samples(self._parts())
        self._prepared = _Prepared(Pipeline(train, valid, 0, world.device), [], "")

    @property
    def loading(self) -> Loading:
        return replace(self._ready.pipeline.loading, left_out=len(self._ready.skipped))

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Batch]:
        return self._ready.pipeline.train_batches(sampler, steps)

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Batch]:
        return self._ready.pipeline.valid_batches(chunks)

    def preview(self) -> Tensor | None:
        return None

    def describe(self) -> str:
        name, classes = type(self._dataset).__name__, f", {len(self._classes)} classes" * bool(self._classes)
        return (
            f"{name}: {self.train_size:,} train, {self.valid_size:,} valid{classes},"
            f" {self._ready.pipeline.describe()}{in_words(self._ready.skipped)}"
        )


def _readable(
    world: World, name: str, part: _Part, seed: int, workers: int
) -> tuple[list[int], Sequence[str]]:
    """The indices of the samples that can be read, and a line for each other one."""
    ids, lines = readable(world, name, len(part), Samples(part, seed=seed).check, workers)
    return ids.tolist(), lines


def collated(samples: list[Any]) -> Batch:
    """By torch's ``default_collate``. Raises UserError where they don't make a batch."""
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        raise UserError(
            f"data.dataset: its samples don't make a batch ({first_line}). They must be tensors of one"
            " size (or numbers), alone, in tuples or in dicts: transform them, or set data.collate"
            " (of ddptrain.fit: a DataLoader's collate_fn).",
            everywhere=False,
        ) from error


def _collates(
    train: Callable[[list[Any]], Batch] | None, valid: Callable[[list[Any]], Batch] | None
) -> tuple[Callable[[list[Any]], Batch], Callable[[list[Any]], Batch]]:
    """For both parts."""
    for_train = collated if train is None else _Collate(train, "data.collate")
    return for_train, for_train if valid is None else _Collate(valid, "data.valid_collate")


def check_map_style(dataset: object, key: str) -> None:
    """Raises UserError where it is something else."""
    name = dataset.__name__ if isinstance(dataset, type) else type(dataset).__name__
    is_other = isinstance(dataset, type | IterableDataset)  # torch's has a __getitem__, which raises
    if is_other or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"{key}: {name} is not map-style; it needs __len__ and __getitem__ (an IterableDataset can't be"
            " shuffled, nor continued exactly). Give an instance of a class that has both."
        )
    if isinstance(dataset, Mapping):  # as load_dataset(...) of Hugging Face gives all parts
        raise UserError(
            f"{key}: {name} has names ({first_few(list(map(str, dataset)), 4)}) where a dataset has samples 0"
            " to len - 1. Give one of its parts (split='train', for example), or of tensors a tuple: (x, y)."
        )
    try:
        len(dataset)
    except Exception as error:  # whatever the dataset's own raises
        raise UserError(
            f"{key}: the length of {name} can't be had ({reason(error) or type(error).__name__}). Its __len__"
            " must return how many samples there are."
        ) from error


def class_names(dataset: Any, classes: list[str] | int | None, key: str) -> tuple[str, ...]:
    """Those asked for by ``key``, or those that the dataset names, or none."""
    if isinstance(classes, int):
        if classes < 2:
            raise UserError(f"{key}={classes}: must be 2 or more.")
        return tuple(map(str, range(classes)))
    named = _named_classes(dataset)
    if classes is not None:
        check_renamed(classes, named, key)
        return tuple(classes)
    return tuple(named)


def _named_classes(dataset: Any) -> list[str]:
    """Empty where a dataset names none: its attributes ``classes`` and ``features`` may be anything."""
    names, features = getattr(dataset, "classes", None), getattr(dataset, "features", None)
    if names is None and isinstance(features, Mapping):  # Hugging Face's, where a ClassLabel has names
        names = getattr(features.get("label"), "names", None)
    if isinstance(names, np.ndarray) and names.ndim == 1:
        names = names.tolist()
    return list(map(str, names)) if isinstance(names, Sequence) and not isinstance(names, str) else []


def _check_classes(dataset: MapStyle, valid: MapStyle | None, classes: list[str] | int | None) -> None:
    """Raises UserError where the two name other classes: what a sample holds is theirs, and isn't changed."""
    own = class_names(valid, None, "data.valid")
    # classes=[...] may be other words for those that the dataset names
    configured = () if isinstance(classes, int) else tuple(classes or ())
    trained = class_names(dataset, None, "data.dataset") or configured
    if own and trained:
        check_alike(trained, own, "data.valid", "data.dataset")
