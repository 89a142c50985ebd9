"""The state of a run at one step: what a checkpoint holds, how it is made and restored."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddptrain.api.controller import Controller
from ddptrain.api.recipe import Task
from ddptrain.api.strategy import Strategy
from ddptrain.distributed.comm import from_all_ranks
from ddptrain.engine.consistency import check_extra_state
from ddptrain.engine.ema import Average
from ddptrain.engine.freeze import Frozen
from ddptrain.engine.load_model import check_fits, load_model, part_of
from ddptrain.engine.meter import Meter
from ddptrain.engine.schedule import Schedule
from ddptrain.errors import UserError
from ddptrain.text import first_few

_NEED_STATE = ("amsgrad", "centered", "momentum")
"""Settings of torch's optimizers for which they keep more state."""


@dataclass(slots=True)
class TrainState:
    """The run at one step.

    model: the bare module, with clean parameter names. wrapped: what the strategy calls in training;
    it shares the model's weights.
    """

    model: nn.Module
    wrapped: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    scaler: torch.amp.GradScaler
    average: Average
    meter: Meter
    strategy: Strategy
    step: int = 0
    """Optimizer steps done, including those left out because a number was not finite."""
    left_out: int = 0
    left_out_in_a_row: int = 0
    """Up to now."""
    evaluation_due: bool = False
    """This state was saved before the evaluation at its step."""
    best: float | None = None
    """Best value of the task's best_metric so far."""
    best_step: int = 0
    best_loss: float = 0.0
    """Of the same evaluation; 0 where it has none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last evaluation; a checkpoint's manifest holds it."""
    metrics_step: int | None = None
    rank_state: dict[str, Tensor] = field(default_factory=dict)
    """The task's `rank_state` for all rows of the global batch; current at a save."""
    controllers: dict[str, Controller] = field(default_factory=dict)
    """By their names in the config."""
    groups: tuple[str, ...] = ()
    """The optimizer's groups in words: what is trained, at which share of the rate."""
    frozen: Frozen | None = None
    """Now."""
    thawed: bool = False
    """What was frozen is trained since a step of this run."""

    def gathered(self, task: Task) -> dict[str, Any]:
        """`state_dict`, complete on rank 0, which writes it: includes the state that each rank has.
        Collectives."""
        world = self.strategy.world
        self.meter.gather()
        check_extra_state(world, self.model, self.step)
        if rows := {name: value.cpu() for name, value in task.rank_state().items()}:
            ranks = from_all_ranks(world, rows)
            self.rank_state = {name: torch.cat([rank[name] for rank in ranks]) for name in rows}
        return self.state_dict()

    def scatter(self, task: Task, share: tuple[int, int]) -> None:
        """Restore the task's rows for this rank's share of the global batch."""
        device = self.strategy.world.device
        task.load_rank_state({name: rows[slice(*share)].to(device) for name, rows in self.rank_state.items()})

    def record_if_best(self, metrics: Mapping[str, float], name: str, higher_is_better: bool) -> bool:
        """Record the evaluation if its metric of this name is the best so far; returns whether it is. Of
        equal ones the best has the lower loss, else it is the later: few samples have few accuracies. NaN is
        worse than anything."""
        sign = 1 if higher_is_better else -1
        rank = _nan_is_least(sign * metrics[name]), _nan_is_least(-metrics.get("loss", 0.0))
        if self.best is not None and rank < (_nan_is_least(sign * self.best), _nan_is_least(-self.best_loss)):
            return False
        self.best, self.best_step, self.best_loss = metrics[name], self.step, metrics.get("loss", 0.0)
        return True

    def best_as(self, name: str) -> dict[str, float]:
        """The best value under the metric's name, and its step; empty before the first evaluation."""
        return {} if self.best is None else {name: self.best, "step": self.best_step}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only, so that it loads with ``weights_only=True``."""
        return {
            "model": self.strategy.whole(self.model.state_dict()),
            "optimizer": self.strategy.whole(self.optimizer.state_dict()),
            "optimizer_on_host": self._kept_on_host(),
            "groups": list(self.groups),
            "optimizer_parameters": self._optimizer_parameters(),
            "optimizer_class": type(self.optimizer).__name__,
            "scaler": self.scaler.state_dict(),
            "average": self.strategy.whole(self.average.state_dict()),
            "meter": self.meter.state_dict(),
            "step": self.step,
            "left_out": self.left_out,
            "left_out_in_a_row": self.left_out_in_a_row,
            "evaluation_due": self.evaluation_due,
            "best": self.best,
            "best_step": self.best_step,
            "best_loss": self.best_loss,
            "carried": self.rank_state,
            "controllers": {name: dict(one.state_dict()) for name, one in self.controllers.items()},
        }

    def thaw(self) -> None:
        """Train what was frozen: the strategy wraps the model again. Collectives."""
        assert self.frozen is not None
        self.frozen.thaw(self.model)
        self.frozen, self.thawed = None, True
        self.wrapped.zero_grad(set_to_none=True)
        self.wrapped = self.strategy.wrap(self.model)

    def _optimizer_parameters(self) -> list[str]:
        """By name, in the order in which the optimizer keeps their state."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [names[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]

    def _kept_on_host(self) -> list[str]:
        """The optimizer's numbers that are not on their parameter's device, by name."""
        every = ((p, name, kept) for p, slots in self.optimizer.state.items() for name, kept in slots.items())
        return sorted({n for p, n, kept in every if isinstance(kept, Tensor) and kept.device != p.device})

    def _load_optimizer(self, saved: Mapping[str, Any], beside: Sequence[str]) -> None:
        """All but the settings, which stay this run's: by them torch puts ``step`` where it is read."""
        own = ({k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups)
        groups = [{**there, **here} for there, here in zip(saved["param_groups"], own, strict=True)]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        of_parameters = {
            i: {name: part_of(value, parameters[i], self.strategy) for name, value in values.items()}
            for i, values in saved["state"].items()
        }
        self.optimizer.load_state_dict({"state": of_parameters, "param_groups": groups})
        # torch gives all but `step` the dtype and the device of the parameter: NAdam's product of momenta
        # would be rounded to bf16, and lie where each step has to wait for it
        for i, values in of_parameters.items():
            loaded = self.optimizer.state[parameters[i]]
            for name, value in values.items():
                if isinstance(value, Tensor) and name != "step":
                    device = torch.device("cpu") if name in beside else loaded[name].device
                    if (loaded[name].dtype, loaded[name].device) != (value.dtype, device):
                        loaded[name] = value.to(device)

    def _check_groups(self, state: Mapping[str, Any], where: str) -> None:
        """Raise UserError if a checkpoint's optimizer has other groups, or other parameters in them."""
        of_saved = (state["groups"], state["optimizer_parameters"])
        for saved, own in zip(of_saved, (self.groups, self._optimizer_parameters()), strict=True):
            if list(saved) == list(own):
                continue
            there = first_few([name for name in saved if name not in own], 3) or "none"
            here = first_few([name for name in own if name not in saved], 3) or "none"
            raise UserError(
                f"freeze, thaw, optim.groups, optim.layer_decay or train.weight_decay_on: {where} was saved"
                f" with another one, so that its optimizer has other groups of parameters ({there} only"
                f" there, {here} only here). Use the same, or start a new run."
            )

    def load_state_dict(self, state: Mapping[str, Any], where: str, ours: bool = True) -> None:
        """Restore a saved state. ``where`` names it in errors. ours: it is of this run; the controllers of
        another one have seen other evaluations.

        Learning rate, weight decay and other settings stay those of the config.
        Raises UserError if it belongs to another model or another kind of run.
        """
        check_fits(self.model, state["model"], where)
        load_model(self.model, state["model"], self.strategy)
        if bool(state["average"]) != self.average.copies:
            kept = "with averaged weights" if state["average"] else "without averaged weights"
            raise UserError(f"{where}: was saved {kept}; set ema.decay accordingly, or start a new run.")
        optimizer_class = type(self.optimizer).__name__
        if state["optimizer_class"] != optimizer_class:
            raise UserError(
                f"optim: {where} was saved with {state['optimizer_class']}, and this is {optimizer_class}."
                " Use the same optimizer, or start a new run."
            )
        if bool(state["scaler"]) != self.scaler.is_enabled():
            kept = "with" if state["scaler"] else "without"
            raise UserError(
                f"precision: {where} was saved {kept} fp16's gradient scaler; use the same precision, or"
                " start a new run."
            )
        self._check_groups(state, where)
        for own, saved in zip(self.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
            for name in _NEED_STATE:
                if own.get(name) and name in saved and not saved[name]:
                    raise UserError(
                        f"optim.{name}={own[name]}: {where} was saved with {saved[name]}, so without the"
                        " state that it needs. Use the same, or start a new run."
                    )
        self._load_optimizer(state["optimizer"], state["optimizer_on_host"])
        self.scaler.load_state_dict(state["scaler"])
        self.average.load_state_dict(state["average"])
        self.meter.load_state_dict(state["meter"])
        self.step, self.best, self.best_step = state["step"], state["best"], state["best_step"]
        self.schedule.at(self.step - 1)  # the rates of the last step, as in a run that was not killed
        self.best_loss = state["best_loss"]
        self.left_out, self.left_out_in_a_row = state["left_out"], state["left_out_in_a_row"]
        self.evaluation_due = state["evaluation_due"]
        self.rank_state = state["carried"]
        for name, controller in self.controllers.items() if ours else ():
            controller.load_state_dict(state["controllers"].get(name, {}))


def _nan_is_least(value: float) -> float:
    return -math.inf if math.isnan(value) else value
