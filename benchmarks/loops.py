"""The peers of throughput.py: one training, written four times.

Each takes a `Run` and does all of its steps, with a TensorBoard scalar every 50. `Run.loss` (or
ddptrain's `Classification.loss`) is called once a step, which is where steps are timed.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter
from workloads import SEED, Batch, Workload

from ddptrain.commands.setup import make_model
from ddptrain.config.schema import Checkpoint, Config, Log, Sched, Train
from ddptrain.data.sampler import Sampler
from ddptrain.distributed.choice import choose_strategy
from ddptrain.distributed.world import World
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.loop import Engine
from ddptrain.engine.plan import plan_run
from ddptrain.engine.precision import choose_precision
from ddptrain.engine.state import make_state
from ddptrain.observe.console import Console, open_log
from ddptrain.observe.jsonl import Jsonl
from ddptrain.observe.observer import Observers
from ddptrain.observe.tensorboard import TensorBoard
from ddptrain.protocols import At, Loss, Report, Task

SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
LOG_EVERY = 50
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

    batch: samples of a step over all ranks. Iterating gives this rank's batches.
    """

    workload: Workload
    world: World
    batch: int
    steps: int
    folder: Path
    watch: Watch

    def model(self) -> nn.Module:
        torch.manual_seed(SEED)
        model = self.workload.build()
        return model.to(memory_format=torch.channels_last) if self.workload.channels_last else model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), fused=True, **SGD)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.watch.begin()
        inputs, labels = batch
        loss = cross_entropy(model(inputs), labels)
        self.watch.note(loss)
        return loss

    def __iter__(self) -> Iterator[Batch]:
        rows, world = self.workload.rows, self.world
        sampler = Sampler(rows.train_size, self.batch, SEED, world.rank, world.size)
        return rows.train_batches(sampler, range(self.steps))

    def __len__(self) -> int:
        return self.steps


def by_hand(run: Run) -> None:
    """The floor: what a careful user writes, and nothing else."""
    model = bare = run.model()
    if run.world.size > 1:
        model = DistributedDataParallel(bare, gradient_as_bucket_view=True)
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
    """The engine as the verb ``train`` sets it up, with all that a user leaves on."""
    config = Config(
        recipe="throughput",
        task={},
        data={},
        optim={"_target_": "torch.optim.SGD", **SGD},
        sched=Sched(name="constant"),
        train=Train(batch_size=run.batch, steps=run.steps, eval_every=run.steps),
        checkpoint=Checkpoint(every=run.steps),
        log=Log(every=LOG_EVERY),
        seed=SEED,
        precision="fp32",
        channels_last=run.workload.channels_last,
    )
    task, data, world = Classification(run), run.workload.data, run.world
    open_log(str(run.folder / "log.txt"), world.is_first)
    plan = plan_run(config, data.train_size)
    strategy = choose_strategy(config.strategy, world)
    precision = choose_precision(config.precision, world.device)
    model = make_model(config, task, world.device)
    state = make_state(config, model, strategy, precision, world, plan.steps)
    board = TensorBoard(run.folder / "tensorboard", asdict(config), run.folder / "metrics.jsonl")
    observers = [Console(), Jsonl(run.folder / "metrics.jsonl"), board] if world.is_first else []
    checkpointer = Checkpointer(run.folder / "checkpoints", keep=1)
    engine = Engine(task, data, world, strategy, precision, plan, checkpointer, Observers(observers))
    engine.fit(state)


def with_lightning(run: Run) -> None:
    """Without its progress bar, checkpoints and model summary."""
    import lightning
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning.pytorch.strategies import DDPStrategy

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = run.model()

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss = run.loss(self.net, batch)
            self.log("train/loss", loss, batch_size=len(batch[1]))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return run.optimizer(self.net)

    trainer = lightning.Trainer(
        max_steps=run.steps,
        accelerator="cpu",
        devices=run.world.size,
        strategy=DDPStrategy(process_group_backend="gloo") if run.world.size > 1 else "auto",
        logger=TensorBoardLogger(str(run.folder)),
        log_every_n_steps=LOG_EVERY,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=str(run.folder),
    )
    trainer.fit(Module(), run)


def with_accelerate(run: Run) -> None:
    """The loop of its quick tour. The batches are each rank's own already, so it gets none to share out."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(run.folder))
    accelerator.init_trackers("run")
    bare = run.model()
    model, optimizer = accelerator.prepare(bare, run.optimizer(bare))
    model.train()
    for step, batch in enumerate(run, start=1):
        optimizer.zero_grad()
        loss = run.loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        if step % LOG_EVERY == 0:
            accelerator.log({"train/loss": loss.item()}, step=step)
    for tracker in accelerator.trackers:
        tracker.finish()


@final
class Classification(Task):
    """The peers' loss, as a sum and a count."""

    best_metric = "accuracy"
    higher_is_better = True

    def __init__(self, run: Run) -> None:
        self._build = run.workload.build
        self._watch = run.watch

    def build(self) -> nn.Module:
        return self._build()

    def loss(self, model: nn.Module, batch: Batch, at: At) -> Loss:
        if at.step == 0:
            self._watch.restart()  # with several ranks, the engine rehearses the first step
        self._watch.begin()
        inputs, labels = batch
        loss = cross_entropy(model(inputs), labels, reduction="sum")
        self._watch.note(loss, len(labels))
        return Loss(loss, len(labels))

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        inputs, labels = batch
        right = model(inputs).argmax(dim=1) == labels
        return {"right": right.sum(), "all": torch.tensor(len(labels))}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        return Report({"accuracy": int(sums["right"]) / int(sums["all"])})


class Peer(NamedTuple):
    title: str
    package: str
    train: Callable[[Run], None]


PEERS = {
    "hand": Peer("hand-written loop", "torch", by_hand),
    "ddptrain": Peer("**ddptrain**", "ddptrain", with_ddptrain),
    "lightning": Peer("Lightning", "lightning", with_lightning),
    "accelerate": Peer("Accelerate", "accelerate", with_accelerate),
}
BASE = "hand"
"""The peer that the others are compared with."""
