"""A rank that is slower than the others is named, with what it is slower at, and nobody else ever is."""

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from running import Job

from ddptrain.api.timing import PHASES, Timing
from ddptrain.observe.slow_rank import Slow, SlowRanks

STEP = {"data": 0.01, "forward": 0.03, "backward": 0.05, "optimizer": 0.01}
"""Seconds that each rank spends by itself."""
Changed = Callable[[int, int, dict[str, float]], None]
"""Takes the second, the rank and its step, which it may change."""


Said = dict[tuple[int, int], Slow]


def looked(ranks: int, seconds: int, changed: Changed, noise: float = 0.03, seed: int = 0) -> Said:
    """What is said, by the second in which it is and the rank. Ranks step together at the pace of the
    slowest."""
    generator, watch = random.Random(seed), SlowRanks()
    said: Said = {}
    spent = [dict.fromkeys(PHASES, 0.0) for _ in range(ranks)]
    samples = 0
    for second in range(seconds):
        steps = []
        for rank in range(ranks):
            own = {phase: value * generator.uniform(1 - noise, 1 + noise) for phase, value in STEP.items()}
            changed(second, rank, own)
            steps.append(own)
        longest = max(sum(own.values()) for own in steps)
        count = int(1 / longest)
        samples += 32 * count
        for own, total in zip(steps, spent, strict=True):
            for phase, value in own.items():
                total[phase] += count * value
            total["all_reduce"] += count * (longest - sum(own.values()))
        timings = {rank: Timing(dict(total), samples) for rank, total in enumerate(spent)}
        said |= {(second, slow.rank): slow for slow in watch.look(float(second), timings)}
    return said


def slower(rank: int, by: Mapping[str, float], begins: int = 0, ends: int = 10**9) -> Changed:
    """by: factor of a phase."""

    def changed(second: int, of: int, own: dict[str, float]) -> None:
        if of == rank and begins <= second < ends:
            for phase, factor in by.items():
                own[phase] *= factor

    return changed


PASSES = {"forward": 1.25, "backward": 1.25}


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("by", "reason"),
    [
        (PASSES, "forward and backward"),
        ({"data": 3.0}, "waiting for data"),
        ({"optimizer": 3.0}, "the optimizer"),
    ],
)
def test_it_is_named_once_within_a_minute_with_the_reason(
    ranks: int, by: Mapping[str, float], reason: str
) -> None:
    said = looked(ranks, 300, slower(ranks - 1, by))
    [((second, _), slow)] = said.items()
    assert second < 60
    assert (slow.rank, slow.reason) == (ranks - 1, reason)
    assert slow.share == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ranks", [2, 8])
def test_noise_names_nobody(ranks: int, seed: int) -> None:
    assert looked(ranks, 300, lambda *_: None, noise=0.3, seed=seed) == {}


def test_nor_does_a_disturbance_that_passes() -> None:
    assert looked(4, 300, slower(2, {"forward": 4.0}, begins=100, ends=118)) == {}


def test_who_recovers_is_named_again() -> None:
    def changed(second: int, rank: int, own: dict[str, float]) -> None:
        slower(1, PASSES, ends=60)(second, rank, own)
        slower(1, PASSES, begins=150)(second, rank, own)

    said = looked(3, 300, changed)
    assert [slow.rank for slow in said.values()] == [1, 1]


def test_another_one_is_named_after_the_first() -> None:
    def changed(second: int, rank: int, own: dict[str, float]) -> None:
        slower(1, PASSES, ends=100)(second, rank, own)
        slower(2, {"data": 4.0}, begins=100)(second, rank, own)

    said = looked(3, 300, changed)
    assert [(slow.rank, slow.reason) for slow in said.values()] == [
        (1, "forward and backward"),
        (2, "waiting for data"),
    ]


def test_two_slow_ranks_are_both_named_once() -> None:
    def changed(second: int, rank: int, own: dict[str, float]) -> None:
        slower(1, PASSES)(second, rank, own)
        slower(4, PASSES)(second, rank, own)

    assert sorted(slow.rank for slow in looked(6, 300, changed).values()) == [1, 4]


def test_one_rank_and_a_run_that_stands_still_name_nobody() -> None:
    assert looked(1, 100, slower(0, {"data": 9.0})) == {}
    watch = SlowRanks()
    still = {0: Timing(dict.fromkeys(PHASES, 1.0), 10), 1: Timing(dict.fromkeys(PHASES, 9.0), 10)}
    assert [watch.look(float(second), still) for second in range(100)] == [[]] * 100


OWN_DATA = """
import os, time
from ddptrain.data.images.data import ImageData

def of_kind(kind, **settings):
    data = ImageData(**settings)
    prepare, batches = data.prepare, data.train_batches

    def prepared(world, seed):
        data.sleeps = kind == "loader" and world.rank == 1
        if kind != "quiet":
            core = sorted(os.sched_getaffinity(0))[world.rank]
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), {core})
        prepare(world, seed)

    def slowed(sampler, steps):
        for batch in batches(sampler, steps):
            if data.sleeps:
                time.sleep(0.003)
            yield batch

    data.prepare, data.train_batches = prepared, slowed
    return data
"""
NEIGHBOUR = """
import os, time
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[1]})
while True:
    ends, until = time.perf_counter() + 0.05, time.process_time() + 0.01
    while time.process_time() < until:
        pass
    time.sleep(max(0.0, ends - time.perf_counter()))
"""
"""Takes a fifth of the second core, also while that is shared: 10 ms of its time in each 50."""
SLOWED = {"loader": "waiting for data", "core": "forward and backward", "quiet": ""}
"""Why rank 1 is slow."""


@pytest.mark.faults
@pytest.mark.serial
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each rank")
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("kind", SLOWED)
def test_of_two_real_ranks(tmp_path: Path, kind: str, turn: int) -> None:
    """A step of 15 ms; rank 1 sleeps 3 of them, or its core does something else for a fifth of the time."""
    (tmp_path / "own.py").write_text(OWN_DATA)
    words = (
        "recipe=cnn_cifar10 data=shapes data.source.train=2000 data.source.valid=10 device=cpu model.width=8"
        " train.epochs=100000 train.batch_size=32 observers=[console,jsonl] run.dir=run log.every=200"
        f" data.workers=0 data._target_=own.of_kind +data.kind={kind} train.eval_every=1000000"
        " checkpoint.every=1000000"
    )
    with ExitStack() as stack:
        if kind == "core":
            neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR])
            stack.callback(neighbour.wait)
            stack.callback(neighbour.kill)
        job = Job(words.split(), tmp_path, 2)
        stack.callback(job.end)
        assert job.wait_for_step(1)
        until = time.monotonic() + 60
        while time.monotonic() < until and ("slow       " not in job.text or kind == "quiet"):
            assert job.process.poll() is None, job.text[-3000:]
            time.sleep(0.5)
    said = re.findall(r"^slow       rank (\d) .*others: (.*)$", job.text, re.MULTILINE)
    assert said == ([("1", SLOWED[kind])] if SLOWED[kind] else []), job.text[-3000:]
