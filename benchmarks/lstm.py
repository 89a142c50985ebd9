"""Tokens per second of ddptrain and of a hand-written loop that train the recipe lstm_text, on the CPU.

    python benchmarks/lstm.py                      # a Markdown table on stdout, in some 10 minutes
    python benchmarks/lstm.py --write docs/performance.md    # and into that file
    python benchmarks/lstm.py --rounds 1 --steps 10

Both train the same model on the same windows with the same optimizer, schedule, precision and seed; where
their first losses differ by more than 1e-5 this stops with an error. Short chunks of both take turns within
one process, A B, then B A, and a ratio is taken within one round, so what else the machine does hits both.

A step lasts from one call of the model to the next: all that a loop does in between, but no set-up, warm-up,
final evaluation or checkpoint.
"""

import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import (
    THREADS,
    DataWatch,
    Loop,
    Watched,
    adamw,
    chunk_config,
    made_with,
    publish,
    silent,
    table,
    take_turns,
    turns,
    turns_asked,
)
from loops import LOG_EVERY, fit
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.tensorboard import SummaryWriter

from ddptrain.api.world import World
from ddptrain.config.schema import Config
from ddptrain.data.text.corpus import StandardLibrary
from ddptrain.recipes.recurrent import RecurrentModel
from ddptrain.recipes.text import State
from ddptrain.run.setup import make_task
from ddptrain.torch_private import lstms_in_what_the_cpu_has

NAME = "lstm"
"""Of the markers."""


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
    arguments = turns_asked(__doc__, NAME)
    torch.set_num_threads(THREADS)
    lstms_in_what_the_cpu_has()  # in the loop by hand, too
    rounds, steps = arguments.rounds, arguments.steps
    print(f"lstm: {rounds} rounds of {steps} steps", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder, silent(Path(folder)):
        job = _job(steps, Path(folder))
        results = take_turns(LOOPS, job, job.config.train.steps or 0, rounds)
    lines = table(results, LOOPS, "tokens", job.tokens)
    publish("\n".join([*lines, "", _note(job, steps, rounds)]), NAME, arguments.write)


def by_hand(job: Job, folder: Path, watch: DataWatch) -> None:
    """The floor: what a careful user writes, and nothing else."""
    config, window = job.config, job.config.data["window"]
    torch.manual_seed(config.seed)
    settings: dict[str, Any] = {k: v for k, v in (config.model or {}).items() if k != "_target_"}
    model = RecurrentModel(vocabulary=256, **settings)
    model.train()
    optimizer, schedule = adamw(model, config)
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


def _streams(job: Job) -> Tensor:
    """uint8 (batch, tokens): the parts of the text that the rows read, as far as they get. Cut once, so that
    a step only slices them."""
    count, size = job.config.train.batch_size, len(job.text)
    length = (job.config.train.steps or 0) * job.config.data["window"] + 1
    origins = torch.arange(count) * size // count
    return job.text[(origins[:, None] + torch.arange(length)) % size]


def with_ddptrain(job: Job, folder: Path, watch: DataWatch) -> None:
    """The engine as the verb ``train`` sets it up, with all that a user leaves on."""
    task, data = make_task(job.config)
    data.prepare(World(), job.config.seed)
    fit(job.config, Watched(task, watch), data, folder)


LOOPS = {
    "hand": Loop("hand-written loop", by_hand),
    "ddptrain": Loop("**ddptrain**", with_ddptrain),
}


def _job(steps: int, folder: Path) -> Job:
    config = chunk_config("lstm_text", steps)
    config.data["root"] = str(folder)
    documents = StandardLibrary().corpus().train
    text = bytearray(b"".join(block for document in documents for block in document.blocks()))
    return Job(config, torch.frombuffer(text, dtype=torch.uint8))


def _note(job: Job, steps: int, rounds: int) -> str:
    config = job.config
    return (
        f"The recipe `lstm_text`, {config.train.batch_size} windows of {config.data['window']} bytes a step,"
        f" {config.precision}; {turns(steps, rounds)} {made_with('torch', 'ddptrain')}"
        " Made by `python benchmarks/lstm.py`."
    )


if __name__ == "__main__":
    main()
