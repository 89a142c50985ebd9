"""A long training holds no more memory at its end than soon after its beginning."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy import Classify, Fit, Vectors, with_noise

from ddptrain.api.observer import Log, Observer
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.observe.jsonl import Jsonl
from ddptrain.observe.tensorboard import TensorBoard

STEPS, SETTLED = 20_000, 6_000


class Memory(Observer):
    """Resident MiB and the number of Python's objects, at each log step."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[float, int]] = {}

    def log(self, event: Log) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.found[event.step] = (pages * 4096 / 2**20, len(gc.get_objects()))

    def start(self, event: Any) -> None: ...

    def evaluated(self, event: Any) -> None: ...

    def saved(self, event: Any) -> None: ...

    def end(self, event: Any) -> None: ...


class Forgetful(Vectors):
    """Keeps no list of what it was asked for."""

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Any]:
        for batch in super().train_batches(sampler, steps):
            self.asked.clear()
            yield batch


@pytest.mark.long
def test_memory_does_not_grow_over_twenty_thousand_steps(tmp_path: Path) -> None:
    plan = Plan(
        steps=STEPS, train_size=1000, batch_size=32, log_every=1000, eval_every=STEPS, save_every=5000,
        clip_norm=1.0,
    )  # fmt: skip
    memory = Memory()
    observers = [Jsonl(), TensorBoard(), memory]
    fit = Fit(plan, make_model=with_noise, observers=observers)
    fit.train(Classify(with_noise), Forgetful(1000), World(), tmp_path)
    (before, objects_before), (after, objects_after) = memory.found[SETTLED], memory.found[STEPS - 1000]
    assert after - before < 3, f"{before:.1f} MiB after {SETTLED} steps, {after:.1f} at the end"
    assert objects_after - objects_before < 500
