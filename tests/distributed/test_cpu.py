"""Cores by affinity, by a container's quota, and by what a sweep has given; and how ranks share them."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddptrain.api.world import World
from ddptrain.distributed import cpu
from ddptrain.distributed.cpu import (
    cores_of_rank,
    share_cores,
    threads_of,
    with_shared_cores,
    workers_of,
)
from ddptrain.testing import run_ranks


@pytest.mark.parametrize(("quota", "most"), [(None, 4), (1.5, 1), (0.2, 1), (2.0, 2), (64.0, 4)])
def test_no_more_than_the_container_has_time_for(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, most: int
) -> None:
    monkeypatch.delenv(cpu.CORES, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(cpu, "quota", lambda: quota)
    assert cpu.cores() == most
    monkeypatch.setenv(cpu.CORES, "3")
    assert cpu.cores() == 3


def shares(
    monkeypatch: pytest.MonkeyPatch, bound: list[set[int]], local_size: int, quota: float | None = None
) -> list[int]:
    """Of the ranks of a job in which the one with number i may run on the cores of ``bound[i]``."""
    monkeypatch.setattr(cpu, "quota", lambda: quota)
    masks = [sum(1 << core for core in cores) for cores in bound]
    found = []
    for rank, own in enumerate(bound):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, own=own: own)
        world = World(rank, len(bound), rank % local_size, local_size)
        found.append(cores_of_rank(with_shared_cores(world, masks)))
    return found


def test_ranks_share_the_cores_that_they_are_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu.CORES, raising=False)
    first, second = set(range(8)), set(range(8, 16))
    assert shares(monkeypatch, [first | second] * 4, 4) == [4] * 4
    assert shares(monkeypatch, [first, first, second, second], 4) == [4] * 4  # a socket for two each
    assert shares(monkeypatch, [{0, 1}, {2, 3}, {4, 5}, {6, 7, 8}], 4) == [2, 2, 2, 3]
    assert shares(monkeypatch, [first, first, first, second], 4) == [2, 2, 2, 8]
    assert shares(monkeypatch, [first, second] * 2, 2) == [8] * 4  # two nodes: the numbers are each one's own
    assert shares(monkeypatch, [first, second], 2, quota=6.0) == [3, 3]  # a container's time is for all
    half = max(1, (os.cpu_count() or 1) // 2)
    assert shares(monkeypatch, [set(), set()], 2) == [half, half]  # a system that does not say
    monkeypatch.setenv(cpu.CORES, "6")
    assert shares(monkeypatch, [first, second], 2) == [3, 3]


@pytest.mark.parametrize(
    ("cores", "ranks", "workers", "threads"),
    [
        *((4, 1, 0, 4), (4, 2, 0, 2), (4, 3, 0, 1), (4, 4, 0, 1), (4, 8, 0, 1), (1, 1, 0, 1)),
        *((4, 1, 1, 3), (4, 1, 3, 1), (4, 1, 8, 1), (4, 2, 1, 1), (8, 2, 1, 3), (64, 8, 7, 1), (96, 8, 4, 8)),
    ],
)
def test_a_rank_gets_the_threads_that_workers_leave(
    cores: int, ranks: int, workers: int, threads: int
) -> None:
    assert threads_of(cores // ranks, workers) == threads


@pytest.mark.parametrize(
    ("cores", "ranks", "on_gpu", "on_cpu"),
    [
        (1, 1, 0, 0),
        (2, 1, 1, 1),
        (4, 1, 3, 2),
        (4, 2, 1, 1),
        (4, 4, 0, 0),
        (4, 8, 0, 0),
        (64, 2, 31, 8),
        (16, 1, 15, 8),
    ],
)
def test_workers_take_cores_that_are_free(cores: int, ranks: int, on_gpu: int, on_cpu: int) -> None:
    assert workers_of(cores // ranks, on_cpu=False) == on_gpu
    assert workers_of(cores // ranks, on_cpu=True) == on_cpu


@given(cores=st.integers(1, 512), ranks=st.integers(1, 128), workers=st.integers(0, 64), on_cpu=st.booleans())
def test_no_combination_oversubscribes(cores: int, ranks: int, workers: int, on_cpu: bool) -> None:
    """Beyond what was asked for: a thread for each rank, and the workers."""
    threads = threads_of(cores // ranks, workers)
    assert ranks * (threads + workers) <= max(cores, ranks * (1 + workers))
    chosen = workers_of(cores // ranks, on_cpu)
    assert ranks * (threads_of(cores // ranks, chosen) + chosen) <= max(cores, ranks)


def test_forked_ranks_keep_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool of threads that their parent has is not there, and torch would wait for it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv(cpu.CORES, "2")
    torch.set_num_threads(2)
    large = torch.randn(600, 600)
    try:
        expected = large @ large

        def rank(world: World) -> Tensor:
            share_cores(world, strict=False)
            return large @ large

        [product] = run_ranks(rank, 1)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(product, expected)
