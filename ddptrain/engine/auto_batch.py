"""train.micro_batch=auto and train.eval_batch_size=auto: as many samples at once as fit into the memory."""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, final

import torch
from torch import nn

from ddptrain.api.recipe import Data, Task
from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World
from ddptrain.distributed.comm import from_all_ranks, on_all_ranks
from ddptrain.distributed.snapshot import unchanged
from ddptrain.distributed.watchdog.watchdog import LONG_S, Watchdog
from ddptrain.engine.evaluate import OwnBatches, in_evaluation
from ddptrain.engine.out_of_memory import in_one_line, is_lack_of_memory
from ddptrain.engine.plan import Plan
from ddptrain.engine.precision import Precision
from ddptrain.engine.rank_state import same_rank_state
from ddptrain.errors import UserError

log = logging.getLogger("ddptrain")
_COPIES = 4
"""What will be held beside weights and gradients, as copies of the trained parameters: DDP's buckets, two
averages of Adam, averaged weights. With strategy=strict one more for each sum of its shards."""
_USABLE = 0.9
"""Of a GPU's memory while sizes are tried. The rest is for what comes later, or beside torch's allocator:
NCCL's buffers, cuBLAS's workspaces, fragmentation."""
_EVAL_SHARE = 4
"""Evaluation keeps no activations; so many times the micro-batch are tried first."""


@final
class AutoBatch:
    """Tries sizes on this rank, with the bare model: no other rank waits in a collective meanwhile. Buffers,
    gradients and the task's state are as before afterwards."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        data: Data,
        precision: Precision,
        plan: Plan,
        strategy: Strategy,
    ) -> None:
        self._task = task
        self._model = model
        self._data = data
        self._precision = precision
        self._plan = plan
        self._strategy = strategy
        self._world = strategy.world
        self._share = -(-plan.batch_size // (plan.shards or self._world.size))
        """The largest of all ranks': with another number, a rank would cut its share for the rounding."""

    def sized(
        self,
        micro_batch: int | Literal["auto"] | None,
        eval_batch_size: int | Literal["auto"],
        saved: Mapping[str, Any],
        watchdog: Watchdog,
    ) -> Plan:
        """The plan with what ``auto`` stands for: as a checkpoint's manifest has it, whether there is room or
        not, or the most that every rank has room for. Collectives, after the trials."""
        if "auto" not in (micro_batch, eval_batch_size):
            return self._plan
        if self._strategy.further_gpus or self._world.shares_device or self._strategy.sharded:
            raise UserError(
                "train.micro_batch=auto, train.eval_batch_size=auto: needs ranks with a whole model and a"
                " device of their own; not strategy=dp, not fsdp, no ranks that share a GPU. Give a number."
            )
        watchdog.mark("trying how many samples fit", patience=LONG_S)
        if micro_batch == "auto":
            known = saved.get("micro_batch")
            micro_batch = int(known or self._least(self.micro_batch))
            log.info("%-10s train.micro_batch=%d (auto)", _why(known), micro_batch)
        if eval_batch_size == "auto":
            share = micro_batch or self._share
            known = saved.get("eval_batch_size")
            eval_batch_size = int(known or self._least(lambda: self.eval_batch_size(share)))
            log.info("%-10s train.eval_batch_size=%d (auto)", _why(known), eval_batch_size)
        watchdog.mark("starting", patience=LONG_S)
        return replace(self._plan, micro_batch=micro_batch, eval_batch_size=eval_batch_size)

    def micro_batch(self) -> int:
        """The most samples that fit, of a rank's share of the global batch in equal parts. Raises UserError
        if not even one does."""
        return self._largest(self._share, self._train, "train.micro_batch")

    def eval_batch_size(self, micro_batch: int) -> int:
        """The most samples that fit, up to four times ``micro_batch``. Raises UserError if not even one
        does."""
        most = min(_EVAL_SHARE * micro_batch, self._data.valid_size)
        return self._largest(most, self._evaluate, "train.eval_batch_size")

    def _least(self, find: Callable[[], int]) -> int:
        return min(from_all_ranks(self._world, on_all_ranks(self._world, find)))

    def _largest(self, most: int, work: Callable[[int], None], key: str) -> int:
        """``most`` divided by the smallest number, rounded up, for which there is room."""
        too_few, parts = 0, 1
        while lack := self._lack(work, -(-most // parts)):
            if parts == most:
                raise UserError(
                    f"{key}=auto: rank {self._world.rank} has no room for a single sample ({lack}). Take a"
                    " smaller model, or a device with more memory.",
                    everywhere=False,
                )
            too_few, parts = parts, min(2 * parts, most)
        while parts - too_few > 1:
            middle = (too_few + parts) // 2
            if self._lack(work, -(-most // middle)):
                too_few = middle
            else:
                parts = middle
        return -(-most // parts)

    def _lack(self, work: Callable[[int], None], size: int) -> str:
        """What torch says where ``size`` samples do not fit; '' where they do."""
        trained = sum(p.numel() * p.element_size() for p in self._model.parameters() if p.requires_grad)
        sums = len(self._plan.sampler(self._world).own_shards).bit_length()
        copies = _COPIES + sums * (self._plan.shards is not None)
        try:
            with _headroom(self._world.device):
                held = torch.empty(copies * trained, dtype=torch.uint8, device=self._world.device)
                work(size)
            del held
            return ""
        except RuntimeError as error:
            if not is_lack_of_memory(error):
                raise
            return in_one_line(error)
        finally:
            if self._world.device.type == "cuda":
                gc.collect()  # a cycle may hold what the try has left
                torch.cuda.empty_cache()

    def _train(self, size: int) -> None:
        """Two passes: in the second one the gradients are there."""
        sampler = replace(self._plan, micro_batch=size).sampler(self._world)
        largest = sampler.micro_sizes.index(max(sampler.micro_sizes))
        batch = next(islice(self._data.train_batches(sampler, range(1)), largest, None))
        try:
            with unchanged(self._model), same_rank_state(self._task):
                for _ in range(2):
                    with self._precision.autocast():
                        loss = self._task.loss(self._model, batch, self._plan.progress(0))
                    self._precision.backward(loss.sum, torch.ones_like(loss.sum))
        finally:
            self._model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _evaluate(self, size: int) -> None:
        for _, batch in OwnBatches(self._data, size, size, World()):
            with unchanged(self._model), in_evaluation(self._model), self._precision.autocast():
                self._task.evaluate(self._model, batch)


def _why(known: int | None) -> str:
    """First word of a log line: a resumed run keeps its numbers."""
    return "fits" if known is None else "kept"


@contextmanager
def _headroom(device: torch.device) -> Iterator[None]:
    """Inside, torch takes no more of a GPU's memory than what is usable."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(_USABLE * before, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
