"""Exported files that give logits, on the validation set."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn

from ddptrain.api import Batch, Rows, Task, Validation


@final
class LogitsValidation(Validation):
    """By the task's own evaluation, of batches whose first part are the model's inputs.

    as_model: makes what the task's model gives of the file's output.
    """

    def __init__(self, task: Task, as_model: Callable[[Tensor], Any] = lambda logits: logits) -> None:
        self._task = task
        self._as_model = as_model

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch[0],)

    def evaluate(self, outputs: Sequence[Tensor], batch: Batch) -> Mapping[str, Tensor | Rows]:
        return self._task.evaluate(_Answer(self._as_model(outputs[0])), batch)


@final
class _Answer(nn.Module):
    """Answers what is known already."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = answer

    def forward(self, images: Tensor) -> Any:
        return self._answer
