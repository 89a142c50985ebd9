"""Evaluation on all ranks, exact for any world size.

The validation set is cut into the same batches on any number of ranks, and each batch goes to one rank.
Nothing is padded or averaged twice: counts are added as integers, and each floating sum has a slot of its
batch, so the sum over ranks only fills slots and the total is taken in one order. Rows are gathered in that
order.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from ddptrain.api.recipe import Batch, Data, Figure, Report, Rows, Task
from ddptrain.api.world import World
from ddptrain.distributed.comm import add_up, from_all_ranks, on_first_rank
from ddptrain.distributed.device import summing_dtype
from ddptrain.distributed.watchdog.watchdog import LONG_S, Watchdog
from ddptrain.engine.check_task import check_report, check_sums
from ddptrain.engine.precision import Precision
from ddptrain.engine.seeding import drawing_apart
from ddptrain.errors import UserError


class Interrupted(Exception):
    """A stop was requested during the evaluation; raised on all ranks."""


def evaluate(
    task: Task, model: nn.Module, batches: "OwnBatches", precision: Precision, watchdog: Watchdog
) -> Report:
    """The task's report over the whole validation set. Some collectives and a sync point, at the end.

    model: the bare module, the same on every rank; DDP's wrapper would communicate in its forward.
    Raises Interrupted where ``watchdog`` was asked to stop.
    """
    sums = own_sums(task, model, batches, precision, watchdog)
    totals = sums.totals(interrupted=watchdog.stop is not None)
    watchdog.mark("reporting", patience=LONG_S)
    with drawing_apart(batches.world.device) as seed:
        seed(batches.slots)
        return on_first_rank(batches.world, lambda: check_report(task, task.report(totals)))


def chunks_of(size: int, batch_size: int) -> list[range]:
    """The batches into which so many validation samples are cut."""
    return [range(i, min(i + batch_size, size)) for i in range(0, size, batch_size)]


@final
class OwnBatches:
    """A rank's batches of the first ``size`` validation samples, each with its place among all ranks'.

    They are asked for here, and read one by one: loader processes may read them ahead.
    """

    def __init__(self, data: Data, size: int, batch_size: int, world: World) -> None:
        chunks = chunks_of(size, batch_size)
        self.world = world
        self.slots = len(chunks)
        """Batches of all ranks."""
        self._own = range(world.rank, len(chunks), world.size)
        self._where = f"{type(data).__name__}.valid_batches"
        self._batches = data.valid_batches([chunks[slot] for slot in self._own])

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Raises UserError where the data does not give a batch for each range."""
        if not isinstance(self._batches, Iterable):
            raise UserError(
                f"{self._where}: returned {type(self._batches).__name__}; it must return an iterator, with a"
                " batch for each range that it is given."
            )
        given = 0
        for batch in self._batches:
            given += 1
            if given > len(self._own):
                break
            yield self._own[given - 1], batch
        if given != len(self._own):
            raise UserError(
                f"{self._where}: gave {'more' if given > len(self._own) else given} batches for"
                f" {len(self._own)} ranges of validation samples; it must give one for each.",
                everywhere=False,
            )


def own_sums(
    task: Task, model: nn.Module, batches: OwnBatches, precision: Precision, watchdog: Watchdog
) -> "Totals":
    """Of a rank's batches; of the first ones only, where ``watchdog`` was asked to stop. No collectives.

    Raises UserError for what data and task may not return.
    """
    sums = Totals(f"{type(task).__name__}.evaluate", batches.slots, batches.world)
    # not inference_mode: training could not use what is cached
    with torch.no_grad(), in_evaluation(model), drawing_apart(batches.world.device) as seed:
        for slot, batch in batches:
            if watchdog.stop:
                break
            watchdog.mark("evaluating a batch")
            seed(slot)
            with precision.autocast():
                batch_sums = task.evaluate(model, batch)
            check_sums(task, batch_sums)
            for name, value in batch_sums.items():
                sums.add(slot, name, value)
    return sums


class Totals:
    """This rank's sums and rows so far. where: what returns them, for messages."""

    def __init__(self, where: str, slots: int, world: World) -> None:
        self._where = where
        self._slots = slots
        self._world = world
        self._counts: dict[str, Tensor] = {}
        self._floats: dict[str, Tensor] = {}
        self._rows: dict[str, dict[int, Tensor]] = {}
        self._kinds: dict[str, str] = {}
        """In words, by name: the same in every batch."""

    def add(self, slot: int, name: str, value: Tensor | Rows) -> None:
        """Raises UserError where an earlier batch has had another kind of value under this name."""
        self._check_kinds({name: _kind(value)})
        if isinstance(value, Rows):
            self._rows.setdefault(name, {})[slot] = value.values
        elif value.is_floating_point():
            if name not in self._floats:
                self._floats[name] = self._zeros(torch.Size([self._slots]), value.device)
            self._floats[name][slot] = value
        else:
            added = value.to(torch.int64, copy=True)  # a task may return one tensor under two names
            self._counts[name] = self._counts[name] + added if name in self._counts else added

    def totals(self, interrupted: bool) -> dict[str, Tensor]:
        """Over all ranks, on the CPU of each. Collectives and a sync point.

        Raises Interrupted, on all ranks, where any was.
        """
        world, device = self._world, self._world.device
        own = ({n: v.shape for n, v in self._counts.items()}, {n: v.shape for n, v in self._floats.items()})
        # a rank may have no batch, or names that others lack
        of_ranks = from_all_ranks(world, (interrupted, self._kinds, *own))
        for was_interrupted, kinds, count_shapes, float_shapes in of_ranks:
            if was_interrupted:
                raise Interrupted
            self._check_kinds(kinds)
            for name, shape in count_shapes.items():
                self._counts.setdefault(name, torch.zeros(shape, dtype=torch.int64, device=device))
            for name, shape in float_shapes.items():
                self._floats.setdefault(name, self._zeros(shape, device))
        # a task may return tensors on the CPU, which NCCL does not add up
        counts = {name: self._counts[name].to(device) for name in sorted(self._counts)}
        floats = {name: self._floats[name].to(device, summing_dtype(device)) for name in sorted(self._floats)}
        totals = {name: add_up(world, count).cpu() for name, count in counts.items()}
        totals |= {name: add_up(world, floating).cpu().sum() for name, floating in floats.items()}
        return totals | self._gathered_rows()

    def _gathered_rows(self) -> dict[str, Tensor]:
        """All ranks' rows in the order of the data set."""
        own = {name: {slot: value.cpu() for slot, value in rows.items()} for name, rows in self._rows.items()}
        gathered: dict[str, dict[int, Tensor]] = {}
        for of_rank in from_all_ranks(self._world, own):
            for name, rows in of_rank.items():
                gathered.setdefault(name, {}).update(rows)
        return {name: torch.cat([rows[slot] for slot in sorted(rows)]) for name, rows in gathered.items()}

    def _zeros(self, shape: torch.Size, device: torch.device) -> Tensor:
        return torch.zeros(shape, dtype=summing_dtype(device), device=device)

    def _check_kinds(self, kinds: Mapping[str, str]) -> None:
        for name, kind in kinds.items():
            if self._kinds.setdefault(name, kind) != kind:
                raise UserError(
                    f"{self._where}: {name!r} is {self._kinds[name]} in one batch and {kind} in another."
                    " Return the same for every batch; torch.bincount needs minlength for that.",
                    everywhere=False,
                )


def _kind(value: Tensor | Rows) -> str:
    if isinstance(value, Rows):
        return f"Rows of {value.values.dtype}, (k, {', '.join(map(str, value.values.shape[1:]))})"
    if value.is_floating_point():
        return "a floating sum"
    return f"integer counts of shape {tuple(value.shape)}"


@torch.no_grad()  # not inference_mode: what a model caches here could not be used in training
def figures_of(
    task: Task, model: nn.Module, precision: Precision, device: torch.device
) -> Mapping[str, Figure]:
    """The task's figures of the model. No collectives: only rank 0 calls it."""
    with in_evaluation(model), precision.autocast(), drawing_apart(device) as seed:
        seed(0)
        return task.figures(model)


@contextmanager
def in_evaluation(*models: nn.Module) -> Iterator[None]:
    """In evaluation mode, and then each module as it was: ``model.train()`` would wake the BatchNorms of
    frozen layers."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
