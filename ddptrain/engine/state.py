"""All that a run is at one step: what a checkpoint holds, and how it is made and put back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddptrain.engine.ema import Average
from ddptrain.engine.meter import Meter
from ddptrain.errors import UserError


@dataclass(slots=True)
class TrainState:
    """The run at one step.

    model: the bare module, with clean parameter names. wrapped: what the strategy calls in training;
    it shares the model's weights.
    """

    model: nn.Module
    wrapped: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    scaler: torch.amp.GradScaler
    average: Average
    meter: Meter
    step: int = 0
    """Optimizer steps done."""
    best: float | None = None
    """Best value of the task's best_metric so far."""
    best_step: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only, so that it loads with ``weights_only=True``."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average.state_dict(),
            "meter": self.meter.state_dict(),
            "step": self.step,
            "best": self.best,
            "best_step": self.best_step,
        }

    def load_state_dict(self, state: Mapping[str, Any], where: str) -> None:
        """Put a saved state back. ``where`` names it in errors.

        Raises UserError where it belongs to another model or another kind of run.
        """
        fit_model(self.model, state["model"], where)
        if bool(state["average"]) != bool(self.average.state_dict()):
            raise UserError(
                f"{where}: was saved with ema.decay {'set' if state['average'] else 'null'}; use the same."
            )
        try:
            self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            self.scaler.load_state_dict(state["scaler"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{where}: its optimizer, schedule or precision is another one ({error})."
                " Use the config it was saved with (config.yaml beside it), or run.resume=never."
            ) from error
        self.average.load_state_dict(state["average"])
        self.meter.load_state_dict(state["meter"])
        self.step, self.best, self.best_step = state["step"], state["best"], state["best_step"]


def fit_model(model: nn.Module, weights: Mapping[str, Any], where: str) -> None:
    """Load weights into a model, or raise UserError that says how the two differ."""
    own = model.state_dict()
    for name in own.keys() | weights.keys():
        if name not in weights or name not in own or own[name].shape != weights[name].shape:
            theirs = tuple(weights[name].shape) if name in weights else "absent"
            ours = tuple(own[name].shape) if name in own else "absent"
            raise UserError(
                f"{where}: is of another model: {name} is {theirs} there and {ours} here."
                " Use the recipe and model it was trained with."
            )
    model.load_state_dict(weights)
