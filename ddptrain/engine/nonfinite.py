"""Undoing a step that is left out because a loss or gradient is not finite."""

import torch
from torch import Tensor, nn

from ddptrain.api.recipe import Task
from ddptrain.distributed.snapshot import Snapshot
from ddptrain.engine.rank_state import copied_rank_state


class Undo:
    """Restores, after a skipped step, what its passes have changed: the model's buffers (BatchNorm's
    statistics) and extra state, and the task's rank state. The decision is made on the device."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._task = task
        self._layers = list(model.modules())
        self._before = Snapshot(())
        self._of_task: dict[str, Tensor] = {}

    def remember(self) -> None:
        self._before = Snapshot(self._layers)
        self._of_task = copied_rank_state(self._task)

    def put_back(self, nonfinite: Tensor) -> None:
        """Where ``nonfinite`` (0-d) is not 0."""
        bad = nonfinite != 0
        self._before.restore_where(bad)
        after = self._task.rank_state()
        if after.keys() != self._of_task.keys():  # made in this step, the first: a sync point
            if bool(bad):
                self._task.load_rank_state(self._of_task)
        elif after:
            self._task.load_rank_state(
                {name: torch.where(bad, self._of_task[name], rows) for name, rows in after.items()}
            )
