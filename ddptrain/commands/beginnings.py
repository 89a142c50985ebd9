"""How many steps trainings have in common. Asked by a sweep, in a process of its own, for it takes torch."""

import json
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddptrain.api.recipe import Data
from ddptrain.api.world import World
from ddptrain.config.instantiate import build, open_package
from ddptrain.config.schema import Sched
from ddptrain.engine.optimizer import arguments_of, build_optimizer, build_schedule
from ddptrain.engine.plan import steps_of
from ddptrain.errors import UserError

_VARIED = ("lr", "momentum", "betas")
"""Of an optimizer's group: what schedules change."""


def answer(file: str) -> None:
    """Read the question from standard input and write the answer to a file: what data and schedules print
    does not matter. `ddptrain.sweep.beginnings` asks."""
    asked = json.load(sys.stdin)
    for name in asked["packages"]:
        open_package(name)
    try:
        told = _answered(asked)
    except UserError as error:
        told = {"problem": str(error)}
    Path(file).write_text(json.dumps(told))


def _answered(asked: Mapping[str, Any]) -> dict[str, Any]:
    sets = [_looked_at(**one) for one in asked["data"]]
    known: dict[str, dict[str, Any]] = {}
    """Families that differ in their seed or data alone are alike."""
    families = []
    for family in asked["families"]:
        runs, place = family["runs"], family["data"]
        size: Any = None if place is None else sets[place]["size"]
        steps = [run["steps"] or steps_of(run["epochs"], size, run["batch_size"]) for run in runs]
        shapes = [(run["sched"], run["thaw"], length) for run, length in zip(runs, steps, strict=True)]
        key = json.dumps([family["optim"], shapes])
        if key not in known:
            seen = [_rates(family["optim"], Sched(**sched), thaw, length) for sched, thaw, length in shapes]
            known[key] = {"steps": steps, "common": common_steps(seen, steps)}
        families.append(known[key])
    return {"data": sets, "families": families}


def _looked_at(node: dict[str, Any], seed: int, counted: bool) -> dict[str, Any]:
    """The data of a config node; its training samples, if they are to be counted, which opens it."""
    data = build(node, "data")
    if not isinstance(data, Data):
        raise UserError(f"data._target_={node['_target_']}: must be a ddptrain.api.Data.")
    if counted:
        data.prepare(World(), seed)
    return {"size": data.train_size if counted else None, "reads_progress": data.reads_progress}


def _rates(optim: Mapping[str, Any], sched: Sched, thaw: float | None, steps: int) -> Iterator[object]:
    """What each step is done with, as far as the schedule and ``thaw`` decide: by torch's own schedulers, for
    each rate that a group may have by itself, and for all of them together."""
    peaks = [optim["lr"], *(optim["lr"] * group.get("lr", 1.0) for group in optim.get("groups") or [])]
    until = 0 if thaw is None else math.ceil(thaw * steps)
    alone = [_optimizer(optim, [peak]) for peak in sorted(set(peaks))]
    optimizers = alone if len(alone) == 1 else [*alone, _optimizer(optim, peaks)]
    schedules = [build_schedule(sched, optimizer, steps) for optimizer in optimizers]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for step in range(steps):
            yield step < until, *(str(group.get(name)) for group in groups for name in _VARIED)
            for schedule in schedules:
                schedule.step()


def _optimizer(optim: Mapping[str, Any], peaks: Sequence[float]) -> torch.optim.Optimizer:
    made = build_optimizer({**arguments_of(optim), "lr": peaks[0]}, nn.Linear(1, 1))
    for peak in peaks[1:]:
        made.add_param_group({"params": [nn.Parameter(torch.zeros(1, 1))], "lr": peak})
    return made


def common_steps(runs: Sequence[Iterator[object]], lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(i, j, steps) for all pairs of runs: up to the first step in which they differ, and before the last one
    of the shorter, which is also evaluated.

    All advance together, and one that differs from all others is not followed further.
    """
    found = []
    together, step = [list(range(len(runs)))], 0
    while together:
        still = []
        for group in together:
            parts: dict[object, list[int]] = defaultdict(list)
            for i in group:
                parts[("over", i) if step >= lengths[i] - 1 else next(runs[i])].append(i)
            for one, other in combinations(parts.values(), 2):
                found += [(i, j, step) for i in one for j in other]
            still += [part for part in parts.values() if len(part) > 1]
        together, step = still, step + 1
    return found
