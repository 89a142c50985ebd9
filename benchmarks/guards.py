"""What the guards, the clocks or the log lines cost: one engine with them and one without, in turns, on a
step of about a millisecond.

    python benchmarks/guards.py [--of=guards|timing|logging] [--ranks=2] [--rounds=60] [--width=160]

guards: flags in the all-reduce, the look at every gradient, the watchdog's marks and its threads. timing: the
marks by which a step's time is split. Without: each of these replaced by nothing. logging: the loss and four
more scalars added up and logged (terminal, metrics.jsonl, TensorBoard) in every step; without: in none. Both
train the same; their last losses are compared. --width: of the layers, for longer steps.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from common import at_least_one
from loops import AUTO
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddptrain.api.observer import Observer, RunInfo
from ddptrain.api.recipe import Data, Loss, Progress, Report, Task
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.config.schema import Config
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.health import Checked, Health, Outcome
from ddptrain.engine.loop import Engine
from ddptrain.engine.phases import Phases
from ddptrain.engine.plan import Plan
from ddptrain.engine.precision import Precision
from ddptrain.engine.step import TrainStep
from ddptrain.engine.stopwatch import Stopwatch
from ddptrain.observe.console import Console, open_log
from ddptrain.observe.dispatch import Observers
from ddptrain.observe.jsonl import Jsonl
from ddptrain.observe.tensorboard import TensorBoard
from ddptrain.run.assemble import make_state
from ddptrain.run.setup import make_strategy
from ddptrain.testing import run_ranks

STEPS, WARMUP = 600, 30
BATCH = 256
ZERO = torch.zeros(())


@final
class Rows(Data):
    """The same rows again and again."""

    def __init__(self, rows: int) -> None:
        self._batch = torch.randn(rows, 32), torch.randint(10, (rows,))

    def prepare(self, world: World, seed: int) -> None: ...

    @property
    def train_size(self) -> int:
        return 100_000

    @property
    def valid_size(self) -> int:
        return 1

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Any]:
        while True:
            yield self._batch

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Any]:
        return iter([self._batch] * len(chunks))

    def preview(self) -> None:
        return None

    def describe(self) -> str:
        return "rows"


@final
class Timed(Task):
    """Notes when each step's forward pass begins."""

    best_metric, higher_is_better = "loss", False

    def __init__(self, width: int, scalars: Sequence[str] = ()) -> None:
        self._width = width
        self._scalars = scalars
        self.begins: list[int] = []
        self.worked: list[int] = []
        """Nanoseconds of this thread on a core, at each."""
        self.last = torch.zeros(())

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        width = self._width
        return nn.Sequential(
            nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def loss(self, model: nn.Module, batch: Any, progress: Progress) -> Loss:
        self.begins.append(time.perf_counter_ns())
        self.worked.append(time.thread_time_ns())
        inputs, labels = batch
        self.last = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        return Loss(self.last, len(labels), dict.fromkeys(self._scalars, self.last))

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        return {"loss": torch.zeros((), dtype=torch.float64)}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        return Report({"loss": 0.0})


class _NoHealth(Health):
    """Sees nothing: every step is fine."""

    def send(self, step: int, stop: bool, loss: Loss, ends_shard: bool) -> None:
        return None

    def check(self, step: int) -> Checked:
        return Checked(ZERO, ZERO, True, None)

    def expect(self, step: int, stop: bool, checked: Checked) -> None:
        self._pending.append(step)  # type: ignore[arg-type]

    def all(self) -> list[Outcome]:
        steps, self._pending = self._pending, []
        return [Outcome(step, True, True, False) for step in steps]  # type: ignore[arg-type]


class _NoStopwatch(Stopwatch):
    """Looks at no clock."""

    def begin(self, flops: float, peak: float) -> None: ...

    def end(self, phase: str) -> None: ...

    def mark(self, phase: str) -> None: ...


class _NoWatchdog(Watchdog):
    def mark(
        self, what: str, step: int | None = None, patience: float | None = None, writes: bool = False
    ) -> None:
        return None


@dataclass(frozen=True)
class Setting:
    guarded: bool
    timed: bool
    logged: bool
    width: int


@dataclass(frozen=True)
class Chunk:
    """Seconds of a step: the median of this chunk's on the clock, and the mean of the training thread's on a
    core."""

    seconds: float
    worked: float
    last_loss: float


def chunk(world: World, setting: Setting, folder: Path) -> Chunk:
    guarded = setting.guarded
    torch.manual_seed(world.rank)
    plan = Plan(
        steps=STEPS, train_size=100_000, batch_size=BATCH * world.size, log_every=1 if setting.logged else 50,
        eval_every=STEPS, save_every=STEPS,
    )  # fmt: skip
    config = Config(
        recipe="guards", task={}, data={}, sched={"_target_": "ddptrain.engine.lr_schedules.constant"},
        optim={"_target_": "torch.optim.SGD", "lr": 1e-3, "momentum": 0.9},
    )  # fmt: skip
    task, data = Timed(setting.width, ("one", "two", "three", "four") if setting.logged else ()), Rows(BATCH)
    precision = Precision("fp32", world.device)
    strategy = make_strategy(AUTO, world)
    state = make_state(config, task.build(), strategy, precision, STEPS)
    if not guarded and isinstance(state.wrapped, DistributedDataParallel):
        state.wrapped = DistributedDataParallel(state.model, gradient_as_bucket_view=True)
    watchdog = Watchdog(world, hang_timeout=300.0) if guarded else _NoWatchdog(world)
    stopwatch = (Stopwatch if setting.timed else _NoStopwatch)(world.device)
    step = TrainStep(task, precision, plan, state, Phases(watchdog, stopwatch))
    if not guarded:
        step._health = _NoHealth(state.model, state.wrapped, strategy, ends_run=True)
    observers: list[Observer] = []
    if setting.logged and world.is_first:
        folder.mkdir()
        open_log(str(folder / "log.txt"), first=True)
        observers = [Console(), Jsonl(), TensorBoard()]
    engine = Engine(data, step, Checkpointer(folder, keep=1), Observers(observers))
    # straight to the batches: what comes before the first step is no part of one
    opened = data.train_batches(plan.sampler(world), range(STEPS))
    if not guarded:
        engine._opened = lambda run: opened  # type: ignore[method-assign]
    with watchdog.watching() if guarded else contextlib.nullcontext():
        engine.fit(RunInfo(folder, asdict(config), world))
    gaps = [b - a for a, b in zip(task.begins[WARMUP:], task.begins[WARMUP + 1 :], strict=False)]
    worked = (task.worked[-1] - task.worked[WARMUP]) / len(gaps)
    return Chunk(statistics.median(gaps) / 1e9, worked / 1e9, float(task.last.detach()))


def rounds(world: World, count: int, of: str, width: int) -> list[tuple[Chunk, Chunk]]:
    """(with, without) of each round, whose turns alternate."""
    settings = {
        True: Setting(guarded=True, timed=True, logged=of == "logging", width=width),
        False: Setting(guarded=of != "guards", timed=of != "timing", logged=False, width=width),
    }
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(count):
            order = [True, False] if turn % 2 else [False, True]
            taken = {
                which: chunk(world, settings[which], Path(folder) / f"{turn}-{which}") for which in order
            }
            assert taken[True].last_loss == taken[False].last_loss, "both train the same"
            pairs.append((taken[True], taken[False]))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=at_least_one, default=60)
    parser.add_argument("--of", choices=["guards", "timing", "logging"], default="guards")
    parser.add_argument("--width", type=int, default=160)
    arguments = parser.parse_args()
    pairs = run_ranks(
        lambda world: rounds(world, arguments.rounds, arguments.of, arguments.width),
        arguments.ranks,
        timeout=3000,
    )[0]
    ratios = sorted(whole.seconds / bare.seconds for whole, bare in pairs)
    extra = statistics.median((whole.seconds - bare.seconds) * 1e6 for whole, bare in pairs)
    worked = statistics.median((whole.worked - bare.worked) * 1e6 for whole, bare in pairs)
    step = statistics.median(bare.seconds for _, bare in pairs)
    print(
        f"{arguments.ranks} rank(s), {len(pairs)} rounds: a step takes {step * 1e3:.3f} ms without the"
        f" {arguments.of}, and {extra:.1f} us more with it: ratio {statistics.median(ratios):.3f}"
        f" (quartiles {ratios[len(ratios) // 4]:.3f} to {ratios[3 * len(ratios) // 4]:.3f});"
        f" the training thread works {worked:.1f} us more"
    )


if __name__ == "__main__":
    main()
