"""Cores by affinity, by a container's quota, and by what a sweep has given."""

import os

import pytest

from ddptrain.distributed import cores


@pytest.mark.parametrize(("quota", "most"), [(None, 4), (1.5, 1), (0.2, 1), (2.0, 2), (64.0, 4)])
def test_no_more_than_the_container_has_time_for(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, most: int
) -> None:
    monkeypatch.delenv(cores.CORES, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(cores, "quota", lambda: quota)
    assert cores.cores() == most
    monkeypatch.setenv(cores.CORES, "3")
    assert cores.cores() == 3
