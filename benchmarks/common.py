"""What the benchmarks share: chunks that are compared, and tables that say where they were made; for those of
a recipe's training also taking turns, and the optimizer of a hand-written loop."""

import argparse
import contextlib
import gc
import math
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from loops import BASE, COMPARED, LOG_EVERY, Watch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ddptrain.api.recipe import Batch, Loss, Progress, Report, Task
from ddptrain.config.check import checked
from ddptrain.config.compose import composed_tree
from ddptrain.config.schema import Config
from ddptrain.distributed.cpu import cores
from ddptrain.run.optimizer import arguments_of
from ddptrain.verbs.argv import parse

TOLERANCE = 1e-5
"""How well first losses must agree (relative)."""
THREADS = min(2, cores())
"""Of a recipe's training."""
WARMUP = 5
"""Steps at the beginning of its chunks that are not timed."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One peer's turn."""

    seconds: float
    """Of a step."""
    losses: list[float]
    """The first ones."""
    waited: float = 0.0
    """Of a step's seconds, those in which it waits for data, where that is noted."""


def compare(name: str, chunk: Chunk, reference: Chunk, spared: int = 0) -> None:
    """Stop where two peers do not train the same: where more than ``spared`` of their losses differ."""
    pairs = list(zip(chunk.losses, reference.losses, strict=True))
    apart = [i for i, (own, other) in enumerate(pairs) if not abs(own - other) <= TOLERANCE * abs(other)]
    if len(apart) > spared:
        step, (own, other) = apart[0] + 1, pairs[apart[0]]
        raise SystemExit(
            f"{name} trains something else: its loss in step {step} is {own!r}, another peer's {other!r}"
        )


@contextlib.contextmanager
def silent(folder: Path) -> Iterator[None]:
    """What the peers print goes to a file, at about the cost of a terminal."""
    warnings.simplefilter("ignore")
    with (folder / "printed.txt").open("w") as file:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            yield


def markers(name: str) -> tuple[str, str]:
    """The lines of a Markdown file between which a table belongs."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def check_markers(file: Path, name: str) -> None:
    """Stop where the table would have no place."""
    (begin, end), text = markers(name), file.read_text()
    if not (text.count(begin) == text.count(end) == 1 and text.index(begin) < text.index(end)):
        raise SystemExit(f"{file}: holds no lines {begin} and {end} to write between")


def publish(table: str, name: str, file: Path | None) -> None:
    """Print a table, and put it between a file's markers."""
    print(table)
    if file is not None:
        begin, end = markers(name)
        before, rest = file.read_text().split(begin)
        file.write_text(f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}")


def made_with(*packages: str) -> str:
    """The machine, the versions and the day, without which no figure means anything."""
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in packages)
    count = f"{cores()} core{'s' * (cores() > 1)}"
    day = time.strftime("%Y-%m-%d")
    return f"{_processor()}, {count}; Python {platform.python_version()}, {versions}; {day}."


def compute_alone_on(cores: int) -> None:
    """Keep this process, and so those it starts, on the last so many cores that it may use; one thread."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])


def table_parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """For the command line of a benchmark. doc: of its module. name: of its markers, which are looked for
    before it measures."""

    def page(text: str) -> Path:
        check_markers(Path(text), name)
        return Path(text)

    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument(
        "--write", type=page, metavar="FILE", help=f"put the table between its {' and '.join(markers(name))}"
    )
    return parser


def rounds_parser(doc: str | None, name: str, rounds: int) -> argparse.ArgumentParser:
    """As `table_parser`, with the number of rounds. rounds: by default."""
    parser = table_parser(doc, name)
    parser.add_argument("--rounds", type=at_least_one, default=rounds, help="(%(default)s)")
    return parser


def at_least_one(text: str) -> int:
    """The type of an argument."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return number


def turns_asked(doc: str | None, name: str, rounds: int = 10) -> argparse.Namespace:
    """The command line of a benchmark of a recipe's training."""
    parser = rounds_parser(doc, name, rounds)
    parser.add_argument("--steps", type=int, default=LOG_EVERY, help="timed ones of a chunk (%(default)s)")
    return parser.parse_args()


class Loop(NamedTuple):
    """A way to train a recipe. train: takes the job, an empty folder and the watch."""

    title: str
    train: Callable[[Any, Path, "DataWatch"], None]


@final
class DataWatch(Watch):
    """Notes how long each batch is waited for, too. compared: how many first losses are kept."""

    def __init__(self, compared: int) -> None:
        super().__init__()
        self._compared = compared
        self.waits: list[int] = []
        """Nanoseconds."""

    def note(self, loss: Tensor, count: int | Tensor = 1) -> None:
        if len(self.losses) < self._compared:
            self.losses.append(loss.detach() / count)

    def batches(self, upcoming: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches."""
        asked = time.perf_counter_ns()
        for batch in upcoming:
            self.waits.append(time.perf_counter_ns() - asked)
            yield batch
            asked = time.perf_counter_ns()


Results = Mapping[str, Sequence[Chunk]]
"""Of each loop: its chunks, one a round."""


def chunk_config(recipe: str, steps: int, *changes: str) -> Config:
    """A recipe's config for a chunk: warm-up, so many measured steps, and one that ends the last of them."""
    total = WARMUP + steps + 1
    words = [f"recipe={recipe}", f"train.steps={total}", f"train.eval_every={total}"]
    words += [f"checkpoint.every={total}", f"log.every={LOG_EVERY}", *changes]
    return composed(words)


def composed(words: Sequence[str]) -> Config:
    """The config that a command line asks for."""
    composed = composed_tree(parse(words))
    assert composed is not None
    return checked(composed[0])


def take_turns(
    loops: dict[str, Loop], job: Any, steps: int, rounds: int, compared: int = COMPARED
) -> Results:
    """The chunks of each loop, one a round, each of so many steps in all.

    compared: first losses that must agree. Of ten or more, one in ten may differ: among equals an assigner
    chooses by rounding.
    """
    results: dict[str, list[Chunk]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        for name in reversed(loops) if number % 2 else loops:
            chunk = _chunk(name, loops[name], job, steps, compared)
            results[name].append(chunk)
            compare(name, chunk, results[BASE][0], spared=compared // 10)
    # the first round is not counted: in it things are imported and caches filled
    return {name: chunks[1:] for name, chunks in results.items()}


def _chunk(name: str, loop: Loop, job: Any, steps: int, compared: int) -> Chunk:
    watch = DataWatch(compared)
    gc.collect()  # so that none pays for what the other one left
    with tempfile.TemporaryDirectory() as folder:  # of each chunk, for checkpoints are large
        loop.train(job, Path(folder), watch)
    if torch.get_num_threads() != THREADS:
        raise SystemExit(f"{name} changed the number of threads to {torch.get_num_threads()}")
    if len(watch.begins) != steps:
        raise SystemExit(f"{name} took {len(watch.begins)} steps, not {steps}")
    timed = [(stop - start) / 1e9 for start, stop in pairwise(watch.begins[WARMUP:])]
    waited = sum(watch.waits[WARMUP + 1 :]) / 1e9  # a step ends when the next one has got its batch
    losses = [float(loss) for loss in watch.losses]
    return Chunk(statistics.fmean(timed), losses, waited / len(timed))


@final
class Watched(Task):
    """A recipe's own task, with each step's beginning noted. Its evaluation, which is not timed, is left
    empty to save the time."""

    best_metric = "loss"
    higher_is_better = False

    def __init__(self, task: Task, watch: DataWatch) -> None:
        self._task = task
        self._watch = watch

    def build(self) -> nn.Module:
        return self._task.build()

    def loss(self, model: nn.Module, batch: Batch, progress: Progress) -> Loss:
        if progress.step == 0:
            self._watch.restart()  # the engine warms up with the first step
        self._watch.begin()
        loss = self._task.loss(model, batch, progress)
        self._watch.note(loss.sum, loss.count)
        return loss

    def rank_state(self) -> Mapping[str, Tensor]:
        return self._task.rank_state()

    def load_rank_state(self, rows: Mapping[str, Tensor]) -> None:
        self._task.load_rank_state(rows)

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        return {}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        return Report({"loss": 0.0})


def adamw(model: nn.Module, config: Config) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """By hand: AdamW that decays matrices only, under a linear warm-up and a cosine."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    settings = {name: value for name, value in arguments_of(config.optim).items() if name != "_target_"}
    optimizer = torch.optim.AdamW(groups, fused=True, **settings)
    steps, final = config.train.steps or 0, float(config.sched["final"])
    warmup: int = round(config.sched["warmup"] * steps)

    def share_of_peak(step: int) -> float:
        if step < warmup:
            return 0.01 + 0.99 * step / warmup
        return final + (1 - final) * (0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (steps - warmup)))

    return optimizer, LambdaLR(optimizer, share_of_peak)


def table(results: Results, loops: Mapping[str, Loop], unit: str, count: int) -> list[str]:
    """The table's lines. unit: what a step takes ``count`` of."""
    return [
        f"| | {unit}/s | speed beside the hand-written loop: median | least | most |",
        "|---|---:|---:|---:|---:|",
        *(_row(loops[name].title, chunks, results[BASE], count) for name, chunks in results.items()),
    ]


def _row(title: str, chunks: Sequence[Chunk], base: Sequence[Chunk], count: int) -> str:
    speed = statistics.median(count / chunk.seconds for chunk in chunks)
    if chunks is base:
        return f"| {title} | {speed:,.0f} | 1 | | |"
    ratios = [theirs.seconds / own.seconds for own, theirs in zip(chunks, base, strict=True)]
    ratio = f"**{statistics.median(ratios):.3f}** | {min(ratios):.3f} | {max(ratios):.3f}"
    return f"| {title} | {speed:,.0f} | {ratio} |"


def turns(steps: int, rounds: int) -> str:
    """How it was measured, for the note."""
    return (
        f"{rounds} round{'s' * (rounds > 1)} of {steps} steps in which both take turns,"
        f" {THREADS} thread{'s' * (THREADS > 1)}."
    )


def _processor() -> str:
    """The CPU's name, which Python's platform module does not know on Linux."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
