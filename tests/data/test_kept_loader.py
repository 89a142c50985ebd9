"""Evaluations are read by loader processes that stay, ahead of time where the engine asks for them early."""

import gc
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from toy import Fit, Vectors

from ddptrain.api.recipe import Batch
from ddptrain.api.world import World
from ddptrain.data.workers import KeptLoader, read_by_workers
from ddptrain.engine.plan import Plan
from ddptrain.errors import UserError

CPU = torch.device("cpu")
KEYS = [[0, 1], [2, 3], [4, 5], [6]]


class Told(Dataset[Any]):
    """Batches of their keys and the process that has read them; leaves a file for each."""

    def __init__(self, folder: Path, broken: int = -1, bug: int = -1) -> None:
        self.folder = folder
        self.broken = broken
        self.bug = bug

    def __getitems__(self, keys: list[int]) -> Any:
        (self.folder / f"{keys[0]}").touch()
        if self.broken in keys:
            return UserError(f"sample {self.broken} can't be read")
        if self.bug in keys:
            raise ZeroDivisionError
        return keys, os.getpid()


def read(batches: Iterator[Any]) -> tuple[list[list[int]], set[int]]:
    keys, processes = zip(*batches, strict=True)
    return list(keys), set(processes)


def test_the_same_processes_read_each_time(tmp_path: Path) -> None:
    loader = KeptLoader(Told(tmp_path), 2, CPU)
    readings = [read(loader.batches(KEYS)) for _ in range(3)]
    assert [keys for keys, _ in readings] == [KEYS] * 3
    processes = set.union(*(processes for _, processes in readings))
    assert len(processes) == 2
    assert os.getpid() not in processes


def test_other_keys_each_time(tmp_path: Path) -> None:
    loader = KeptLoader(Told(tmp_path), 1, CPU)
    for keys in (KEYS, KEYS[::-1], KEYS[:2], [[9], [8, 7], [6]]):
        assert read(loader.batches(keys))[0] == keys


def test_a_list_is_read_at_once_and_what_comes_one_by_one_when_it_is_asked_for(tmp_path: Path) -> None:
    for keys, at_once in ((KEYS, True), ((key for key in KEYS), False)):
        folder = tmp_path / str(at_once)
        folder.mkdir()
        batches = KeptLoader(Told(folder), 1, CPU).batches(keys)
        until = time.monotonic() + (60 if at_once else 2)
        while not any(folder.iterdir()) and time.monotonic() < until:
            time.sleep(0.05)
        assert any(folder.iterdir()) == at_once
        assert read(batches)[0] == KEYS


def test_while_they_are_in_use_others_read(tmp_path: Path) -> None:
    loader = KeptLoader(Told(tmp_path), 1, CPU)
    first = loader.batches(KEYS)
    keys, one = read(loader.batches(KEYS[:3]))
    assert keys == KEYS[:3]
    keys, other = read(first)
    assert keys == KEYS
    assert not one & other
    abandoned = loader.batches(KEYS)
    next(abandoned)
    assert read(loader.batches(KEYS))[0] == KEYS


@pytest.mark.parametrize("read_to_the_end", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_its_processes_end_with_it_though_it_is_part_of_a_cycle(
    tmp_path: Path, kept: bool, read_to_the_end: bool
) -> None:
    loader = KeptLoader(Told(tmp_path), 2, CPU) if kept else None
    before = set(multiprocessing.active_children())
    batches = loader.batches(KEYS) if loader else read_by_workers(Told(tmp_path), KEYS, 2, CPU)
    for _ in batches if read_to_the_end else [next(batches)]:
        pass
    own = set(multiprocessing.active_children()) - before
    assert len(own) == (0 if read_to_the_end and not kept else 2)
    cycle: list[Any] = [loader, batches]
    cycle.append(cycle)
    del loader, batches, cycle
    began = time.monotonic()
    gc.collect()
    assert (
        time.monotonic() - began < 4
    )  # torch waits five seconds for a process that does not hear of its end
    assert not any(process.is_alive() for process in own)


@pytest.mark.parametrize("mistake", ["broken", "bug"])
@pytest.mark.parametrize("kept", [True, False])
def test_so_they_do_where_a_traceback_holds_it(tmp_path: Path, kept: bool, mistake: str) -> None:
    wrong = Told(tmp_path, broken=2) if mistake == "broken" else Told(tmp_path, bug=2)
    loader = KeptLoader(wrong, 2, CPU) if kept else None
    before = set(multiprocessing.active_children())
    batches = loader.batches(KEYS) if loader else read_by_workers(wrong, KEYS, 2, CPU)
    next(batches)
    own = set(multiprocessing.active_children()) - before
    with pytest.raises(UserError if mistake == "broken" else ZeroDivisionError) as raised:
        next(batches)
    cycle: list[Any] = [loader, batches, raised]
    cycle.append(cycle)
    del loader, batches, raised, cycle
    gc.collect()
    assert len(own) == 2
    assert not any(process.is_alive() for process in own)


def test_one_batch_is_read_here(tmp_path: Path) -> None:
    assert read(KeptLoader(Told(tmp_path), 2, CPU).batches([[3, 4]])) == ([[3, 4]], {os.getpid()})


def test_a_broken_sample_is_told_of_each_time(tmp_path: Path) -> None:
    loader = KeptLoader(Told(tmp_path, broken=4), 2, CPU)
    for _ in range(2):
        with pytest.raises(UserError, match="sample 4 can't be read"):
            list(loader.batches(KEYS))


class Noted(Vectors):
    """Notes when an evaluation is asked for, and when its batches are read."""

    def __init__(self, train: int) -> None:
        super().__init__(train)
        self.notes: list[str] = []

    def train_batches(self, *given: Any) -> Iterator[Any]:
        for batch in super().train_batches(*given):
            self.notes.append("step")
            yield batch

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Batch]:
        self.notes.append("ask")
        return self._noted(chunks)

    def _noted(self, chunks: Sequence[range]) -> Iterator[Batch]:
        self.notes.append("read")
        yield from super().valid_batches(chunks)


def test_an_evaluation_is_asked_for_before_the_steps_ahead_of_it(tmp_path: Path) -> None:
    data = Noted(40)
    fit = Fit(Plan(steps=4, train_size=40, batch_size=10, eval_every=2))
    fit.train(fit.task(fit.make_model), data, World(), tmp_path)
    rehearsal = ["step", "ask", "read"]
    assert data.notes == [*rehearsal, "ask", "step", "read", "ask", "step", "step", "read"]


class CountedCopies(Told):
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with (self.folder / "copies").open("a") as file:
            file.write("x")


def test_one_batch_is_read_here_of_one_copy(tmp_path: Path) -> None:
    """Of a set in memory a copy for each evaluation would cost as much as the training."""
    loader = KeptLoader(CountedCopies(tmp_path), 1, CPU)
    for _ in range(3):
        assert read(loader.batches(KEYS[:1])) == (KEYS[:1], {os.getpid()})
    assert (tmp_path / "copies").read_text() == "x"
