"""Metrics of (output, target) that are the same for any number of ranks: functions, and torchmetrics'."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from ddptrain.api import ConfusionMatrix, Figure, Picture, Rows, UserError
from ddptrain.data.prefetch import changed, tensors_of
from ddptrain.recipes.batch_loss import Reduction, count_of, mean_or_each, name_of, reduction_of

Reported = tuple[Mapping[str, float], Mapping[str, Figure]]
_OVER_TIME = ("BootStrapper", "MinMaxMetric", "MetricTracker", "Running", "FeatureShare")
"""Of torchmetrics.wrappers: random, or of more than one evaluation."""
_WAY_OUT = (
    "Return one value for each sample; or give a metric of torchmetrics, which is computed over the whole"
    " set: torchmetrics.regression.R2Score(), for one."
)


class BatchMetric(ABC):
    """A metric over the whole validation set, batch by batch."""

    name: str
    higher_is_better: bool | None
    """None: not known."""

    @abstractmethod
    def sums(self, output: Any, target: Any, size: int) -> Mapping[str, Tensor | Rows]:
        """Of a batch, for `Task.evaluate`."""

    @abstractmethod
    def report(self, sums: Mapping[str, Tensor], outputs: Sequence[str]) -> Reported:
        """Values and figures of the whole set, for `Task.report`. outputs: names of the classes, if known."""


def batch_metrics(metrics: Any) -> list[BatchMetric]:
    """Raises UserError for what can't be the same on any number of ranks."""
    torchmetrics = sys.modules.get("torchmetrics")  # there is none of its metrics without it
    named: dict[str, Callable[..., Any]] = {}
    if torchmetrics is not None and isinstance(metrics, torchmetrics.MetricCollection):
        named = dict(metrics.items(keep_base=False))
    elif isinstance(metrics, Mapping):
        for name, metric in metrics.items():
            inner = torchmetrics is not None and isinstance(metric, torchmetrics.MetricCollection)
            named |= {f"{name}_{n}": m for n, m in metric.items()} if inner else {name: metric}
    elif isinstance(metrics, list | tuple):
        raise UserError('metrics: need names; give a dict, as {"f1": MulticlassF1Score(num_classes=5)}.')
    elif metrics is not None:
        named = {name_of(metrics).lower(): metrics}
    adapted: list[BatchMetric] = []
    for name, metric in named.items():
        if name == "loss":
            raise UserError("metrics.loss: is the name of the loss; use another one.")
        if torchmetrics is not None and isinstance(metric, torchmetrics.Metric):
            adapted.append(TorchMetric(name, metric))
        elif callable(metric) and not isinstance(metric, type):
            adapted.append(FunctionMetric(name, metric))
        else:
            raise UserError(
                f"metrics.{name}={metric!r}: must be a metric of torchmetrics, made with its arguments, or a"
                " function of (output, target)."
            )
    return adapted


@final
class FunctionMetric(BatchMetric):
    """A function of (output, target): the mean over the samples, or one value for each. The first batch of
    several samples tells whether it is one."""

    def __init__(self, name: str, function: Callable[[Any, Any], Tensor]) -> None:
        self.name = name
        self.higher_is_better = None
        self._function = function
        self._reduction: Reduction | None = None

    def sums(self, output: Any, target: Any, size: int) -> Mapping[str, Tensor | Rows]:
        output = _in_single(output)
        value = self._function(output, target)
        value = value.detach().double() if isinstance(value, Tensor) else self._as_tensor(value)
        if value.ndim == 0 and self._reduction is None:
            where = f"metrics.{self.name}:"
            self._reduction = reduction_of(self._function, output, target, size, where, _WAY_OUT)
        if self._reduction == "sum":
            value = value / size
        mean = mean_or_each(value, size, f"metrics.{self.name}:")
        return {f"{self.name}/sum": mean.sum, f"{self.name}/count": count_of(mean)}

    def _as_tensor(self, value: Any) -> Tensor:
        try:
            return torch.tensor(float(value))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"metrics.{self.name}: returned {type(value).__name__}; it must return a number or a tensor.",
                everywhere=False,
            ) from error

    def report(self, sums: Mapping[str, Tensor], outputs: Sequence[str]) -> Reported:
        return {self.name: float(sums[f"{self.name}/sum"]) / int(sums[f"{self.name}/count"])}, {}


@final
class TorchMetric(BatchMetric):
    """A metric of torchmetrics. Its states of each batch take the place of those of a rank in its own way to
    be computed on several (``dist_sync_fn``, torchmetrics.readthedocs.io), in the order of the set: so it is
    the same on any number of ranks."""

    def __init__(self, name: str, metric: Any) -> None:
        self.name = name
        self.higher_is_better = metric.higher_is_better
        self._metric = metric
        self._parts: dict[str, Any] = {
            path: part for path, part in metric.named_modules() if hasattr(part, "add_state")
        }
        for part in self._parts.values():
            self._check(part)

    def _check(self, part: Any) -> None:
        from torchmetrics.utilities import dim_zero_mean

        kind = type(part).__name__
        if part.device.type == "meta":
            raise UserError(f"metrics.{self.name}: {kind} is on meta, and holds nothing; make it on the CPU.")
        if kind in _OVER_TIME:
            raise UserError(
                f"metrics.{self.name}: {kind} draws random numbers, or is of more than one evaluation;"
                " give the metric inside of it."
            )
        for state, reduction in part._reductions.items():
            if reduction is dim_zero_mean:
                raise UserError(
                    f"metrics.{self.name}: {kind} averages its state {state} over ranks, so its value depends"
                    " on how the set is divided. Give a function of (output, target) in place of it."
                )

    def sums(self, output: Any, target: Any, size: int) -> Mapping[str, Tensor | Rows]:
        output = _in_single(output)
        device = next(tensors_of(output)).device
        if self._metric.device != device:
            self._metric.to(device)
        for part in self._parts.values():  # the metric itself among them
            part.reset()
        try:
            self._metric.update(output, target)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError, TypeError) as error:
            raise UserError(
                f"metrics.{self.name}: {type(self._metric).__name__} refuses a batch of the model's output"
                f" and the target: {error}",
                everywhere=False,
            ) from error
        return dict(self._sums())

    def _sums(self) -> Iterator[tuple[str, Tensor | Rows]]:
        for path, part in self._parts.items():
            for state, value in part.metric_state.items():
                key = f"{self.name}/{path}/{state}"
                if isinstance(value, Tensor):
                    counts = _is_count(part, state, value)
                    yield key, value.clone() if counts else Rows(value.detach()[None].clone())
                elif value:  # a list, to which a batch may add several
                    items = [item.detach().reshape(item.shape or (1,)) for item in self._listed(value, state)]
                    yield key, Rows(torch.cat(items))
                    yield f"{key}/lengths", Rows(torch.tensor([len(item) for item in items]))

    def _listed(self, values: Sequence[Any], state: str) -> Sequence[Tensor]:
        if all(isinstance(v, Tensor) and v.shape[1:] == values[0].shape[1:] for v in values):
            return values
        raise UserError(
            f"metrics.{self.name}: {type(self._metric).__name__} keeps {state} as a list of something else"
            " than tensors of one width, which can't be gathered in the order of the set. Give a function of"
            " (output, target) in place of it."
        )

    def report(self, sums: Mapping[str, Tensor], outputs: Sequence[str]) -> Reported:
        value, name = self.value(sums), self.name
        if isinstance(value, Mapping):
            return _by_key(name, value), {}
        if isinstance(value, Tensor) and value.numel() == 1:
            return {name: float(value)}, {}
        if _has_a_threshold(value):
            best, threshold = value
            if best.ndim == 0:
                return {name: float(best), f"{name}_threshold": float(threshold)}, {}
            return self._by_class(best, outputs), {}
        if isinstance(value, Tensor) and value.ndim == 1:
            return self._by_class(value, outputs), {}
        figures: dict[str, Figure] = {}
        if isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point():
            classes = outputs if len(outputs) == len(value) else tuple(map(str, range(len(value))))
            figures[name] = ConfusionMatrix(value.tolist(), classes)
        else:
            figures[name] = _plotted(self._metric, value)
        return {}, figures

    def _by_class(self, values: Tensor, outputs: Sequence[str]) -> dict[str, float]:
        names = outputs if len(outputs) == len(values) else range(len(values))
        return {f"{self.name}/{key}": float(value) for key, value in zip(names, values, strict=True)}

    def value(self, sums: Mapping[str, Tensor]) -> Any:
        """As the metric computes it of all batches' states, on the CPU."""
        self._metric.to("cpu")
        for path, part in self._parts.items():
            part.reset()
            part._update_count = 1  # compute warns of a metric that was never updated
            of_batches: dict[int, list[Tensor]] = {}
            for state, own in part.metric_state.items():
                key = f"{self.name}/{path}/{state}"
                if isinstance(own, Tensor):
                    total = sums[key]
                    states = [total] if _is_count(part, state, own) else total.unbind()
                    stands_for = own.clone()
                    setattr(part, state, stands_for)
                else:
                    lengths = sums.get(f"{key}/lengths")
                    states = [] if lengths is None else sums[key].split(lengths.tolist())
                    stands_for = torch.empty(0)
                    setattr(part, state, [stands_for] if states else [])
                of_batches[id(stands_for)] = list(states)
            part.dist_sync_fn = lambda state, group, of_batches=of_batches: of_batches[id(state)]
            part.distributed_available_fn = lambda: True
        try:
            return self._metric.compute()
        finally:
            for part in self._parts.values():
                part.dist_sync_fn, part.distributed_available_fn = None, None
                part.reset()


def _in_single(output: Any) -> Any:
    """What autocast gives in half precision as float32."""
    return changed(output, lambda v: v.float() if v.dtype in (torch.half, torch.bfloat16) else v)


def _by_key(name: str, computed: Mapping[str, Any]) -> dict[str, float]:
    """One value, or one for each of ``classes``, as MeanAveragePrecision gives them."""
    values = {key: torch.as_tensor(value) for key, value in computed.items()}
    classes = [int(label) for label in values.get("classes", torch.empty(0)).reshape(-1)]
    by_key: dict[str, float] = {}
    for key, value in values.items():
        if value.numel() == 1:
            by_key[f"{name}_{key}"] = float(value)
        elif key != "classes":
            labels = classes if len(classes) == value.numel() else range(value.numel())
            by_key |= {f"{name}_{key}/{i}": float(v) for i, v in zip(labels, value.reshape(-1), strict=True)}
    return by_key


def _is_count(part: Any, state: str, value: Tensor) -> bool:
    """Whether a state is added up over batches, exactly."""
    from torchmetrics.utilities import dim_zero_sum

    return part._reductions[state] is dim_zero_sum and not value.is_floating_point()


def _has_a_threshold(value: Any) -> bool:
    """Of RecallAtFixedPrecision and the like: the best value, and where."""
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(item, Tensor) and item.ndim < 2 for item in value)
        and value[0].shape == value[1].shape
    )


def _plotted(metric: Any, value: Any) -> Picture:
    """As the metric draws itself."""
    from matplotlib import pyplot
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure, _ = metric.plot(value)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = torch.tensor(np.asarray(canvas.buffer_rgba()))
    pyplot.close(figure)
    return Picture(pixels[..., :3].permute(2, 0, 1).contiguous())
