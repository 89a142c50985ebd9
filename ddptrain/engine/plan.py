"""What happens after which step: a pure function of the config and the size of the data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ddptrain.api.order import EpochOrder, Shuffled
from ddptrain.api.recipe import Progress
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.errors import UserError


@dataclass(frozen=True, slots=True)
class Plan:
    """The schedule of a run, in optimizer steps. Everything happens after a step, numbered from 1.

    An epoch's end is the first step after which each of its samples has been seen.
    """

    steps: int
    train_size: int
    batch_size: int
    """Samples of a step over all ranks."""
    micro_batch: int | None = None
    """Most samples in one forward pass of a rank."""
    eval_batch_size: int = 256
    log_every: int = 50
    eval_every: int | None = None
    """None: at the end of each epoch; so for saving."""
    save_every: int | None = None
    clip_norm: float | None = None
    seed: int = 0
    data: str = ""
    """`Data.identity`."""
    valid_size: int = 0
    shards: int | None = None
    """Parts of each global batch under strategy=strict; None: one a rank."""
    skips_nonfinite: bool = False
    """Whether a step with a number that is not finite is skipped, or ends the run."""
    nonfinite_limit: int = 20
    """Most steps skipped in a row."""
    verify_every: int | None = None
    """Steps between comparisons of the ranks' weights."""
    epoch_order: EpochOrder = field(default=Shuffled(), compare=False)  # has no state
    """`Data.epoch_order`."""

    def sampler(self, world: World) -> Sampler:
        """Which samples this rank takes in each step."""
        return Sampler(
            self.train_size,
            self.batch_size,
            self.seed,
            world.rank,
            world.size,
            self.micro_batch,
            self.shards,
            self.epoch_order,
        )

    def check_equal_passes(self, world: World) -> None:
        """Where ranks meet in each pass: raise UserError if ranks have different numbers of
        micro-batches."""
        ranks = [self.sampler(replace(world, rank=rank)).micro_batches for rank in range(world.size)]
        if len(set(map(len, ranks))) > 1:
            raise UserError(
                f"train.micro_batch={self.micro_batch}: the global batch of {self.batch_size} gives the"
                f" {world.size} ranks different numbers of micro-batches, and all have to take part in"
                " each (strategy=fsdp, SyncBatchNorm). Use a larger train.micro_batch, or a train.batch_size"
                " that the ranks divide."
            )

    @property
    def position_facts(self) -> dict[str, int | str | None]:
        """What determines the samples of a step number, and those that it is judged by."""
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "data": self.data,
            "train_size": self.train_size,
            "valid_size": self.valid_size,
            "shards": self.shards,
            "epoch_order": self.epoch_order.digest,
        }

    def check_continues(self, saved: Mapping[str, Any], where: str) -> None:
        """Raise UserError if a checkpoint's step number stands for other samples than this plan's, or its
        best was found by others."""
        facts = self.position_facts
        if saved.get("data") != self.data:
            raise UserError(
                f"data: {where} was saved while training on other samples, or on the same in another order,"
                " or it was evaluated on others. Have files changed, is it the run of another recipe, or"
                " does a script draw its data without torch.manual_seed(0)? Use the same for training and"
                " for validation, or start a new run. To go on from its weights: init.weights."
            )
        keys = {
            "seed": "seed",
            "batch_size": "train.batch_size",
            "train_size": "data (training samples)",
            "valid_size": "data (validation samples)",
            "shards": "strategy.shards",
            "epoch_order": "data (order of the samples)",
        }
        for name, key in keys.items():
            own = facts[name]
            if name == "shards" and saved.get(name) != own and None in (saved.get(name), own):
                before, now = (
                    "without strict" if shards is None else f"strict in {shards} shards"
                    for shards in (saved.get(name), own)
                )
                raise UserError(
                    f"strategy: {where} was saved {before}, and this run is {now}: from here on it would be"
                    " another one. Use the same (strategy=strict strategy.shards=<n>), or start a new run:"
                    " another run.dir, or run.resume=never."
                )
            if saved.get(name) != own:
                raise UserError(
                    f"{key}={own}: {where} was saved with {saved.get(name)}, so its place in the data"
                    " or its best would be another one. Use the same, or start a new run: another run.dir,"
                    " or run.resume=never."
                )

    def epoch(self, steps_done: int) -> float:
        """Epochs seen after so many steps."""
        return steps_done * self.batch_size / self.train_size

    def progress(self, step: int) -> Progress:
        """The position of the training after ``step`` steps."""
        return Progress(step, step * self.batch_size // self.train_size, step / self.steps)

    def verifies(self, done: int) -> bool:
        return self.verify_every is not None and done % self.verify_every == 0

    def logs(self, done: int) -> bool:
        return done % self.log_every == 0 or done == self.steps

    def evaluates(self, done: int) -> bool:
        return self._due(self.eval_every, done)

    def saves(self, done: int) -> bool:
        return self._due(self.save_every, done)

    def _due(self, every: int | None, done: int) -> bool:
        if done == self.steps:
            return True
        if every is not None:
            return done % every == 0
        return int(self.epoch(done)) > int(self.epoch(done - 1))


def steps_of(epochs: float, train_size: int, batch_size: int) -> int:
    """Optimizer steps after which every sample has been seen ``epochs`` times."""
    return max(1, math.ceil(epochs * train_size / batch_size - 1e-9))
