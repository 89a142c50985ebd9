"""What throughput.py compares: one training, by hand and with ddptrain. The other peers are in peers.py.

Each takes a `Run` and does all of its steps, with a TensorBoard scalar every 50. `Run.loss` (or ddptrain's
`Measured.loss`) is called once a step, which is where steps are timed.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, final

import torch
import yaml
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter
from workloads import SEED, Batch, Rows, Workload

from ddptrain.api.observer import RunInfo
from ddptrain.api.recipe import Data, Loss, Progress, Report, Task
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.config.schema import Checkpoint, Config, LogSection, Train
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.loop import Engine
from ddptrain.engine.precision import choose_precision
from ddptrain.observe.console import Console, open_log
from ddptrain.observe.dispatch import Observers
from ddptrain.observe.jsonl import Jsonl
from ddptrain.observe.tensorboard import TensorBoard
from ddptrain.run.assemble import make_step, plan_run
from ddptrain.run.setup import make_model, make_strategy

AUTO: dict[str, Any] = yaml.safe_load(files("ddptrain.conf").joinpath("strategy/auto.yaml").read_text())
SGD: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}
LOG_EVERY = 50
BASE = "hand"
"""The peer that the others are compared with."""
COMPARED = 5
"""How many first losses are kept for comparison."""


class Watch:
    """Notes when each step begins, and the first losses."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.begins: list[int] = []
        """Nanoseconds."""
        self.losses: list[Tensor] = []

    def begin(self) -> None:
        self.begins.append(time.perf_counter_ns())

    def note(self, loss: Tensor, count: int = 1) -> None:
        if len(self.losses) < COMPARED:
            self.losses.append(loss.detach() / count)


@dataclass(frozen=True, slots=True)
class Run:
    """What one loop is to train, and where it may write.

    batch: samples of a step over all ranks. Iterating gives this rank's batches. tuned: with all that one
    would do by hand for speed (a fused optimizer, convolutions in channels_last, batches cut from memory), or
    as torch does it where nothing is said, from a DataLoader that fetches a batch at once. precision: fp32 or
    bf16. compile: off, or a mode of torch.compile.
    """

    workload: Workload
    world: World
    batch: int
    steps: int
    folder: Path
    watch: Watch
    tuned: bool = True
    precision: str = "fp32"
    compile: str = "off"

    def model(self) -> nn.Module:
        torch.manual_seed(SEED)
        model = self.workload.build().to(self.world.device)
        if self.workload.channels_last and self.tuned:
            model = model.to(memory_format=torch.channels_last)
        if self.compile != "off":
            model.compile(mode=self.compile)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), fused=True if self.tuned else None, **SGD)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.watch.begin()
        if self.precision == "bf16":
            with torch.autocast(self.world.device.type, torch.bfloat16):
                total, count = self.workload.loss(model, batch)
        else:
            total, count = self.workload.loss(model, batch)
        loss = total / count
        self.watch.note(loss)
        return loss

    def __iter__(self) -> Iterator[Batch]:
        rows, world = self.workload.rows, self.world
        sampler = Sampler(rows.train_size, self.batch, SEED, world.rank, world.size)
        if self.tuned:
            return rows.train_batches(sampler, range(self.steps))
        ids = _Ids(sampler, self.steps)  # a tensor is as good as torch's list of numbers
        return iter(DataLoader(_Plain(rows), batch_sampler=ids, collate_fn=_as_is))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.steps


@final
class _Plain(Dataset[Any]):
    """The rows, in the memory format that torch gives them."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __getitems__(self, ids: Tensor) -> Batch:
        inputs, labels = self._rows.batch(ids)
        return inputs.contiguous(), labels


@final
class _Ids(torch.utils.data.Sampler[Tensor]):
    def __init__(self, sampler: Sampler, steps: int) -> None:
        self._sampler = sampler
        self._steps = steps

    def __iter__(self) -> Iterator[Tensor]:
        for ids, _ in self._sampler.samples(range(self._steps), torch.device("cpu")):
            yield ids

    def __len__(self) -> int:
        return self._steps


def _as_is(batch: Batch) -> Batch:
    return batch


def by_hand(run: Run) -> None:
    """The floor: what a careful user writes, and nothing else."""
    model = bare = run.model()
    if run.world.size > 1:
        model = DistributedDataParallel(bare, gradient_as_bucket_view=run.tuned)
    model.train()
    optimizer = run.optimizer(bare)
    writer = SummaryWriter(str(run.folder)) if run.world.is_first else None
    for step, batch in enumerate(run, start=1):
        loss = run.loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % LOG_EVERY == 0 and writer is not None:
            writer.add_scalar("train/loss", loss.item(), step)
    if writer is not None:
        writer.close()


def with_ddptrain(run: Run) -> None:
    """ddptrain's engine."""
    config = Config(
        recipe="throughput",
        task={},
        data={},
        optim={"_target_": "torch.optim.SGD", **SGD},
        strategy=AUTO,
        sched={"_target_": "ddptrain.engine.lr_schedules.constant"},
        train=Train(batch_size=run.batch, steps=run.steps, eval_every=run.steps),
        checkpoint=Checkpoint(every=run.steps),
        log=LogSection(every=LOG_EVERY),
        seed=SEED,
        precision=run.precision,
        compile=run.compile,
        channels_last=run.workload.channels_last,
    )
    fit(config, Measured(run), run.workload.data, run.folder, run.world)


def fit(config: Config, task: Task, data: Data, folder: Path, world: World = World()) -> None:  # noqa: B008
    """The engine as the verb ``train`` sets it up, with all that a user leaves on."""
    open_log(str(folder / "log.txt"), world.is_first)
    plan = plan_run(config, data)
    strategy = make_strategy(config.strategy, world)
    precision = choose_precision(config.precision, world.device)
    model = make_model(config, task, world.device)
    step = make_step(config, task, model, strategy, precision, plan, Watchdog(world))
    observers = Observers([Console(), Jsonl(), TensorBoard()] if world.is_first else [])
    checkpointer = Checkpointer(folder / "checkpoints", keep=1)
    Engine(data, step, checkpointer, observers).fit(RunInfo(folder, asdict(config), world))


@final
class Measured(Task):
    """The peers' loss, as a sum and a count."""

    best_metric = "accuracy"
    higher_is_better = True

    def __init__(self, run: Run) -> None:
        self._workload = run.workload
        self._watch = run.watch

    def build(self) -> nn.Module:
        return self._workload.build()

    def loss(self, model: nn.Module, batch: Batch, progress: Progress) -> Loss:
        if progress.step == 0:
            self._watch.restart()  # the engine warms up with the first step
        self._watch.begin()
        total, count = self._workload.loss(model, batch)
        self._watch.note(total, count)
        return Loss(total, count)

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        inputs, labels = batch
        right = model(inputs).argmax(dim=-1) == labels
        return {"right": right.sum(), "all": torch.tensor(labels.numel())}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        return Report({"accuracy": int(sums["right"]) / int(sums["all"])})
