"""What a step of several ranks sends: one all-reduce a bucket, DDP's broadcast of buffers that are not
BatchNorm's, nothing else.

Counted by torch's profiler in the operators that all of them go through, so that nothing is missed, whoever
sends it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from toy import FEATURES, Classify, CountPositives, Fit, auto, plain, weights, with_noise

from ddptrain.api.world import World
from ddptrain.distributed import comm
from ddptrain.engine.plan import Plan
from ddptrain.errors import UserError
from ddptrain.testing import run_ranks

COMPRESSIONS = ("none", "bf16", "fp16")
SMALL = 0.0005
STEPS = 6
COUNTED = STEPS - 2
"""Neither the first nor the last, at which it logs, evaluates and saves."""


def squares() -> nn.Module:
    """Matrices alone, each too large for a small bucket with another."""
    return nn.Sequential(*[nn.Linear(n, m, bias=False) for n, m in ((FEATURES, 32), (32, 32), (32, 5))])


def wide() -> nn.Module:
    """More gradients than the first bucket takes, of 1 MiB."""
    return nn.Sequential(nn.Linear(FEATURES, 60000), nn.Linear(60000, 5))


def with_a_table() -> nn.Module:
    """BatchNorm, and a buffer of its own."""
    model = with_noise()
    model.register_buffer("table", torch.ones(3))
    return model


class Case(NamedTuple):
    make: Callable[[], nn.Module] = plain
    task: Callable[..., Classify] = Classify
    bucket_cap_mb: float = 25.0
    micro_batch: int | None = None
    compression: str = "none"
    static_graph: bool = False
    nonfinite: str = "stop"


class Sent(NamedTuple):
    """In all counted steps together."""

    all_reduces: int
    broadcasts: int
    others: int
    buckets: int
    """Of DDP, a step."""


def sent(world: World, case: Case, folder: Path) -> Sent:
    """The counted steps, with what the loop does between them."""
    names: list[str] = []
    wrapped: list[Any] = []

    def counted(steps: Iterable[int]) -> Iterator[int]:
        first, *middle, last = steps
        yield first
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            yield from middle
        names.extend(event.name for event in seen.events() or ())
        yield last

    def task(make: Callable[[], nn.Module]) -> Classify:
        made = case.task(make)
        loss = made.loss

        def watched(model: nn.Module, batch: Any, at: Any) -> Any:
            wrapped[:] = [model]
            return loss(model, batch, at)

        made.loss = watched  # type: ignore[method-assign]
        return made

    plan = Plan(
        steps=STEPS, train_size=100, batch_size=32, micro_batch=case.micro_batch, log_every=100,
        eval_every=100, save_every=100, clip_norm=1.0, skips_nonfinite=case.nonfinite == "skip",
    )  # fmt: skip
    strategy = auto(
        bucket_cap_mb=case.bucket_cap_mb, compression=case.compression, static_graph=case.static_graph
    )
    Fit(plan, make_model=case.make, task=task, strategy=strategy, step_iterator=counted).run(world, folder)
    found = Counter(name for name in names if name.startswith("c10d::"))
    data = wrapped[0]._get_ddp_logging_data()
    buckets = len(str(data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(","))
    reduces, broadcasts = found.pop("c10d::allreduce_", 0), found.pop("c10d::broadcast_", 0)
    return Sent(reduces, broadcasts, found.total(), buckets)


CASES = [
    *(Case(make, bucket_cap_mb=cap) for make in (plain, with_noise, squares) for cap in (SMALL, 25.0)),
    *(Case(with_noise, bucket_cap_mb=SMALL, micro_batch=4, compression=how) for how in COMPRESSIONS),
    *(Case(squares, bucket_cap_mb=SMALL, compression=how) for how in COMPRESSIONS[1:]),
    Case(with_noise, bucket_cap_mb=SMALL, static_graph=True),
    Case(with_noise, bucket_cap_mb=SMALL, nonfinite="skip"),
    Case(task=CountPositives),
    Case(with_a_table),
    Case(wide),
]


def test_one_all_reduce_a_bucket_and_the_buffers(tmp_path: Path) -> None:
    """The ranks' flags travel in a bucket, clipping needs no word, and micro-batches before the last are
    silent. A count that only the device knows needs a message."""

    def rank(world: World) -> list[Sent]:
        return [sent(world, case, tmp_path / f"{i}-{world.rank}") for i, case in enumerate(CASES)]

    ours, theirs = run_ranks(rank, 2)
    assert ours == theirs
    for case, found in zip(CASES, ours, strict=True):
        small = {plain: 2, with_noise: 2, squares: 3}
        buckets = small[case.make] if case.bucket_cap_mb == SMALL else 2 if case.make is wide else 1
        each = buckets + (case.task is CountPositives)
        kinds = 2 if case.make is with_a_table else 0  # of dtypes: float32 and BatchNorm's int64 counter
        assert found == Sent(COUNTED * each, COUNTED * kinds, 0, buckets), case


class Broadcasting(Classify):
    """As DDP does by default: all buffers in each step."""

    def loss(self, model: nn.Module, batch: Any, at: Any) -> Any:
        model.broadcast_buffers = True  # type: ignore[assignment]
        return super().loss(model, batch, at)


def test_batchnorms_statistics_are_rank_0s_as_if_sent_in_each_step(tmp_path: Path) -> None:
    def rank(world: World) -> list[torch.Tensor]:
        plan = Plan(steps=12, train_size=100, batch_size=32, eval_every=5)
        tasks = {"quiet": Classify, "sending": Broadcasting}
        fits = {name: Fit(plan, make_model=with_noise, task=task) for name, task in tasks.items()}
        return [weights(fit.run(world, tmp_path / f"{name}{world.rank}")[0]) for name, fit in fits.items()]

    for quiet, sending in run_ranks(rank, 3):
        assert torch.equal(quiet, sending)


@pytest.mark.parametrize("size", [0, 5, comm._PIECE, comm._PIECE + 3])
def test_bytes_come_in_pieces(size: int) -> None:
    def rank(world: World) -> bool:
        content = np.random.default_rng(0).bytes(size)
        return comm.bytes_from_first_rank(world, content if world.is_first else b"") == content

    assert run_ranks(rank, 3) == [True] * 3


def refused_before(world: World, inner: str) -> tuple[str, list[int]]:
    """What a rank says where one is refused before a collective inside the work, or in it; and whether the
    ranks are still at the same one."""

    def refused() -> int:
        raise UserError("one rank's own files are damaged", everywhere=False)

    def work() -> int:
        if inner == "in the inner one":
            return comm.on_all_ranks(world, lambda: refused() if world.rank == 1 else 3)
        if world.rank == 1:
            refused()
        inside = {"once a node": comm.once_a_node, "on all ranks": comm.on_all_ranks}
        return inside[inner](world, lambda: 3)

    with pytest.raises(UserError) as caught:
        comm.on_all_ranks(world, work)
    assert caught.value.everywhere
    return str(caught.value), comm.from_all_ranks(world, world.rank)


@pytest.mark.parametrize("inner", ["once a node", "on all ranks", "in the inner one"])
def test_one_rank_is_refused_before_a_collective_that_the_others_wait_in(inner: str) -> None:
    assert (
        run_ranks(partial(refused_before, inner=inner), 2)
        == [("one rank's own files are damaged", [0, 1])] * 2
    )
