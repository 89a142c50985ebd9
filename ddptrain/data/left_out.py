"""What can't be used of a set and is left out of it, where ``on_error=skip`` asks for that.

All of it is known before the first step: a set with 3 broken files is the set without these 3. So order,
augmentation and metrics are the same on any number of ranks and workers, and after a resume, and the engine
knows nothing of it.
"""

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddptrain.api.world import World
from ddptrain.data.images.source import ArraySplit, ImageSet, ImageSource, Split
from ddptrain.data.pictures import Box
from ddptrain.data.pipeline import Samples
from ddptrain.data.workers import KeptLoader
from ddptrain.distributed.comm import from_all_ranks, on_all_ranks
from ddptrain.errors import UserError
from ddptrain.text import first_few

log = logging.getLogger(__name__)

OnError = Literal["stop", "skip"]
HINT = " Or go on without such samples: data.on_error=skip."
BROKEN = (OSError, EOFError, SyntaxError, struct.error)
"""What Pillow and other readers raise where a file is broken: all else in a user's dataset is its mistake."""
_AT_ONCE = 16
"""Samples that a loader process is given at a time."""
_LISTED = 1000
_SHOWN = 3


class UnusableSample(UserError):
    """One sample can't be used, and a run may go on without it. Its message ends with `HINT`."""


class _Reader(Dataset[Any]):
    """What is wrong with samples, by their indices. What is wrong with more than one is returned as its
    UserError."""

    def __init__(self, read: Callable[[int], object]) -> None:
        self._read = read

    def __getitems__(self, ids: list[int]) -> list[tuple[int, str]] | UserError:
        unreadable = []
        for i in ids:
            try:
                self._read(i)
            except UnusableSample as error:
                unreadable.append((i, str(error).removesuffix(HINT)))
            except UserError as error:
                return error
        return unreadable


def unreadable(world: World, size: int, read: Callable[[int], object], workers: int) -> dict[int, str]:
    """What is wrong with those of ``size`` samples that ``read`` refuses as `UnusableSample`, by their
    indices in order; the same on every rank.

    Collectives. Each rank reads its share of the samples, by its loader processes.
    """
    own = range(size)[world.rank :: world.size]
    keys = [list(own[i : i + _AT_ONCE]) for i in range(0, len(own), _AT_ONCE)]
    loader = KeptLoader(_Reader(read), workers, torch.device("cpu"))
    by_rank = from_all_ranks(world, on_all_ranks(world, lambda: list(loader.batches(keys))))
    return dict(sorted(chain.from_iterable(chain.from_iterable(by_rank))))


def readable(
    world: World, part: str, size: int, read: Callable[[int], object], workers: int
) -> tuple[Tensor, list[str]]:
    """int64 (k,), the indices of those that can be read, and what is wrong with the others. As `unreadable`.

    part: in words. Raises UserError where none is left.
    """
    broken = unreadable(world, size, read, workers)
    lines = list(broken.values())
    if size and len(lines) == size:
        more = f"\n  and {size - _SHOWN} more" if size > _SHOWN else ""
        shown = "".join(f"\n  {line}" for line in lines[:_SHOWN])
        raise UserError(f"data.on_error=skip: no sample is left for {part}. Left out:{shown}{more}")
    kept = torch.ones(size, dtype=torch.bool)
    kept[list(broken)] = False
    return kept.nonzero()[:, 0], lines


def check_skip(on_error: OnError, no_skip: str) -> None:
    """no_skip: why ``on_error=skip`` can't be had, if it can't. Raises UserError where it is asked for."""
    if on_error == "skip" and no_skip:
        raise UserError(f"data.on_error=skip: {no_skip}. Set data.on_error=stop.")


def opened_set(source: ImageSource, root: Path, on_error: OnError, world: World, workers: int) -> ImageSet:
    """The set, under ``skip`` without what can't be read. As `readable`."""
    opened = on_all_ranks(world, lambda: source.open(root))  # a node may have a bad copy
    if on_error == "stop":
        return opened
    parts: list[Split] = []
    lines: list[str] = []
    for name, split in (("training", opened.train), ("validation", opened.valid)):
        if isinstance(split, ArraySplit):  # was read already
            parts.append(split)
            continue
        ids, wrong = readable(world, name, len(split), Samples(split).check, workers)
        parts.append(KeptSplit(split, ids) if wrong else split)
        lines += wrong
    tell(lines)
    train, valid = parts
    before, after = (split.class_counts(len(opened.classes)) for split in (opened.train, train))
    lost = (before > 0) & (after == 0)
    if lost.any():
        names = [name for name, gone in zip(opened.classes, lost.tolist(), strict=True) if gone]
        raise UserError(
            f"data.on_error=skip: no training sample is left of {first_few(names, 5)}. Mend some of its"
            " files, or take it out of the set."
        )
    return replace(opened, train=train, valid=valid, skipped=lines)


def tell(lines: Sequence[str]) -> None:
    """A line of the log for each thing that is left out."""
    for line in lines[:_LISTED]:
        log.warning("left out   %s", line)
    if len(lines) > _LISTED:
        log.warning("left out   and %s more", f"{len(lines) - _LISTED:,}")


def in_words(skipped: Sequence[str]) -> str:
    """For the line that describes the data."""
    return f", {len(skipped):,} left out" if skipped else ""


@contextmanager
def skippable(hint: str = HINT) -> Iterator[None]:
    """UserErrors inside become `UnusableSample`: they concern one sample, and their message says how to leave
    it out. hint: how, for a set that can't be read under ``skip`` as it is."""
    try:
        yield
    except UserError as error:
        raise UnusableSample(f"{error}{hint}", everywhere=False) from error


@final
class KeptSplit(Split):
    """Some images of a split: ids, int64 (k,)."""

    def __init__(self, split: Split, ids: Tensor) -> None:
        self._split = split
        self._ids = ids
        self.labels = split.labels[ids]
        self.shape = split.shape
        self.full_size = split.full_size

    def images(self, ids: Tensor) -> Tensor:
        return self._split.images(self._ids[ids])

    def cropped(self, i: int, box_of: Callable[[int, int], Box]) -> Tensor:
        return self._split.cropped(int(self._ids[i]), box_of)

    def encoded(self, i: int) -> bytes:
        return self._split.encoded(int(self._ids[i]))

    def fingerprints(self, ids: Sequence[int]) -> Iterator[bytes]:
        return self._split.fingerprints([int(self._ids[i]) for i in ids])
