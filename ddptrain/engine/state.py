"""The state of a run at one step: what a checkpoint holds, how it is made and restored."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddptrain.api.controller import Controller
from ddptrain.api.recipe import Task
from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World
from ddptrain.config.schema import Config
from ddptrain.distributed.comm import from_all_ranks, to_first_rank
from ddptrain.distributed.foreach import mapped
from ddptrain.engine.check_model import check_model, check_sparse, sparse_layers
from ddptrain.engine.compiled import compile_model
from ddptrain.engine.ema import Average, ExponentialAverage, NoAverage
from ddptrain.engine.freeze import Frozen
from ddptrain.engine.meter import Meter
from ddptrain.engine.optimizer import build_optimizer, build_schedule, fast_forward
from ddptrain.engine.parameter_groups import parameter_groups
from ddptrain.engine.precision import Precision
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
    scheduler: LRScheduler
    scaler: torch.amp.GradScaler
    average: Average
    meter: Meter
    strategy: Strategy
    step: int = 0
    """Optimizer steps done, including those skipped because a number was not finite."""
    applied: int = 0
    """Steps that changed the weights and the schedule."""
    skipped: int = 0
    """Consecutive skipped steps, up to now."""
    evaluation_due: bool = False
    """This state was saved before the evaluation at its step."""
    best: float | None = None
    """Best value of the task's best_metric so far."""
    best_step: int = 0
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
    unsent: dict[str, Tensor] = field(default_factory=dict)
    """On rank 0, current at a save: what each rank has not sent yet of its gradients, stacked by rank."""

    def gathered(self, task: Task, world: World) -> dict[str, Any]:
        """`state_dict`, complete on rank 0, which writes it: includes the state that each rank has.
        Collectives."""
        self.meter.gather()
        if rows := {name: value.cpu() for name, value in task.rank_state().items()}:
            ranks = from_all_ranks(world, rows)
            self.rank_state = {name: torch.cat([rank[name] for rank in ranks]) for name in rows}
        for name, value in self.strategy.rank_state().items():
            by_rank = to_first_rank(world, value)  # one at a time: all ranks' are many times the model
            if world.is_first:
                self.unsent[name] = torch.stack(by_rank)
        return self.state_dict()

    def scatter(self, task: Task, share: tuple[int, int], device: torch.device) -> None:
        """Restore the task's rows for this rank's share of the global batch."""
        task.load_rank_state({name: rows[slice(*share)].to(device) for name, rows in self.rank_state.items()})

    def improves(self, value: float, higher_is_better: bool) -> bool:
        """Record the value of the best_metric; returns whether it is the best so far. NaN is worse than
        anything."""
        known = self.best is not None and not math.isnan(self.best)
        sign = 1 if higher_is_better else -1
        if known and not sign * value > sign * (self.best or 0.0):
            return False
        self.best, self.best_step = value, self.step
        return True

    def best_as(self, name: str) -> dict[str, float]:
        """The best value under the metric's name, and its step; empty before the first evaluation."""
        return {} if self.best is None else {name: self.best, "step": self.best_step}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only, so that it loads with ``weights_only=True``."""
        return {
            "model": self.strategy.whole(self.model.state_dict()),
            "optimizer": self.strategy.whole(self.optimizer.state_dict()),
            "groups": list(self.groups),
            "optimizer_class": type(self.optimizer).__name__,
            "scaler": self.scaler.state_dict(),
            "average": self.strategy.whole(self.average.state_dict()),
            "meter": self.meter.state_dict(),
            "step": self.step,
            "applied": self.applied,
            "left_out": self.skipped,
            "evaluation_due": self.evaluation_due,
            "best": self.best,
            "best_step": self.best_step,
            "carried": self.rank_state,
            "unsent": self.unsent,
            "controllers": {name: dict(one.state_dict()) for name, one in self.controllers.items()},
        }

    def thaw(self) -> None:
        """Train what was frozen: the strategy wraps the model again. Collectives."""
        assert self.frozen is not None
        self.frozen.thaw(self.model)
        self.frozen = None
        self.wrapped.zero_grad(set_to_none=True)
        unsent = self.strategy.rank_state()
        self.wrapped = self.strategy.wrap(self.model)
        if unsent:
            self.strategy.load_rank_state(unsent)

    def _load_model(self, saved: Mapping[str, Any]) -> None:
        own, parts = self.model.state_dict(), mapped(saved, lambda value: value)  # keeps modules' versions
        for name, value in saved.items():
            parts[name] = self._part(value, own[name])
        self.model.load_state_dict(parts)

    def _load_optimizer(self, saved: Mapping[str, Any]) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        of_parameters = {
            i: {name: self._part(value, parameters[i]) for name, value in values.items()}
            for i, values in saved["state"].items()
        }
        self.optimizer.load_state_dict({**saved, "state": of_parameters})

    def _part(self, value: Any, like: Any) -> Any:
        """An optimizer's state has tensors of its parameter's shape and others, which all ranks keep."""
        is_spread = isinstance(value, Tensor) and value.shape == like.shape
        return self.strategy.part(value, like) if is_spread else value

    def _check_groups(self, saved: Sequence[str], where: str) -> None:
        """Raise UserError if a checkpoint's optimizer has other groups than this one."""
        if len(saved) != len(self.groups) or set(saved) != set(self.groups):
            there = first_few([name for name in saved if name not in self.groups], 3)
            here = first_few([name for name in self.groups if name not in saved], 3)
            raise UserError(
                f"freeze, thaw, optim.groups, optim.layer_decay or train.weight_decay_on: {where} was saved"
                f" with another one, so that its optimizer has other groups of parameters ({there or 'none'}"
                f" only there, {here or 'none'} only here). Use the same, or start a new run."
            )

    def load_state_dict(self, state: Mapping[str, Any], where: str) -> None:
        """Restore a saved state. ``where`` names it in errors.

        Learning rate, weight decay and other settings stay those of the config; the schedule is advanced.
        Raises UserError if it belongs to another model or another kind of run.
        """
        check_fits(self.model, state["model"], where)
        self._load_model(state["model"])
        if bool(state["average"]) != bool(self.average.state_dict()):
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
        self._check_groups(state.get("groups", self.groups), where)  # absent from earlier checkpoints
        for own, saved in zip(self.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
            for name in _NEED_STATE:
                if own.get(name) and name in saved and not saved[name]:
                    raise UserError(
                        f"optim.{name}={own[name]}: {where} was saved with {saved[name]}, so without the"
                        " state that it needs. Use the same, or start a new run."
                    )
        settings = [
            {k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups
        ]
        self._load_optimizer(state["optimizer"])
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        fast_forward(self.scheduler, state["applied"])
        self.scaler.load_state_dict(state["scaler"])
        self.average.load_state_dict(state["average"])
        self.meter.load_state_dict(state["meter"])
        self.step, self.best, self.best_step = state["step"], state["best"], state["best_step"]
        self.applied, self.skipped = state["applied"], state["left_out"]
        self.evaluation_due = state["evaluation_due"]
        self.rank_state = state["carried"]
        for name, controller in self.controllers.items():
            controller.load_state_dict(state.get("controllers", {}).get(name, {}))
        self.strategy.scatter(state.get("unsent", {}))  # absent from earlier checkpoints


def make_state(
    config: Config,
    model: nn.Module,
    strategy: Strategy,
    precision: Precision,
    steps: int,
    frozen: Frozen | None = None,
) -> TrainState:
    """Step 0 of a run of so many steps: optimizer, schedule and average around a model on its device.

    Compiles and wraps the model. The optimizer has what is frozen, if it is trained later.
    """
    check_model(model)
    if config.compile not in ("off", "step"):
        compile_model(model, config.compile)
    wrapped = strategy.wrap(model)
    sparse = sparse_layers(model)
    decays_on = config.train.weight_decay_on
    with frozen.at_the_end(model) if frozen is not None else nullcontext():
        optimizer = build_optimizer(config.optim, model, decays_on, bool(sparse), strategy.sharded)
        groups = tuple(map(str, parameter_groups(model, config.optim, decays_on)))
    check_sparse(sparse, optimizer, strategy)
    average: Average = NoAverage()
    if config.ema.decay is not None:
        average = ExponentialAverage(model, config.ema.decay, strategy)
    return TrainState(
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        scheduler=build_schedule(config.sched, optimizer, steps),
        scaler=precision.scaler,
        average=average,
        meter=Meter(strategy.world, strategy.shards, finite_only=config.train.nonfinite == "skip"),
        strategy=strategy,
        groups=groups,
        frozen=frozen,
    )


def fit_model(model: nn.Module, weights: Mapping[str, Any], where: str) -> None:
    """Load weights into a model, or raise UserError that says how the two differ."""
    check_fits(model, weights, where)
    model.load_state_dict(weights)


def check_fits(model: nn.Module, weights: Mapping[str, Any], where: str) -> None:
    """Raise UserError that says how weights and a model differ."""
    own = model.state_dict()
    for name in [*own, *weights]:
        ours, theirs = (_shape(state[name]) if name in state else "absent" for state in (own, weights))
        if ours != theirs:
            raise UserError(
                f"{where}: is of another model: {name} is {theirs} there and {ours} here."
                " Use the recipe and model it was trained with."
            )


def _shape(value: object) -> str:
    """Of a tensor; what else a state_dict may hold (get_extra_state) has none."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else "no tensor"
