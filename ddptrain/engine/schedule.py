"""The learning rate of each step."""

import warnings
from ctypes import c_float
from typing import Any, final

from torch.optim.lr_scheduler import LRScheduler


@final
class Schedule:
    """One of torch's schedules as a function of the step, which does not ask what a step has come to.

    Not restored from a checkpoint: a resumed run follows the config it is given, with more epochs or another
    rate; with the same config the rates are the same, bit for bit.
    """

    def __init__(self, schedule: LRScheduler, steps: int, on_gpu: bool = False) -> None:
        """steps: of the run. on_gpu: rates are float32, as a captured step has them in the device's memory:
        else a captured step would have other bits than an eager one."""
        self._schedule = schedule
        self._last = steps - 1
        self._step = 0
        self._exact = [group["lr"] for group in self._groups()] if on_gpu else None
        """The rates that torch's schedule goes on from."""

    @property
    def turns_momentum(self) -> bool:
        """Whether it changes more than the rate, as torch's OneCycleLR does."""
        return bool(getattr(self._schedule, "cycle_momentum", False))

    def at(self, step: int) -> None:
        """Give the optimizer's groups the rates of this step, counted from 0; an earlier one changes
        nothing, and one past the end (of a run that was longer) has the last rates."""
        step = min(step, self._last)
        if self._exact is None:
            self._move(step)
            return
        for group, rate in zip(self._groups(), self._exact, strict=True):
            group["lr"] = rate
        self._move(step)
        self._exact = [group["lr"] for group in self._groups()]
        for group in self._groups():
            group["lr"] = c_float(group["lr"]).value

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's, which has others after a resume."""
        return self._schedule.optimizer.param_groups

    def _move(self, step: int) -> None:
        if step == self._step + 1 > 1:
            self._schedule.step()
        elif step > self._step:  # torch would warn that the optimizer has not stepped
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                for _ in range(self._step, step):
                    self._schedule.step()
        self._step = max(step, self._step)
