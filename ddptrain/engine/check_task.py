"""What a Task must return. Checked where it costs nothing: in the first batch, and at each evaluation."""

import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from ddptrain.api.recipe import Loss, Report, Rows, Task
from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean

_OF_A_LINE = ("step", "epoch", "samples", "split")
"""What each line of metrics.jsonl has beside metrics."""
_LOGGED = ("loss", "count", "lr", "grad_norm", "left_out", *_OF_A_LINE)
"""What the engine logs itself."""


def check_loss(task: Task, loss: Any) -> None:
    """Raises UserError for a first loss that can't be trained on."""
    where = f"{type(task).__name__}.loss"
    if not isinstance(loss, Loss):
        raise UserError(f"{where}: returned {_kind(loss)}; it must return a ddptrain.api.Loss.")
    total, count = loss.sum, loss.count
    if not isinstance(total, Tensor) or total.ndim or not total.is_floating_point():
        raise UserError(f"{where}: sum must be one number, a 0-d floating tensor, and is {_kind(total)}.")
    if not total.requires_grad:
        raise UserError(
            f"{where}: sum has no graph, so nothing can be trained by it. Was it detached, made anew"
            " (torch.tensor(...)), or computed under no_grad?",
            everywhere=False,  # other ranks' batches may show none of it, here and below
        )
    if isinstance(count, Tensor) and count.ndim == 0:
        pass
    elif isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UserError(
            f"{where}: count is {count if isinstance(count, int) else _kind(count)}; it must be an int of at"
            " least 1, or, where it may be 0, a 0-d tensor.",
            everywhere=False,
        )
    for name, value in loss.logs.items():
        if not isinstance(value, Tensor) or value.ndim:
            raise UserError(f"{where}: logs[{name!r}] must be a 0-d tensor, and is {_kind(value)}.")
        if name in _LOGGED or name.startswith("lr/"):
            raise UserError(f"{where}: logs: {name} is one of the engine's own names; use another one.")


def looks_like_a_mean(whole: Loss, first: Loss, second: Loss) -> bool:
    """Whether the losses of a batch's halves add up to twice that of the whole, though their counts add up to
    its count: so do means, and the engine would divide them by the count once more. A sync point."""
    if not float(whole.count) or not float(whole.sum):
        return False
    counts = (float(first.count) + float(second.count)) / float(whole.count)
    sums = float((first.sum + second.sum) / whole.sum)
    return 0.99 < counts < 1.01 and 1.8 < sums < 2.2


def check_sums(task: Task, sums: Any) -> None:
    """Raises UserError for results of a batch that can't be added up."""
    where = f"{type(task).__name__}.evaluate"
    if not isinstance(sums, Mapping):
        raise UserError(
            f"{where}: returned {_kind(sums)}; it must return a dict of tensors and Rows.", everywhere=False
        )
    for name, value in sums.items():
        if isinstance(value, Rows):
            if not isinstance(value.values, Tensor) or not value.values.ndim:
                said = _kind(value.values)
                raise UserError(
                    f"{where}: {name!r}: Rows must hold a tensor of shape (k, ...), and hold {said}.",
                    everywhere=False,
                )
        elif (
            not isinstance(value, Tensor) or value.is_complex() or (value.ndim and value.is_floating_point())
        ):
            hint = " torch.tensor(...) makes a tensor of a number." if isinstance(value, Real) else ""
            raise UserError(
                f"{where}: {name!r} must be a 0-d floating tensor (a sum), an integer tensor (counts) or"
                f" Rows, and is {_kind(value)}.{hint}",
                everywhere=False,
            )


def check_report(task: Task, report: Any) -> Report:
    """The report, its metrics as Python's own numbers: those of NumPy could be saved, and not be loaded.
    Raises UserError for one without the numbers that are asked for."""
    where = f"{type(task).__name__}.report"
    if not isinstance(report, Report):
        raise UserError(f"{where}: returned {_kind(report)}; it must return a ddptrain.api.Report.")
    for name, value in report.metrics.items():
        if not isinstance(value, Real):
            raise UserError(f"{where}: metrics[{name!r}] must be a number, and is {_kind(value)}.")
        if name in _OF_A_LINE:
            raise UserError(f"{where}: metrics: {name} is one of the engine's own names; use another one.")
    best = getattr(task, "best_metric", None)
    if best not in report.metrics:
        raise UserError(
            f"{where}: metrics has no {best!r}, which {type(task).__name__}.best_metric names; it has"
            f" {', '.join(map(repr, report.metrics)) or 'none'}.{did_you_mean(str(best), report.metrics)}"
        )
    plain = {n: int(v) if isinstance(v, Integral) else float(v) for n, v in report.metrics.items()}
    return replace(report, metrics=plain)


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}".replace("torch.", "")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return f"{type(value).__name__}"
