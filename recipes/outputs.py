"""What a model gives against what the data have: as many outputs as classes, and labels of the task's kind.

Compares shapes and types only, so it waits for no device.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ddptrain.api import UserError


def check_outputs(logits: Any, count: int, model: nn.Module, what: str, shape: str) -> None:
    """Raise UserError unless logits have ``count`` at the place of ``what`` (``classes``) in a ``shape`` like
    ``(n, classes)``: with more, some would stand for nothing; with fewer, some labels would have none."""
    dims = shape.strip("()").split(", ")
    place = dims.index(what)
    if isinstance(logits, Tensor) and logits.ndim == len(dims) and logits.shape[place] == count:
        return
    model = getattr(model, "module", model)  # DDP's wrapper
    name = type(getattr(model, "_orig_mod", model)).__name__
    if isinstance(logits, Tensor) and logits.ndim == len(dims):
        raise UserError(
            f"model: {name} has {logits.shape[place]} outputs, and the data have {count} {what}. Build it"
            f" with as many: it is given their number, where it has a parameter for it (num_classes;"
            " vocabulary for text). Or is data the wrong one?"
        )
    raise UserError(f"model: {name} gives {kind(logits)}; must be logits {shape}, of {count} {what}.")


def check_labels(labels: Tensor, logits: Tensor, one_each: bool) -> None:
    """Raise UserError unless labels are int64 (n,), where a sample has one class each, or floats of the
    logits' shape: shares of the classes, or 1 for each class that a sample has."""
    if labels.is_floating_point() and labels.shape == logits.shape:
        return
    if one_each and labels.dtype == torch.int64 and labels.shape == logits.shape[:1]:
        return
    wanted = "int64 (n,), or float (n, classes)" if one_each else "float (n, classes)"
    raise UserError(
        f"data: the labels of a batch are {kind(labels)}, for {logits.shape[1]} classes; must be {wanted}, in"
        " training and in validation."
    )


def check_zero_or_one(labels: Tensor) -> None:
    """Raise UserError unless all labels (n, classes) are 0 or 1. A sync point."""
    other = labels[(labels != 0) & (labels != 1)]
    if len(other):
        raise UserError(
            f"data: a label of several classes a sample is {float(other[0]):g}; must be 1 where the sample"
            " has the class, else 0."
        )


def check_range(error: IndexError, count: int) -> None:
    """Raise UserError in place of what torch says of a label beyond the classes."""
    if "out of bounds" in str(error):
        raise UserError(
            f"data: a label is beyond the {count} classes, which count from 0 to {count - 1} ({error})",
            everywhere=False,
        ) from error


def kind(value: Any) -> str:
    """Type and shape, for people."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}".replace("torch.", "")
    return type(value).__name__
