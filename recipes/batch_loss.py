"""The loss of a batch as a sum and a count, from a loss module or function of (output, target)."""

import copy
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from ddptrain.api import Loss, UserError
from ddptrain.data.prefetch import changed, rows_of, tensors_of

log = logging.getLogger("ddptrain")

_TRIED = (4, 32)
"""Samples by which a mean is told from a sum, and how many where these can't tell."""
_ROUNDING = 1e-3
"""Relative: outputs may come from autocast."""
_NO_TARGET = -100
"""torch's default for ``ignore_index``."""
_NEVER = -(2**31)
"""As an ``ignore_index``: no target is left out."""
_WAY_OUT = (
    "Return one value for each sample, or give step=, a function of (model, batch) that returns"
    " ddptrain.api.Loss: a sum, and the count to divide it by."
)

Reduction = Literal["mean", "sum"]


@final
class BatchLoss:
    """``function(output, target)`` as a sum over the batch and the count that makes a mean of it.

    function: a loss of torch.nn, whose ``reduction`` says what it divides by, class weights and ignored
    targets included; or whatever returns the mean over the samples, their sum, or one value for each. Which
    of them, the first batch of more than one sample tells, and the log says. A sum is trained as the mean:
    the engine divides by the global count.
    """

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        if not callable(function):
            raise UserError(f"loss={function!r}: must be a loss module or a function of (output, target).")
        if isinstance(function, type):
            raise UserError(f"loss: {name_of(function)} is a class; make one, with its arguments.")
        if isinstance(function, nn.Module) and (names := [name for name, _ in function.named_parameters()]):
            raise UserError(
                f"loss: {type(function).__name__} has parameters ({', '.join(names)}), which nothing would"
                " train. Make it a part of the model, and give step= in place of loss=."
            )
        self._name = name_of(function)
        self._function: Any = function
        self._has_buffers = isinstance(function, nn.Module) and any(True for _ in function.buffers())
        self._each = _without_reduction(function)
        self._each_label = _for_one_label(self._each)
        self._values: tuple[int, int] | None = None
        """Values and samples of the first batch, of a loss of torch.nn."""
        self._batchmean = getattr(function, "reduction", None) == "batchmean"
        self._reduction: Reduction | None = None

    def __call__(self, output: Any, target: Any, size: int) -> Loss:
        """size: samples of the batch. Raises UserError where the function's result can't be understood."""
        if self._has_buffers:
            self._function.to(next(tensors_of(output)).device)  # class weights; nothing where they are
        if self._each_label is not None and isinstance(target, Tensor) and _is_one_label(target):
            return Loss(_at_least_single(self._of(self._each_label, output, target)).sum(), size)
        if self._each is not None:
            return self._counted(self._of(self._each, output, target), output, target, size)
        value = self._of(self._function, output, target)
        if isinstance(value, Tensor) and value.ndim == 0:
            if self._reduction is None:
                where = f"loss: {self._name}"
                self._reduction = reduction_of(self._function, output, target, size, where, _WAY_OUT)
                if self._reduction is not None:
                    log.info("loss       %s returns the %s over the samples", self._name, self._reduction)
            if self._reduction == "sum":
                return Loss(_at_least_single(value), size)
        return mean_or_each(value, size, f"loss: {self._name}")

    def _of(self, function: Callable[[Any, Any], Tensor], output: Any, target: Any) -> Tensor:
        try:
            return function(output, target)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, IndexError, RuntimeError) as error:
            unlabelled = f"Target {_NO_TARGET} " in str(error)
            hint = " Give samples without a label another number: CrossEntropyLoss(ignore_index=-1)."
            raise UserError(
                f"loss: {self._name} refuses the model's output {shapes_of(output)} and the target"
                f" {shapes_of(target)}: {error}{_known_targets(error, output)}{hint * unlabelled}",
                everywhere=False,
            ) from error
        except TypeError as error:
            error.add_note(f"(the loss was given {shapes_of(output)} and {shapes_of(target)})")
            raise

    def _counted(self, values: Tensor, output: Any, target: Any, size: int) -> Loss:
        """Of a loss of torch.nn, whose values are not reduced."""
        loss = self._function
        if isinstance(target, Tensor) and values.numel() > max(output.numel(), target.numel()):
            raise UserError(
                f"loss: {self._name} compares each output with each target, for their shapes differ:"
                f" {tuple(output.shape)} and {tuple(target.shape)}. Give them one shape (squeeze,"
                " unsqueeze).",
                everywhere=False,
            )
        total = _at_least_single(values).sum()
        if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and not target.is_floating_point():
            kept = target != loss.ignore_index
            weights = 1.0 if loss.weight is None else loss.weight[torch.where(kept, target, 0)]
            return Loss(total, (kept * weights).sum())
        if self._batchmean:
            return Loss(total, size)
        if not torch.is_grad_enabled():  # pictures may be measured whole after crops: the sums are exact
            return Loss(total, values.numel())
        self._values = values_before, samples_before = self._values or (values.numel(), size)
        if values.numel() * samples_before != values_before * size:
            raise UserError(
                f"loss: {self._name} has {values.numel()} values for {size} samples, and had {values_before}"
                f" for {samples_before}: are batches padded to a length of their own? {_WAY_OUT}",
                everywhere=False,
            )
        return Loss(total, values.numel())


@torch.no_grad()
def reduction_of(
    function: Callable[[Any, Any], Any], output: Any, target: Any, size: int, where: str, way_out: str
) -> Reduction | None:
    """What a function that returns one number for several samples makes of those for each of them; None where
    these can't tell. A sync point.

    Raises UserError where it is neither their mean nor their sum; it begins with ``where``, and ends with
    ``way_out``.
    """
    output = changed(output, lambda values: values.float() if values.is_floating_point() else values)

    def of(rows: slice) -> float:
        return float(function(rows_of(output, rows), rows_of(target, rows)))

    for count in sorted({min(size, most) for most in _TRIED} - {1}):
        try:
            whole, parts = of(slice(count)), [of(slice(i, i + 1)) for i in range(count)]
        except Exception as error:  # whatever the function raises for a part of a batch
            log.info("%s can't be tried on single samples (%s); taken for the mean over them", where, error)
            return "mean"
        total, near = sum(parts), _ROUNDING * max(map(abs, parts))
        if not math.isfinite(whole):
            return None
        if math.isfinite(total):
            is_mean, is_sum = abs(whole - total / count) <= near, abs(whole - total) <= near
            if is_sum and not is_mean:
                return "sum"
            alike = max(parts) - min(parts) <= near  # of which a maximum is the mean, too
            if is_mean and not (is_sum or alike):
                return "mean"
            if is_mean:
                continue
        each = ", ".join(f"{part:.4g}" for part in parts[: _TRIED[0]])
        raise UserError(
            f"{where} is {whole:.4g} for {count} samples, and {each} for each of them: neither their mean nor"
            " their sum. Perhaps it divides by a count of its own, or compares samples with each other."
            f" {way_out}",
            everywhere=False,
        )
    return None


def mean_or_each(value: Any, size: int, where: str) -> Loss:
    """Of so many samples: their mean, or one value for each. Raises UserError, which names ``where``, for
    what is neither."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return Loss(_at_least_single(value) * size, size)
    if isinstance(value, Tensor) and value.shape[0] == size:
        return Loss(_at_least_single(value).sum(), value.numel())
    said = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise UserError(
        f"{where} returned {said} for {size} samples; it must return a tensor: one number for all of them, or"
        " one for each.",
        everywhere=False,
    )


def _at_least_single(values: Tensor) -> Tensor:
    """Before they are added up: in half precision a sum overflows early, or rounds to three digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def count_of(loss: Loss) -> Tensor:
    """On the loss's device; the host does not wait for it."""
    count = loss.count
    return count if isinstance(count, Tensor) else loss.sum.new_full((), count, dtype=torch.int64)


def name_of(function: Callable[..., Any]) -> str:
    """For messages."""
    return getattr(function, "__name__", type(function).__name__)


def shapes_of(values: Any) -> str:
    """For messages."""
    if isinstance(values, Tensor):
        return f"{tuple(values.shape)} {values.dtype}"
    if isinstance(values, Mapping):
        return "{" + ", ".join(f"{key}: {shapes_of(value)}" for key, value in values.items()) + "}"
    if isinstance(values, tuple | list):
        return "(" + ", ".join(map(shapes_of, values)) + ")"
    return type(values).__name__


def _known_targets(error: Exception, output: Any) -> str:
    """A sentence, where it is a target that is none of the classes of the output (n, classes, ...)."""
    if "out of bounds" not in str(error) or not isinstance(output, Tensor) or output.ndim < 2:
        return ""
    classes = output.shape[1]
    return f" The model's output has {classes} classes, so targets are from 0 to {classes - 1}."


def _is_one_label(target: Tensor) -> bool:
    """One class a sample."""
    return target.ndim == 1 and not target.is_floating_point()


def _for_one_label(
    each: Callable[[Any, Any], Tensor] | None,
) -> Callable[[Any, Any], Tensor] | None:
    """Of a cross-entropy whose targets are one class a sample, as torch's defaults have it: each counts, so
    that the count need not be asked of the device. None of all else."""
    if not isinstance(each, nn.CrossEntropyLoss | nn.NLLLoss):
        return None
    if each.ignore_index != _NO_TARGET or each.weight is not None:
        return None
    for_label = copy.copy(each)
    for_label.ignore_index = _NEVER
    return for_label


def _without_reduction(function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor] | None:
    """One of torch.nn's losses that gives each value by itself; None of all else."""
    if type(function).__module__ != "torch.nn.modules.loss" or not hasattr(function, "reduction"):
        return None
    each = copy.copy(function)
    each.reduction = "none"
    return each
