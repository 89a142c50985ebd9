"""Images per second of ddptrain and of a hand-written loop that train the recipe yolo_shapes, on the CPU.

    python benchmarks/detection.py                      # a Markdown table on stdout, in some 4 minutes
    python benchmarks/detection.py --write docs/performance.md    # and into that file
    python benchmarks/detection.py --rounds 1 --steps 10

Both train the same model on the same batches, the recipe's own, mosaic and all, with the same assigner, loss,
clipping, optimizer, schedule, average and seed. All losses are compared: where more than one in ten differ by
more than 1e-5 this stops with an error. Between two anchors as good the assigner chooses by rounding,
which shows in one step in some hundreds. So that this does not grow, the learning rate is 6e-6 and AdamW's
eps 1e-3; neither changes the work. At 6e-3 and with a warm-up of 3 steps the losses are 1e-3 apart in step 5
and 1e-2 in step 8. AdamW, and not the recipe's Muon, because torch has it for the hand-written loop.

Turns, and what is timed, are as in lstm.py. The batches are made between two steps, by the loop's own process
as the recipe has it on a CPU; how much of a step that takes is the table's last column.
"""

import copy
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
from common import (
    THREADS,
    Chunk,
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
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot
from torch.nn.utils import clip_grad_norm_
from torch.utils.tensorboard import SummaryWriter
from torchvision.ops import complete_box_iou_loss

from ddptrain.api.recipe import Data, Task
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.config.schema import Config
from ddptrain.data.detection.batch import Batch
from ddptrain.data.detection.data import DetectionData
from ddptrain.recipes.yolo.assign import TaskAligned
from ddptrain.recipes.yolo.model import Raw, Yolo
from ddptrain.run.setup import make_task

NAME = "detection"
"""Of the markers."""
CHANGES = (
    "optim=adamw",
    "optim.lr=6e-6",
    "optim.betas=[0.9,0.99]",
    "++optim.eps=1e-3",
    "data.source.valid=32",
)
"""The optimizer's: see above. The validation pictures are for an evaluation that is not timed."""


@dataclass(frozen=True, slots=True)
class Job:
    """What both loops are to train: the recipe's config, task and data, opened once for all chunks."""

    config: Config
    task: Task
    data: DetectionData

    @property
    def steps(self) -> int:
        return self.config.train.steps or 0


def main() -> None:
    arguments = turns_asked(__doc__, NAME, rounds=18)
    torch.set_num_threads(THREADS)
    rounds, steps = arguments.rounds, arguments.steps
    print(f"detection: {rounds} rounds of {steps} steps", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder, silent(Path(folder)):
        job = _job(steps)
        results = take_turns(LOOPS, job, job.steps, rounds, compared=job.steps)
    lines = table(results, LOOPS, "images", job.config.train.batch_size)
    waits = [" waiting for data |", "---:|", *map(_waiting, results.values())]
    lines = [line + wait for line, wait in zip(lines, waits, strict=True)]
    publish("\n".join([*lines, "", _note(job, steps, rounds)]), NAME, arguments.write)


def by_hand(job: Job, folder: Path, watch: DataWatch) -> None:
    """The floor: what a careful user writes, and nothing else."""
    config, data, settings = job.config, job.data, job.config.task
    torch.manual_seed(config.seed)
    model: nn.Module = Yolo(len(data.classes), **_arguments_of(config.model or {}))
    model = model.to(memory_format=torch.channels_last)
    model.train()
    optimizer, schedule = adamw(model, config)
    average = copy.deepcopy(model).eval()
    averages, weights = _floats(average), _floats(model)
    assigner = TaskAligned(**_arguments_of(settings["assigner"]))
    gains = torch.tensor([settings["box"], settings["distance"], settings["classes"]])
    writer = SummaryWriter(str(folder))
    sampler = Sampler(data.train_size, config.train.batch_size, config.seed)
    batches = watch.batches(data.train_batches(sampler, range(job.steps)))
    for step, batch in enumerate(batches, start=1):
        watch.begin()
        sums, count = _losses(model(batch.images), batch, assigner)
        loss = (gains * sums).sum() / count.clamp(min=1)
        watch.note(loss)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_grad_norm_(model.parameters(), config.train.clip_norm or math.inf)
        optimizer.step()
        schedule.step()
        decay = min(config.ema.decay or 0.0, (1 + step) / (10 + step))
        torch._foreach_lerp_(averages, weights, 1 - decay)
        if step % LOG_EVERY == 0:
            writer.add_scalar("train/loss", loss.item(), step)
    writer.close()


def _losses(raw: Raw, batch: Batch, assigner: TaskAligned) -> tuple[Tensor, Tensor]:
    """(3,) the sums of the losses of boxes, distances and classes, and () what they are to be divided by."""
    points, strides, last = raw.points, raw.strides[:, None], raw.distances.shape[-1] - 1
    distances = raw.distances.softmax(-1) @ torch.arange(last + 1.0) * strides
    boxes = torch.cat([points - distances[..., :2], points + distances[..., 2:]], dim=-1)
    scores = raw.classes.detach().sigmoid()
    which, weight = assigner(scores, boxes.detach(), points, raw.strides, batch.boxes, batch.labels)
    # as the recipe does it: where nothing is to be learnt, an anchor's own cell stands for both boxes
    learnt, cells = weight[..., None] > 0, torch.cat([points - strides / 2, points + strides / 2], dim=1)
    goals = torch.where(learnt, batch.boxes.gather(1, which[..., None].expand(-1, -1, 4)), cells)
    box = complete_box_iou_loss(torch.where(learnt, boxes, cells), goals)
    sides = torch.cat([points - goals[..., :2], goals[..., 2:] - points], dim=-1) / strides
    sides = sides.clamp(0, last)
    below = sides.floor().clamp(max=last - 1)
    bins = torch.stack([below, below + 1], dim=-1).long()
    shares = torch.stack([1 - sides + below, sides - below], dim=-1)
    distance = -(raw.distances.log_softmax(-1).gather(-1, bins) * shares).sum(-1).mean(-1)
    labels = batch.labels.gather(1, which).clamp(min=0)
    targets = one_hot(labels, raw.classes.shape[-1]) * weight[..., None]
    classes = binary_cross_entropy_with_logits(raw.classes, targets, reduction="sum")
    return torch.stack([(box * weight).sum(), (distance * weight).sum(), classes]), weight.sum()


def _floats(model: nn.Module) -> list[Tensor]:
    """What is averaged."""
    tensors = [*model.parameters(), *model.buffers()]
    return [tensor.detach() for tensor in tensors if tensor.is_floating_point()]


def with_ddptrain(job: Job, folder: Path, watch: DataWatch) -> None:
    """The engine as the verb ``train`` sets it up, with all that a user leaves on."""
    fit(job.config, Watched(job.task, watch), cast(Data, WatchedData(job.data, watch)), folder)


@final
class WatchedData:
    """The recipe's own data, with the wait for each batch noted."""

    def __init__(self, data: DetectionData, watch: DataWatch) -> None:
        self._data = data
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Batch]:
        return self._watch.batches(self._data.train_batches(sampler, steps))


LOOPS = {
    "hand": Loop("hand-written loop", by_hand),
    "ddptrain": Loop("**ddptrain**", with_ddptrain),
}


def _job(steps: int) -> Job:
    config = chunk_config("yolo_shapes", steps, *CHANGES)
    task, data = make_task(config)
    data.prepare(World(), config.seed)
    assert isinstance(data, DetectionData)
    return Job(config, task, data)


def _arguments_of(node: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name != "_target_"}


def _waiting(chunks: Sequence[Chunk]) -> str:
    """A cell."""
    return f" {statistics.median(chunk.waited / chunk.seconds for chunk in chunks):.1%} |"


def _note(job: Job, steps: int, rounds: int) -> str:
    return (
        f"The recipe `yolo_shapes`, {job.config.train.batch_size} pictures of {job.data.size} pixels a step,"
        f" fp32; {turns(steps, rounds)} {made_with('torch', 'torchvision', 'ddptrain')}"
        " Made by `python benchmarks/detection.py`."
    )


if __name__ == "__main__":
    main()
