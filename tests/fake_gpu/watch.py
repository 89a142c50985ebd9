"""Looks at each of the engine's steps on a fake GPU: fails where one waits, takes memory or copies slowly."""

import ctypes
import functools
from typing import Any, NamedTuple

import emulate
import torch

SETTLED = 3
"""Steps of a training before the host may not wait any more."""
DDP_TIMES = 12
"""In its first steps, and then in each hundredth, DistributedDataParallel waits for events to time itself.
When it stops, more memory is in use at once."""
ENOUGH = 20
"""Steady steps in which a loader's thread that pins a new block in each would show."""


class Counts(NamedTuple):
    """Calls of the CUDA runtime, in runtime.cpp's order."""

    launches: int
    mallocs: int
    host_allocs: int
    """By the training's own thread."""
    all_host_allocs: int
    syncs: int
    to_device: int
    to_host: int
    pageable: int
    event_waits: int

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def counts() -> Counts:
    found = (ctypes.c_ulonglong * len(Counts._fields))()
    ctypes.CDLL(None).fake_gpu_counts(found)
    return Counts(*found)


class Step(NamedTuple):
    whole: Counts
    model: int
    """Launches of the task's loss and of its backward pass."""

    @property
    def others(self) -> int:
        return self.whole.launches - self.model


steps: list[Step] = []
"""Of the training that runs, or ran last."""
strict = True
"""Whether to fail; else it only counts."""
memory = False
"""Whether to fail where a steady step takes memory: where batches have many sizes, each new one does."""
new_sizes = 0
"""Pinned blocks that steady steps may take: for more boxes than any batch before, one of twice the size; and
of several micro-batches more copies may be on their way than ever before, where the machine is busy."""
replays: list[int] = []
"""Launches of each replayed step: the graph, and seed and offset of each micro-batch that draws."""
_model = 0
_inside = False


def watch(loop: Any) -> None:
    """loop: the module ``ddptrain.engine.loop``, just imported."""
    engine = loop.Engine
    fit = engine.fit

    def watched(step: Any) -> Any:
        def call(self: Any, batches: Any, at: Any) -> None:
            global _model, _inside
            own = getattr(self, "_step", self)  # of a StepGraph, which calls it as well
            world = own.strategy.world
            if world.device.type != "cuda" or world.shares_device or _inside:  # gloo waits for its copies
                return step(self, batches, at)
            before, _model, captures = counts(), 0, list(getattr(self, "_captures", []))
            # to capture a step waits
            emulate.steady = strict and len(steps) >= SETTLED and (self is own or bool(captures))
            torch.cuda.set_sync_debug_mode("error" if emulate.steady and self is own else "default")
            _inside = True
            try:
                step(self, batches, at)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                emulate.steady = _inside = False
            if len(captures) == len(getattr(self, "_captures", [])):
                steps.append(Step(counts().since(before), _model))
            check_findings()
            return None

        return call

    def watched_fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.clear()
        replays.clear()
        for owner, name in ((self._step.task, "loss"), (self._step.precision, "backward")):
            if not hasattr(getattr(owner, name), "__wrapped__"):
                object.__setattr__(owner, name, _counted(getattr(owner, name)))
        report = fit(self, *args, **kwargs)
        check_steps(self._world.size)
        return report

    for kind in (loop.TrainStep, loop.StepGraph):
        kind.__call__ = watched(kind.__call__)
    replay = loop.StepGraph._replay

    def watched_replay(self: Any, *args: Any) -> None:
        before = counts()
        replay(self, *args)
        launches, most = counts().since(before).launches, 1 + 2 * len(self._step.micro_batches)
        assert launches <= most, f"{launches} launches in a replayed step"
        replays.append(launches)

    loop.StepGraph._replay = watched_replay
    engine.fit = watched_fit


def check_findings() -> None:
    found, emulate.findings[:] = list(dict.fromkeys(emulate.findings)), []
    assert not found or not strict, "the fake GPU has found:\n" + "\n".join(found)


def check_steps(world_size: int) -> None:
    """The second half of a training's steps, where there are enough of them."""
    late = [step.whole for step in steps[len(steps) // 2 :]] if strict and len(steps) >= 2 * SETTLED else []
    limits = {"syncs": 0, "pageable": 0}
    if world_size == 1 or len(steps) >= 2 * DDP_TIMES:
        limits["event_waits"] = 1  # for the outcome of the step before
        if memory:
            limits["mallocs"] = 0
            taken = sum(step.host_allocs for step in late)
            assert taken <= new_sizes, f"{taken} pinned blocks in {len(late)} steps, at most {new_sizes}"
        pinned = sum(step.all_host_allocs for step in late)
        # the thread that pins batches may, at any time, get some of them further ahead than ever before
        assert len(late) < ENOUGH or 2 * pinned <= len(late), f"{pinned} pinned blocks in {len(late)} steps"
    for what, most in limits.items():
        seen = [getattr(step, what) for step in late]
        assert all(number <= most for number in seen), f"{what} in steady steps: {seen}, at most {most}"


def _counted(function: Any) -> Any:
    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        global _model
        before = counts().launches
        try:
            return function(*args, **kwargs)
        finally:
            _model += counts().launches - before

    return counting
