"""Before the first step: an evaluation of a batch a rank, of which nothing is kept. What would end the run at
its first evaluation, which may be an hour away, ends it now."""

import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ddptrain.api.recipe import Data, Report, Task
from ddptrain.distributed.comm import on_all_ranks, on_first_rank
from ddptrain.distributed.snapshot import unchanged
from ddptrain.distributed.watchdog.watchdog import LONG_S
from ddptrain.engine.check_task import check_report
from ddptrain.engine.evaluate import Interrupted, OwnBatches, own_sums
from ddptrain.engine.rank_state import same_rank_state
from ddptrain.engine.seeding import drawing_apart
from ddptrain.engine.step import TrainStep
from ddptrain.errors import UserError

log = logging.getLogger("ddptrain")


def rehearse(step: TrainStep, data: Data) -> tuple[str, ...]:
    """The names of the evaluation's metrics; none where the task's report can't do with so few samples, or a
    stop was asked for. Collectives and sync points.

    Model, task and random generators are as before. Raises UserError for what data and task may not return.
    """
    task, world, precision, watchdog = step.task, step.strategy.world, step.precision, step.phase.watchdog
    model, size = step.state.model, step.plan.eval_batch_size
    count = min(data.valid_size, size * world.size)
    samples = "all" if count == data.valid_size else f"the first {count:,}"
    watchdog.mark("trying an evaluation", step.state.step, LONG_S)
    with drawing_apart(world.device), _unchanged(model, task), step.strategy.evaluating(model):
        sums = on_all_ranks(
            world,
            lambda: own_sums(task, model, OwnBatches(data, count, size, world), precision, watchdog),
        )
        try:
            totals = sums.totals(interrupted=watchdog.stop is not None)
        except Interrupted:
            return ()
        return on_first_rank(world, lambda: _names(task, totals, samples))


def _names(task: Task, totals: Mapping[str, Tensor], samples: str) -> tuple[str, ...]:
    """Of the report's metrics. samples: of which ``totals`` are, in words."""
    try:
        report = _quietly(task, totals)
    except (NameError, ImportError):
        raise  # no other samples mend these
    except Exception as error:  # more samples, or trained weights, may be all that is missing
        if isinstance(error, UserError) and samples == "all":
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        log.warning(
            "note       %s.report fails on %s validation samples before training (%s: %s, in line %s of %s);"
            " if it does so after training, the run ends at its first evaluation",
            *(type(task).__name__, samples, type(error).__name__, str(error).partition("\n")[0]),
            *(place.lineno, place.filename),
        )
        return ()
    return tuple(check_report(task, report).metrics)


def _quietly(task: Task, totals: Mapping[str, Tensor]) -> Report:
    """What a task says of a model before its first step concerns nobody."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            return task.report(totals)
    finally:
        logging.disable(disabled)


@contextmanager
def _unchanged(model: nn.Module, task: Task) -> Iterator[None]:
    """The model's buffers, extra state and modules' attributes, and the task's rank_state, are the same
    afterwards. What a module keeps in lists or objects of its own is not looked into."""
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    with unchanged(model), same_rank_state(task):  # these are last: extra state may be made of attributes
        try:
            yield
        finally:
            for now, before in attributes:
                _put_back(now, before)


def _put_back(now: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Where nothing has changed, nothing is touched: compiled code would look at it anew."""
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if name not in now or now[name] is not value:
            now[name] = value
