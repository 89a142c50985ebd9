"""Any model with any loss of (output, target): what ``ddptrain.fit`` trains, and a config without Python."""

from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor, nn

from ddptrain.api import Batch, Data, Figure, Loss, Progress, Report, Rows, Task, UserError
from ddptrain.data.prefetch import tensors_of
from ddptrain.keys import did_you_mean
from ddptrain.recipes.batch_loss import BatchLoss, count_of, mean_or_each, shapes_of
from ddptrain.recipes.batch_metrics import TorchMetric, batch_metrics

Step = Callable[[nn.Module, Batch], Tensor | Loss]
"""``(model, batch)`` -> the mean over the batch's samples, one value for each, or a `Loss`."""


@final
class Supervised(Task):
    """Batches are tuples ``(*inputs, target)``: ``loss(model(*inputs), target)`` is trained, and measured on
    the validation set as ``loss``.

    model: a module, or what makes one. loss: as `BatchLoss` takes it. metrics: by name, each a metric of
    torchmetrics, or a function of (output, target) that returns the mean over the samples or one value for
    each; or a MetricCollection. step: in place of loss and metrics, for batches of any kind; what its
    `Loss.logs` hold is averaged over the validation set, too. best_metric: what ``checkpoints/best`` is the
    best in. higher_is_better: None: as the metric itself says; must be said of a function.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        data: Data,
        loss: Callable[[Any, Any], Tensor] | None = None,
        metrics: Mapping[str, Callable[..., Any]] | Callable[..., Any] | None = None,
        step: Step | None = None,
        best_metric: str = "loss",
        higher_is_better: bool | None = None,
    ) -> None:
        if (loss is None) == (step is None):
            raise UserError(
                "loss, step: give one of them: loss=, of (output, target), or step=, of (model, batch)."
            )
        if step is not None and metrics:
            raise UserError(
                "metrics: are of (output, target), which step= does not tell. Return ddptrain.api.Loss"
                " from it, with sums of what is to be measured as its logs."
            )
        self._model = model
        self._data = data
        self._loss = BatchLoss(loss) if loss is not None else None
        self._step = step
        self._metrics = batch_metrics(metrics)
        self.best_metric = best_metric
        self.higher_is_better = self._direction(higher_is_better)

    def _direction(self, configured: bool | None) -> bool:
        """Of the best metric."""
        known = {"loss": False, **{metric.name: metric.higher_is_better for metric in self._metrics}}
        best = self.best_metric
        # one of torchmetrics may have several values, f1/0 and f1/1
        several = [one.name for one in self._metrics if isinstance(one, TorchMetric)]
        matches = [name for name in several if best.startswith((f"{name}/", f"{name}_"))]
        of_several = max(matches, key=len, default=best)
        if self._step is None and best not in known and of_several == best:
            raise UserError(
                f"task.best_metric={best}: there is no such metric; there are {', '.join(known)}."
                f"{did_you_mean(best, list(known))}"
            )
        better = known.get(best, known.get(of_several))
        if configured is None and better is None:
            raise UserError(
                f"task.best_metric={self.best_metric}: whether higher is better isn't known of a function;"
                " say task.higher_is_better=true or false (to ddptrain.fit as a word after the data:"
                ' "task.higher_is_better=true").'
            )
        return bool(better if configured is None else configured)

    def build(self) -> nn.Module:
        model = self._model if isinstance(self._model, nn.Module) else self._model()
        if not isinstance(model, nn.Module):
            raise UserError(f"model: makes {type(model).__name__}; it must make a torch.nn.Module.")
        return model

    def loss(self, model: nn.Module, batch: Batch, progress: Progress) -> Loss:
        if self._step is not None:
            return _of_step(self._step(model, batch), _size(batch))
        assert self._loss is not None
        output, target = _output(model, batch)
        return self._loss(output, target, _size((target, batch)))  # inputs may have their time first

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor | Rows]:
        sums: dict[str, Tensor | Rows] = {}
        if self._step is not None:
            loss = _of_step(self._step(model, batch), _size(batch))
        else:
            assert self._loss is not None
            output, target = _output(model, batch)
            size = _size((target, batch))
            loss = self._loss(output, target, size)
            for metric in self._metrics:
                sums |= metric.sums(output, target, size)
        for name, total in {"loss": loss.sum, **loss.logs}.items():
            # each with its own count: a batch may log what others don't
            sums |= {f"/{name}/sum": total, f"/{name}/count": count_of(loss)}
        return sums

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        logged = [key.removesuffix("/sum")[1:] for key in sums if key[0] == "/" and key.endswith("/sum")]
        means = {name: _mean(sums[f"/{name}/sum"], sums[f"/{name}/count"]) for name in logged}
        figures: dict[str, Figure] = {}
        for metric in self._metrics:
            values, own_figures = metric.report(sums, self._data.outputs)
            means |= values
            figures |= own_figures
        return Report(means, figures)


def _mean(total: Tensor, count: Tensor) -> float:
    return float(total) / float(count) if count else float("nan")


def _output(model: nn.Module, batch: Batch) -> tuple[Any, Any]:
    """The model's output, and the target."""
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise UserError(
            f"data: a batch is {type(batch).__name__}; with loss= it must be (inputs, target), or (*inputs,"
            " target) of a model with several. For any other kind give step=, a function of (model, batch)."
        )
    *inputs, target = batch
    try:
        return model(*inputs), target
    except (TypeError, ValueError, RuntimeError) as error:
        error.add_note(f"(the model was given {shapes_of(inputs)})")
        raise


def _of_step(value: Any, size: int) -> Loss:
    return value if isinstance(value, Loss) else mean_or_each(value, size, "step:")


def _size(batch: Batch) -> int:
    """Samples of a batch: the first dimension of its first tensor."""
    for tensor in tensors_of(batch):
        if tensor.ndim:
            return len(tensor)
    raise UserError("data: a batch holds no tensor with a dimension for its samples.")
