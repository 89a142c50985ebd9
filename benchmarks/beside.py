"""What works beside a training costs its steps, on the CPU: all that watches a run, and checkpoints in parts
that are written in the background. Runs with it and without take turns.

    python benchmarks/beside.py                                  # a Markdown table, in some three hours
    python benchmarks/beside.py --cases watched --rounds 20
    python benchmarks/beside.py --cases saves --rounds 3 --blocks 8
    python benchmarks/beside.py --write docs/performance.md      # and into that file, between its markers

A run's seconds are those between its first and last log line, saves included. In `saves` each of the blocks
sleeps, as a host does while its GPU computes: where all cores train, whatever is written in the background
takes its time from them.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import final

import torch
from common import made_with, publish, rounds_parser
from torch import Tensor, nn

from ddptrain.api.recipe import Batch, Data, Loss, Progress, Report, Task
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World

NAME = "beside"
"""Of the markers."""
WIDTH = 4096
PORT = 9777
_LOGGED = r"^(.{23}) step (\d+)/"
"""A line of log.txt: when, and which."""
LARGE = """\
# @package _global_
defaults:
  - override /optim: sgd
  - override /sched: constant
  - override /strategy: fsdp
task: {{_target_: beside.Large, blocks: {blocks}, seconds: {seconds}}}
data: {{_target_: beside.Noise}}
optim: {{lr: 1.0e-4, momentum: 0.0}}
train: {{batch_size: 8, epochs: null, eval_batch_size: 8}}
strategy: {{whole_checkpoint_gb: 0.001, reshard_after_forward: false}}
checkpoint: {{keep: 1}}
log: {{every: 1}}
"""


@final
class _Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._seconds)
        hidden: Tensor = self.linear(x)
        return x + hidden.tanh()


@final
class Large(Task):
    """blocks: of 67 MB of weights each, which sleep for some seconds."""

    best_metric = "loss"
    higher_is_better = False

    def __init__(self, blocks: int, seconds: float) -> None:
        self._blocks = blocks
        self._seconds = seconds

    def build(self) -> nn.Module:
        return nn.Sequential(*(_Block(self._seconds) for _ in range(self._blocks)))

    def loss(self, model: nn.Module, batch: Batch, progress: Progress) -> Loss:
        return Loss(model(batch).square().mean(dim=1).sum(), len(batch))

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        return {"loss": model(batch).square().mean(dim=1).sum(), "all": torch.tensor(len(batch))}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        return Report({"loss": float(sums["loss"]) / int(sums["all"])})


@final
class Noise(Data):
    """Rows of random numbers."""

    train_size = 4096
    valid_size = 8

    def prepare(self, world: World, seed: int) -> None:
        """It is."""

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Batch]:
        for ids, _ in sampler.samples(steps, torch.device("cpu")):
            yield _rows(ids)

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Batch]:
        for chunk in chunks:
            yield _rows(torch.tensor(chunk))

    def preview(self) -> None:
        return None

    def describe(self) -> str:
        return "noise"


def _rows(ids: Tensor) -> Tensor:
    return torch.stack([torch.randn(WIDTH, generator=torch.Generator().manual_seed(int(i))) for i in ids])


@dataclass(frozen=True, slots=True)
class Case:
    """words: of all kinds of runs. kinds: further ones by name, the first to compare with."""

    words: str
    steps: int
    kinds: Mapping[str, str]


_SEEN = "observers=[console,jsonl,prometheus,webhook]"
CASES = {
    "watched": Case(
        "recipe=cnn_cifar10 data=shapes log.every=10 checkpoint.every=100 checkpoint.keep=2",
        250,
        {
            "nothing but the log": "observers=[console,jsonl]",
            "prometheus (a scrape a second), webhook, run.mirror": f"{_SEEN} observers.prometheus.port={PORT}"
            " run.mirror={folder}/mirror",
        },
    ),
    "saves": Case(
        "--config-dir={folder}/conf --trust=beside recipe=large observers=[console,jsonl]",
        7,
        {
            "no saves": "checkpoint.every=7",
            "in the background": "checkpoint.every=1",
            "while the training waits": "checkpoint.every=1 checkpoint.background=false",
        },
    ),
}


def main() -> None:
    parser = rounds_parser(__doc__, NAME, 10)
    parser.add_argument("--cases", default=",".join(CASES), help="(%(default)s)")
    parser.add_argument("--blocks", type=int, default=30, help="of 67 MB, in saves (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.4, help="that a block sleeps (%(default)s)")
    arguments = parser.parse_args()
    large = LARGE.format(blocks=arguments.blocks, seconds=arguments.seconds)
    lines = ["| on 2 gloo ranks | a step, s | of one without (min to max) |", "|---|---:|---:|"]
    for name in arguments.cases.split(","):
        case = CASES[name]
        seconds: dict[str, list[float]] = {kind: [] for kind in case.kinds}
        for turn in range(arguments.rounds):
            for kind in case.kinds if turn % 2 == 0 else reversed(list(case.kinds)):
                with tempfile.TemporaryDirectory() as folder:
                    took = _seconds_a_step(case, case.kinds[kind], large, folder)
                print(f"{kind}: {took:.4f} s a step", file=sys.stderr, flush=True)
                seconds[kind].append(took)
        first, *_ = seconds.values()
        for kind, own in seconds.items():
            ratios = [one / other for one, other in zip(own, first, strict=True)]
            spread = f"**{statistics.median(ratios):.3f}** ({min(ratios):.3f} to {max(ratios):.3f})"
            cell = "1" if own is first else spread
            lines.append(f"| {name}: {kind} | {statistics.median(own):.3f} | {cell} |")
    note = (
        f"Medians of {arguments.rounds} rounds. watched: two convolutions, a checkpoint every 100 steps."
        f" saves: {arguments.blocks * WIDTH**2 * 4 / 1e9:.1f} GB of weights (fsdp, SGD), a save each step;"
        f" {made_with('torch')}"
    )
    publish("\n".join([*lines, "", note]), NAME, arguments.write)


def _seconds_a_step(case: Case, words: str, large: str, folder: str) -> float:
    (Path(folder) / "conf" / "recipe").mkdir(parents=True)
    (Path(folder) / "conf" / "recipe" / "large.yaml").write_text(large)
    settings = f"{case.words} {words} device=cpu run.dir={folder}/run train.steps={case.steps}"
    settings += f" train.eval_every={case.steps}"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "DDPTRAIN_WEBHOOK_URL": "http://127.0.0.1:9/"}
    line = [sys.executable, "-m", "ddptrain", "launch", "--nproc-per-node=2"]
    line += [word.replace("{folder}", folder) for word in settings.split()]
    with _scraped(PORT) if "prometheus" in words else nullcontext():
        done = subprocess.run(line, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"stopped:\n{done.stderr}")
    logged = re.findall(_LOGGED, (Path(folder) / "run" / "log.txt").read_text(), re.MULTILINE)
    (began, first), *_, (ended, last) = logged
    spent = datetime.fromisoformat(ended) - datetime.fromisoformat(began)
    return spent.total_seconds() / (int(last) - int(first))


@contextmanager
def _scraped(port: int) -> Iterator[None]:
    """A Prometheus, as far as the run sees it."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(1.0):
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    main()
