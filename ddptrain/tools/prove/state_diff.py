"""Where two trainings that should be equal are not: in their states, and in their metrics."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddptrain.engine.saved_checkpoint import newest_in, unpack
from ddptrain.errors import UserError

State = Mapping[str, Any]
"""What a checkpoint holds, by name: ``model.fc1.weight``, ``optimizer.state.3.exp_avg``, ``best``."""

_FLOOR = 0.01
"""A gradient below this share of the usual one is measured by that share: where a gradient is nothing but
rounding (a key's bias in attention), so is any share of it."""


@dataclass(frozen=True, slots=True)
class StateDifference:
    """Of two values that are not equal bit for bit."""

    name: str
    largest: float
    """The largest difference of two numbers; infinite where the values can't be compared."""

    def __str__(self) -> str:
        return f"{self.name} (by {self.largest:.1e})"


def last_state(run: Path) -> State:
    """All that the newest checkpoint of a run holds."""
    saved = newest_in(run / "checkpoints")
    if saved is None:
        raise UserError(f"{run}: the training ended without a checkpoint.")
    return dict(_leaves(unpack(saved), ""))


def differences(ours: State, theirs: State) -> list[StateDifference]:
    """What is not the same, bit for bit, in the order of ours, which begins with the model's own."""
    names = [*ours, *(name for name in theirs if name not in ours)]
    pairs = [(name, ours.get(name), theirs.get(name)) for name in names]
    return [StateDifference(name, _gap(a, b)) for name, a, b in pairs if not _same(a, b)]


def weights_apart(ours: State, theirs: State) -> float:
    """The 2-norm of the difference of all weights, as a share of that of all weights."""
    names = [name for name in ours if name.startswith("model.")]
    gap = sum(float((ours[name].double() - theirs[name].double()).norm()) ** 2 for name in names)
    return math.sqrt(gap / sum(float(ours[name].double().norm()) ** 2 for name in names))


def gradients_apart(ours: State, theirs: State) -> dict[str, float]:
    """How far two trainings' gradients are apart, as shares of their 2-norms, by the names of what shows it.

    That is the optimizer's averages of them; the weights where it keeps none. Weights alone would mislead:
    Adam makes a step of full length also of a gradient that is nothing but rounding.
    """
    shown = [name for name in ours if name.startswith("optimizer.state.") and _is_averaged(ours[name])]
    shown = shown or [name for name in ours if name.startswith("model.") and _is_averaged(ours[name])]
    squares: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for name in shown:
        squares[_kind(name)] += float(ours[name].double().norm()) ** 2
        counts[_kind(name)] += ours[name].numel()
    apart = {}
    for name in shown:
        one, other = ours[name].double(), theirs[name].double()
        usual = math.sqrt(squares[_kind(name)] / counts[_kind(name)] * one.numel())
        scale = max(float(one.norm()), float(other.norm()), _FLOOR * usual, 1e-300)
        apart[name] = float((one - other).norm()) / scale
    return apart


def first_line_apart(ours: Path, theirs: Path, tolerance: float = 0.0) -> str:
    """The first line in which the metrics.jsonl of two runs differ, in words; '' where none does.

    tolerance: the share of a number that is no difference; 0: byte for byte.
    """
    lines = ((run / "metrics.jsonl").read_text().splitlines() for run in (ours, theirs))
    for a, b in zip_longest(*lines):
        if a == b:
            continue
        if a is None or b is None:
            line = json.loads(a or b or "")
            return f"step {line['step']}, {line['split']}: a line that only one of them has"
        one, other = json.loads(a), json.loads(b)
        for name in one:
            if one[name] != other.get(name) and relative(one[name], other.get(name)) > tolerance:
                return f"step {one['step']}, {one['split']}: {name} {one[name]} and {other.get(name)}"
    return ""


def relative(one: object, other: object) -> float:
    """The difference of two numbers as a share of the larger one; infinite for what is no number."""
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-300)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    parts = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    if not isinstance(parts, Mapping) or not parts:
        yield name, value
        return
    for key, part in parts.items():
        yield from _leaves(part, f"{name}.{key}" if name else str(key))


def _is_averaged(value: Any) -> bool:
    """Whether this is a tensor of numbers, and no count of steps."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0


def _kind(name: str) -> str:
    """exp_avg, momentum_buffer; of weights: model."""
    return name.rpartition(".")[2] if name.startswith("optimizer.") else "model"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return bool(a == b or (a != a and b != b))  # NaN is NaN


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _gap(a: Any, b: Any) -> float:
    if not isinstance(a, int | float | Tensor) or not isinstance(b, int | float | Tensor):
        return math.inf
    one, other = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    if one.shape != other.shape or not one.numel():
        return math.inf
    return float((one - other).abs().max())
