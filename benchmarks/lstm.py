"""Tokens per second of ddptrain and of a hand-written loop that train the recipe lstm_text, on the CPU.

    python benchmarks/lstm.py                      # a Markdown table on stdout, in some 10 minutes
    python benchmarks/lstm.py --write README.md    # and between that file's lstm markers
    python benchmarks/lstm.py --rounds 1 --steps 10

Both train the same model on the same windows with the same optimizer, schedule, precision and seed; where
their first losses differ by more than 1e-5 this stops with an error. Short chunks of both take turns within
one process, A B, then B A, and a ratio is taken within one round, so what else the machine does hits both.

A step lasts from one call of the model to the next: all that a loop does in between, but no set-up, warm-up,
final evaluation or checkpoint.
"""

import argparse
import gc
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from common import Chunk, check_markers, compare, made_with, markers, publish, silent
from loops import LOG_EVERY, Watch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.tensorboard import SummaryWriter

from ddptrain.arguments import parse
from ddptrain.commands.setup import make_model, make_task
from ddptrain.compose import run_composed
from ddptrain.config.check import checked
from ddptrain.config.schema import Config
from ddptrain.data.corpus import StandardLibrary
from ddptrain.distributed.strategy import choose_strategy
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
from ddptrain.protocols import At, Batch, Loss, Report, Task
from ddptrain.recipes.recurrent import RecurrentModel
from ddptrain.recipes.text import State

NAME = "lstm"
"""Of the markers."""
THREADS = 2
WARMUP = 5
"""Steps at a chunk's beginning that are not timed."""


@dataclass(frozen=True, slots=True)
class Job:
    """What both loops are to train: the recipe's config, and its training text as bytes."""

    config: Config
    text: Tensor

    @property
    def tokens(self) -> int:
        """Of a step."""
        return int(self.config.train.batch_size * self.config.data["window"])


def main() -> None:
    arguments = _arguments()
    if arguments.write:
        check_markers(arguments.write, NAME)
    torch.set_num_threads(THREADS)
    rounds = arguments.rounds
    print(f"lstm: {rounds} rounds of {arguments.steps} steps", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder, silent(Path(folder)):
        job = _job(arguments.steps, Path(folder))
        results = measure(job, rounds)
    publish("\n".join([*_table(results, job), "", _note(job, rounds)]), NAME, arguments.write)


def measure(job: Job, rounds: int) -> dict[str, list[Chunk]]:
    """The chunks of each loop, one a round."""
    results: dict[str, list[Chunk]] = {name: [] for name in LOOPS}
    for number in range(rounds + 1):
        for name in reversed(LOOPS) if number % 2 else LOOPS:
            chunk = _chunk(name, job)
            results[name].append(chunk)
            compare(name, chunk, results[BASE][0])
    # the first round is not counted: in it things are imported and caches filled
    return {name: chunks[1:] for name, chunks in results.items()}


def by_hand(job: Job, folder: Path, watch: Watch) -> None:
    """The floor: what a careful user writes, and nothing else."""
    config, window = job.config, job.config.data["window"]
    torch.manual_seed(config.seed)
    settings: dict[str, Any] = {k: v for k, v in (config.model or {}).items() if k != "_target_"}
    model = RecurrentModel(vocabulary=256, **settings)
    model.train()
    optimizer, schedule = _optimizer(model, config)
    streams = _streams(job)
    writer = SummaryWriter(str(folder))
    state: State | None = None
    for step in range(config.train.steps or 0):
        tokens = streams[:, step * window : (step + 1) * window + 1].long()
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        watch.begin()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, state = model(inputs, state)
            loss = cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        watch.note(loss)
        state = {name: value.detach() for name, value in state.items()}
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_grad_norm_(model.parameters(), config.train.clip_norm or math.inf)
        optimizer.step()
        schedule.step()
        if (step + 1) % LOG_EVERY == 0:
            writer.add_scalar("train/loss", loss.item(), step + 1)
    writer.close()


def _optimizer(model: nn.Module, config: Config) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW that decays matrices only, under a linear warm-up and a cosine."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        lr=config.optim["lr"],
        betas=tuple(config.optim["betas"]),
        weight_decay=config.optim["weight_decay"],
        fused=True,
    )
    steps = config.train.steps or 0
    warmup = round(config.sched.warmup * steps)

    def share_of_peak(step: int) -> float:
        if step < warmup:
            return 0.01 + 0.99 * step / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (steps - warmup))

    return optimizer, LambdaLR(optimizer, share_of_peak)


def _streams(job: Job) -> Tensor:
    """uint8 (batch, tokens): the parts of the text that the rows read, as far as they get. Cut once, so that
    a step only slices them."""
    count, size = job.config.train.batch_size, len(job.text)
    length = (job.config.train.steps or 0) * job.config.data["window"] + 1
    origins = torch.arange(count) * size // count
    return job.text[(origins[:, None] + torch.arange(length)) % size]


def with_ddptrain(job: Job, folder: Path, watch: Watch) -> None:
    """The engine as the verb ``train`` sets it up, with all that a user leaves on."""
    config, world = job.config, World()
    inner, data = make_task(config)
    task = Watched(inner, watch)
    open_log(str(folder / "log.txt"), world.is_first)
    data.prepare(world, config.seed)
    plan = plan_run(config, data.train_size)
    strategy = choose_strategy(config.strategy, world)
    precision = choose_precision(config.precision, world.device)
    model = make_model(config, task, world.device)
    state = make_state(config, model, strategy, precision, world, plan.steps)
    board = TensorBoard(folder / "tensorboard", asdict(config))
    observers = Observers([Console(), Jsonl(folder / "metrics.jsonl"), board])
    checkpointer = Checkpointer(folder / "checkpoints", keep=1)
    Engine(task, data, world, strategy, precision, plan, checkpointer, observers).fit(state)


@final
class Watched(Task):
    """The recipe's own task, with each step's beginning noted. Its evaluation, which is not timed, is left
    empty to save the time."""

    best_metric = "loss"
    higher_is_better = False

    def __init__(self, task: Task, watch: Watch) -> None:
        self._task = task
        self._watch = watch

    def build(self) -> nn.Module:
        return self._task.build()

    def loss(self, model: nn.Module, batch: Batch, at: At) -> Loss:
        self._watch.begin()
        loss = self._task.loss(model, batch, at)
        assert isinstance(loss.count, int)
        self._watch.note(loss.sum, loss.count)
        return loss

    def carried(self) -> Mapping[str, Tensor]:
        return self._task.carried()

    def carry_on(self, rows: Mapping[str, Tensor]) -> None:
        self._task.carry_on(rows)

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        return {}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        return Report({"loss": 0.0})


class Loop(NamedTuple):
    title: str
    train: Callable[[Job, Path, Watch], None]


LOOPS = {
    "hand": Loop("hand-written loop", by_hand),
    "ddptrain": Loop("**ddptrain**", with_ddptrain),
}
BASE = "hand"
"""The loop that the other is compared with."""


def _job(steps: int, folder: Path) -> Job:
    """A chunk: warm-up, so many measured steps, and one that ends the last of them."""
    total = WARMUP + steps + 1
    words = ["recipe=lstm_text", f"train.steps={total}", f"train.eval_every={total}"]
    words += [f"checkpoint.every={total}", f"log.every={LOG_EVERY}"]
    found: list[Config] = []
    run_composed(parse(words), lambda tree, overrides: found.append(checked(tree)))
    found[0].data["root"] = str(folder)
    documents = StandardLibrary().corpus().train
    text = bytearray(b"".join(block for document in documents for block in document.blocks()))
    return Job(found[0], torch.frombuffer(text, dtype=torch.uint8))


def _chunk(name: str, job: Job) -> Chunk:
    watch = Watch()
    gc.collect()  # so that none pays for what the other one left
    with tempfile.TemporaryDirectory() as folder:  # of each chunk, for checkpoints are large
        LOOPS[name].train(job, Path(folder), watch)
    if torch.get_num_threads() != THREADS:
        raise SystemExit(f"{name} changed the number of threads to {torch.get_num_threads()}")
    if len(watch.begins) != job.config.train.steps:
        raise SystemExit(f"{name} took {len(watch.begins)} steps, not {job.config.train.steps}")
    steps = [(stop - start) / 1e9 for start, stop in pairwise(watch.begins[WARMUP:])]
    return Chunk(statistics.fmean(steps), [float(loss) for loss in watch.losses])


Results = Mapping[str, Sequence[Chunk]]
"""Of each loop: its chunks, one a round."""


def _table(results: Results, job: Job) -> list[str]:
    return [
        "| | tokens/s | speed beside the hand-written loop: median | least | most |",
        "|---|---:|---:|---:|---:|",
        *(_row(name, chunks, results[BASE], job) for name, chunks in results.items()),
    ]


def _row(name: str, chunks: Sequence[Chunk], base: Sequence[Chunk], job: Job) -> str:
    speed = statistics.median(job.tokens / chunk.seconds for chunk in chunks)
    if name == BASE:
        return f"| {LOOPS[name].title} | {speed:,.0f} | 1 | | |"
    ratios = [theirs.seconds / own.seconds for own, theirs in zip(chunks, base, strict=True)]
    ratio = f"**{statistics.median(ratios):.3f}** | {min(ratios):.3f} | {max(ratios):.3f}"
    return f"| {LOOPS[name].title} | {speed:,.0f} | {ratio} |"


def _note(job: Job, rounds: int) -> str:
    train = job.config.train
    steps = (train.steps or 0) - WARMUP - 1
    return (
        f"The recipe `lstm_text`, {train.batch_size} windows of {job.config.data['window']} bytes a step,"
        f" {job.config.precision}; {rounds} round{'s' * (rounds > 1)} of {steps} steps in which both take"
        f" turns, {THREADS} threads. {made_with('torch', 'ddptrain')} Made by `python benchmarks/lstm.py`."
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=LOG_EVERY, help="timed ones of a chunk (%(default)s)")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help=f"put the table between its {' and '.join(markers(NAME))}"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
