"""A task's `rank_state`: what it keeps from step to step, a row for each of this rank's samples.

A task may change its tensors in place, so what is to be put back is copied first.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ddptrain.api.recipe import Task
from ddptrain.errors import UserError


def copied_rank_state(task: Task) -> dict[str, Tensor]:
    """As it is now."""
    return {name: rows.clone() for name, rows in task.rank_state().items()}


@contextmanager
def same_rank_state(task: Task) -> Iterator[None]:
    """Around passes that must leave no trace: afterwards it is as before."""
    before = copied_rank_state(task)
    try:
        yield
    finally:
        task.load_rank_state(before)


def check_rank_state(task: Task, share: tuple[int, int], micro_batch: int) -> None:
    """Raises UserError, after the first micro-batch, for state that has not a row for each of its samples or
    of this rank's ``share`` of the global batch: ranks and resumes could not divide it among them."""
    samples = share[1] - share[0]
    for name, rows in task.rank_state().items():
        if not rows.ndim or len(rows) not in (samples, micro_batch):
            raise UserError(
                f"{type(task).__name__}.rank_state: {name!r} is of shape {tuple(rows.shape)}; it must have a"
                f" row for each of this rank's {samples} samples of the global batch. Keep what all samples"
                " share in a buffer of the model (register_buffer).",
                everywhere=False,  # it may fit another rank's share
            )
