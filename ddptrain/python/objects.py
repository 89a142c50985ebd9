"""A Python program's own objects as `Objects`: checked, made alike, and sent to the ranks."""

import inspect
import json
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from ddptrain.data.dataset import check_map_style, collated
from ddptrain.errors import UserError
from ddptrain.recipes.given import Objects
from ddptrain.verbs.script import WORDS


def objects_of(
    model: Any, train: Any, valid: Any, loss: Any, metrics: Any, step: Any
) -> tuple[Objects, Mapping[str, Any]]:
    """The objects, and what DataLoaders among them say of the config, by key. Raises UserError for what can't
    be trained with."""
    _check_model(model)
    settings: dict[str, Any] = {}
    collate = valid_collate = None
    if isinstance(train, DataLoader):
        _check_loader(train, "train")
        settings = {"train.batch_size": _global_batch_size(train), "data.workers": train.num_workers}
        collate = None if train.collate_fn is default_collate else train.collate_fn
    if isinstance(valid, DataLoader):
        _check_loader(valid, "valid")
        settings["train.eval_batch_size"] = valid.batch_size or 1
        valid_collate = collated if valid.collate_fn is default_collate else valid.collate_fn
    train_set = _samples(train, "train")
    valid_set = None if valid is None else _samples(valid, "valid")
    if valid_set is not None and isinstance(train_set, tuple) is not isinstance(valid_set, tuple):
        raise UserError("valid: must be of the kind of train: tensors for both, or datasets for both.")
    if isinstance(train_set, tuple):
        settings.pop("data.workers", None)
        for key, own in (("train", collate), ("valid", valid_collate)):
            if own not in (None, collated):
                raise UserError(
                    f"{key}: a DataLoader of tensors with a collate_fn; give a Dataset of your own in it."
                )
    return Objects(model, train_set, valid_set, collate, valid_collate, loss, metrics, step), settings


def write_objects(objects: Objects, words: Sequence[str], folder: Path) -> str:
    """Write what ``--script`` reads; returns the objects' file. Raises UserError naming the object that
    can't be sent to another process."""
    try:
        content = cloudpickle.dumps(objects)
    except Exception as whole:  # whatever an object's own __reduce__ raises
        for field in fields(objects):
            try:
                cloudpickle.dumps(getattr(objects, field.name))
            except Exception as error:
                raise UserError(
                    f"{field.name}: can't be sent to the training's processes ({error}). Leave open files,"
                    " locks and generators out of it: open them where they are first used"
                    + (", or give a function that makes the model." if field.name == "model" else ".")
                ) from error
        raise UserError(f"the objects can't be sent to the training's processes ({whole}).") from whole
    file = folder / "objects.pkl"
    file.write_bytes(pickle.dumps(sys.path) + content)
    (folder / WORDS).write_text(json.dumps(words))
    return str(file)


def _check_model(model: Any) -> None:
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise UserError(
            f"model: is wrapped in {type(model).__name__} already; give the module inside, model.module:"
            " strategy=ddp wraps it in each rank."
        )
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise UserError(f"model={model!r}: must be a torch.nn.Module, or a function that makes one.")
        if needed := _needed_arguments(model):
            name = getattr(model, "__name__", type(model).__name__)
            raise UserError(
                f"model: {name} needs arguments ({', '.join(needed)}). Give the module itself,"
                f" {name}(...), or a function without arguments that makes one."
            )
        return
    if hasattr(model, "_orig_mod"):
        raise UserError("model: is compiled already; give it as it was, and compile=default as a word.")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise UserError(
                f"model: {name} has no shape yet (a lazy module). Call the model once on a batch before fit."
            )
        if tensor.device.type != "cpu":
            raise UserError(
                f"model: {name} is on {tensor.device}. Give the model before .to(...), or model.cpu():"
                " each rank moves its own to its device."
            )
    if not any(True for _ in model.parameters()):
        raise UserError(f"model: {type(model).__name__} has no parameters, so there is nothing to train.")


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    """The parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a function in C
        return []
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in free]


def _check_loader(loader: DataLoader[Any], key: str) -> None:
    """What of a DataLoader has no place here."""
    if isinstance(loader.dataset, IterableDataset):
        return  # said of the dataset
    if type(loader.batch_sampler) is not BatchSampler:
        kind = "batch_size=None" if loader.batch_sampler is None else type(loader.batch_sampler).__name__
        raise UserError(
            f"{key}: a DataLoader with {kind} makes its own batches, which could not be divided among"
            " ranks nor continued exactly. Give the dataset, and batch_size= (the global one)."
        )
    sampler = loader.sampler
    plain = type(sampler) in (SequentialSampler, DistributedSampler) or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not plain:
        raise UserError(
            f"{key}: a DataLoader with {type(sampler).__name__}: an order of one's own could not be"
            " divided among ranks nor continued exactly. Give the dataset: it is shuffled by (seed, epoch)."
            " For rare classes weight the loss (CrossEntropyLoss(weight=...)), for a part of the samples give"
            " a Subset."
        )


def _global_batch_size(loader: DataLoader[Any]) -> int:
    """A loader with a DistributedSampler names a rank's part of it."""
    ranks = loader.sampler.num_replicas if isinstance(loader.sampler, DistributedSampler) else 1
    return (loader.batch_size or 1) * ranks


def _samples(given: Any, key: str) -> Any:
    """A tuple of tensors, or a map-style dataset."""
    if isinstance(given, DataLoader):
        given = given.dataset
    if type(given) is TensorDataset:  # a subclass may change its samples
        given = given.tensors
    if isinstance(given, Tensor | np.ndarray):
        raise UserError(
            f"{key}: one tensor, and a sample needs a target, too: give a tuple, (inputs, targets)."
        )
    if isinstance(given, tuple | list) and given and all(isinstance(t, Tensor | np.ndarray) for t in given):
        tensors = tuple(torch.as_tensor(tensor) for tensor in given)
        if moved := [str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"]:
            raise UserError(
                f"{key}: a tensor is on {moved[0]}; give it on the CPU: each rank copies it once."
            )
        if any(tensor.ndim == 0 for tensor in tensors):
            raise UserError(f"{key}: a tensor has no dimension; row i of each must belong to sample i.")
        return tensors
    check_map_style(given, key)
    return given
