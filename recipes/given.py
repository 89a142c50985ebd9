"""Task and data made of Python's own objects, which ``ddptrain.fit`` gives (docs/fit.md)."""

import copy
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, final

from torch import Tensor, nn
from torch.utils.data import Dataset

from ddptrain.api import Data, UserError
from ddptrain.data.dataset import DatasetData, class_names
from ddptrain.data.tensors import TensorData
from ddptrain.distributed.launcher.process import OBJECTS
from ddptrain.recipes.supervised import Step, Supervised


@final
@dataclass(frozen=True, slots=True)
class Objects:
    """What a program has given. train, valid: tuples of tensors, or map-style datasets."""

    model: nn.Module | Callable[[], nn.Module]
    train: tuple[Tensor, ...] | Dataset[Any]
    valid: tuple[Tensor, ...] | Dataset[Any] | None
    collate: Callable[[list[Any]], Any] | None
    valid_collate: Callable[[list[Any]], Any] | None
    """None: as ``collate``."""
    loss: Callable[[Any, Any], Tensor] | None
    metrics: Mapping[str, Callable[..., Any]] | Callable[..., Any] | None
    step: Step | None

    def copied(self) -> "Objects":
        """With copies of what a training changes."""
        model, loss, metrics = copy.deepcopy((self.model, self.loss, self.metrics))
        return replace(self, model=model, loss=loss, metrics=metrics)


_given: list[Objects] = []


def give(objects: Objects) -> None:
    """In this process, configs are made of these from now on."""
    _given[:] = [objects]


@contextmanager
def giving(objects: Objects) -> Iterator[None]:
    """Inside, configs are made of these, which are changed: their model is trained, or loaded into."""
    before = list(_given)
    give(objects)
    try:
        yield
    finally:
        _given[:] = before


def read(file: str | os.PathLike[str]) -> Objects:
    """The objects in a file that ``fit`` has written, in this user's own program."""
    with open(file, "rb") as pickled:
        sys.path += [folder for folder in pickle.load(pickled) if folder not in sys.path]
        objects = pickle.load(pickled)
    assert isinstance(objects, Objects)
    return objects


def task(data: Data, best_metric: str = "loss", higher_is_better: bool | None = None) -> Supervised:
    """`Supervised` of the given model, loss and metrics."""
    objects = _objects()
    return Supervised(
        objects.model, data, objects.loss, objects.metrics, objects.step, best_metric, higher_is_better
    )


def data(
    classes: list[str] | int | None = None,
    workers: int | Literal["auto"] = "auto",
    on_error: Literal["stop", "skip"] = "stop",
) -> Data:
    """The given sets. classes, workers, on_error: as `DatasetData` takes them."""
    objects = _objects()
    if isinstance(objects.train, tuple):
        assert objects.valid is None or isinstance(objects.valid, tuple), "fit has made both alike"
        names = class_names(None, classes, "data.classes")
        return TensorData(objects.train, objects.valid, OBJECTS not in os.environ, names)
    return DatasetData(
        objects.train, objects.valid, objects.collate, classes, workers, on_error,  # type: ignore[arg-type]
        objects.valid_collate,
    )  # fmt: skip


def _objects() -> Objects:
    if not _given:
        if (file := os.environ.get(OBJECTS)) is None:
            raise UserError(
                "recipe=fit: its model and data are objects of a Python program, which are not known here."
                " Call ddptrain.fit there as before (a run that has finished is returned at once), or name"
                " the program: --script=<file>.py"
            )
        give(read(file))
    return _given[0]
