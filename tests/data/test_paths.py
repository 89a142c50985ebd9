"""File names and labels lie in memory that loader processes share."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from ddptrain.data.images.folder import FolderSplit
from ddptrain.data.paths import Paths
from ddptrain.data.workers import read_by_workers

ODD = [os.fsdecode(b"caf\xe9/1.jpg"), "\u732b/1.jpg", "a b.png", ""]
"""Names: one that is no UTF-8, one whose letters take three bytes each, ..."""


def test_names_come_back_as_they_were() -> None:
    paths = Paths(Path("/in"), ODD)
    assert len(paths) == 4
    assert list(paths) == [os.path.join("/in", name) for name in ODD]
    assert paths[1] == "/in/\u732b/1.jpg"
    assert list(Paths(Path("/in"), [])) == []


class Weighed(Dataset[Any]):
    """Answers with the memory of its process, when that has looked at every page of a split's names."""

    def __init__(self, split: FolderSplit) -> None:
        self._split = split

    def __getitems__(self, keys: list[int]) -> int:
        assert int(self._split.labels.sum()) >= 0
        files = self._split.files
        assert all(files[i].endswith(".JPEG") for i in range(0, len(files), 97))
        rollup = Path("/proc/self/smaps_rollup").read_text()
        (line,) = (line for line in rollup.splitlines() if line.startswith("Pss:"))
        return int(line.split()[1]) * 1024


def weight(count: int, workers: int) -> int:
    """Bytes that the workers take together (proportional set size), with so many names like ImageNet's."""
    names = (f"n{i // 1300:08}/n{i // 1300:08}_{i}.JPEG" for i in range(count))
    split = FolderSplit(Paths(Path("/data/imagenet/train"), names), torch.arange(count) // 1300, 224)
    found = list(read_by_workers(Weighed(split), [[0]] * (2 * workers), workers, torch.device("cpu")))
    return sum(found[-workers:])  # the workers answer in turns


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("count", "workers", "most"),
    [(200_000, 2, 25e6), pytest.param(1_281_167, 8, 300e6, marks=pytest.mark.long)],
)
def test_workers_share_names_and_labels(count: int, workers: int, most: float) -> None:
    """As a list, they would take 30 and 160 MB in each."""
    took = weight(count, workers) - weight(2, workers)
    print(f"{count:,} names, {workers} workers: {took / 1e6:.0f} MB together")
    assert took < most
