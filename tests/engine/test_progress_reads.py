"""Whatever a task does with `At`: reading the progress is noted, and nothing else is."""

import copy
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from composed import made
from torch.utils import checkpoint

from ddptrain.api.recipe import At
from ddptrain.api.world import World
from ddptrain.config.schema import Config
from ddptrain.engine.plan import Plan, plan_run
from ddptrain.engine.progress_reads import ProgressReads
from ddptrain.testing import run_ranks


def unpacked(at: At) -> Any:
    _, _, progress = at
    return progress


def matched(at: At) -> Any:
    match at:
        case (_, _, progress):
            return progress


def matched_by_name(at: At) -> Any:
    match at:
        case At(progress=progress):
            return progress


READINGS: dict[str, Callable[[At], Any]] = {
    "name": lambda at: at.progress,
    "getattr": lambda at: getattr(at, "prog" + "ress"),
    "attrgetter": operator.attrgetter("progress"),
    "index": lambda at: at[2],
    "last": lambda at: at[-1],
    "slice": lambda at: at[1:],
    "itemgetter": operator.itemgetter(2),
    "unpacked": unpacked,
    "matched": matched,
    "matched by name": matched_by_name,
    "set": set,
    "list": list,
    "tuple": tuple,
    "spread": lambda at: max(*at),
    "zip": lambda at: list(zip("sep", at, strict=True)),
    "reversed": lambda at: list(reversed(at)),
    "sum": sum,
    "added": lambda at: operator.add(at, (1,)),
    "added to": lambda at: operator.add((), at),
    "added to more": lambda at: operator.add((1,), at),
    "times": lambda at: 1 * at,
    "in": lambda at: 0.5 in at,
    "equal": lambda at: at == (10, 1, 0.25),
    "less": lambda at: at < (10, 1, 0.5),
    "hash": hash,
    "repr": repr,
    "str": str,
    "format": lambda at: f"{at}",
    "count": lambda at: at.count(0.25),
    "find": lambda at: at.index(0.25),
    "asdict": lambda at: at._asdict(),
    "replace": lambda at: at._replace(step=0),
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "numpy": numpy.array,
    "tensor": torch.tensor,
    "vars": lambda at: at.__getnewargs__(),
    "recomputed": lambda at: checkpoint.checkpoint(lambda at: torch.ones(1) * at[2], at, use_reentrant=False),
}


def watched() -> tuple[At, ProgressReads]:
    plan = Plan(steps=40, train_size=20, batch_size=2)
    return plan.at(10), plan.reads


@pytest.mark.parametrize("how", READINGS)
def test_each_way_of_reading_is_noted(how: str) -> None:
    at, reads = watched()
    told = READINGS[how](at)
    assert reads.seen
    if how == "hash":
        assert told == hash((10, 1, 0.25))
    elif how not in ("pickle", "copy", "recomputed"):
        assert repr(told) == repr(READINGS[how](At(10, 1, 0.25)))


def test_step_and_epoch_are_free() -> None:
    at, reads = watched()
    assert (at.step, at.epoch, len(at), isinstance(at, tuple), isinstance(at, At)) == (10, 1, 3, True, True)
    assert at
    assert not reads.seen


def test_a_copy_is_an_at_too() -> None:
    """As DDP makes one on a GPU: by the constructor."""
    at, _ = watched()
    made = type(at)(*(value for value in at))
    assert made == At(10, 1, 0.25)
    assert pickle.loads(pickle.dumps(at)) == At(10, 1, 0.25)


def test_once_read_it_is_a_plain_one() -> None:
    at, reads = watched()
    assert at.progress == 0.25
    assert type(reads.at(0, 0, 0.0)) is At


def test_what_is_compiled_counts_as_read() -> None:
    for mode, seen in (("off", False), ("default", True)):
        assert plan_run(Config(compile=mode), train_size=20).reads.seen == seen


@pytest.mark.parametrize(
    ("recipe", "changes", "reads"),
    [
        ("cnn_digits", [], False),
        ("transformer_text", [], False),
        ("yolo_shapes", [], True),
        ("yolo_shapes", ["data.augment.mosaic=0"], False),
        ("yolo_shapes", ["data.augment.mosaic_until=1"], False),
    ],
)
def test_of_our_data_only_mosaic_depends_on_the_length(
    recipe: str, changes: list[str], reads: bool, tmp_path: Path
) -> None:
    _, _, data = made(recipe, tmp_path, *changes)
    assert data.reads_progress == reads


def test_a_reading_on_any_rank_counts() -> None:
    def rank(world: World) -> None:
        reads = ProgressReads()
        at = reads.at(0, 0, 0.0)
        if world.rank == 1:
            assert at.progress == 0.0
        assert reads.seen == (world.rank == 1)
        reads.agree(world)
        assert reads.seen

    run_ranks(rank, 2)
