"""Advancing a learning-rate schedule."""

import warnings

from torch.optim.lr_scheduler import LRScheduler


def fast_forward(schedule: LRScheduler, steps: int) -> None:
    """Advance a new schedule by so many steps.

    Not restored from a checkpoint: a resumed run follows the config it is given, with more epochs or another
    rate; with the same config the rates are the same, bit for bit.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for _ in range(steps):
            schedule.step()
