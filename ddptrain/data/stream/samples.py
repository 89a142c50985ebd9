"""The samples of a part of a set, wherever it lies: read by their indices, in any order."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeVar, final

from ddptrain.api.blocks import Blocks
from ddptrain.api.sampler import Sampler
from ddptrain.api.timing import FetchTimes
from ddptrain.data.pictures import Encoded
from ddptrain.data.stream.block_prefetch import PREFETCH_SHARE, Need, prefetched, validation_share
from ddptrain.data.stream.cache import DECODING_S, BlockCache
from ddptrain.data.stream.shards import read_samples
from ddptrain.data.stream.store import Damaged
from ddptrain.data.workers import Key, TrainingKeys, validation_keys
from ddptrain.errors import UserError

_ATTEMPTS = 3

Result = TypeVar("Result")


@final
class StreamSamples:
    """cache: its blocks. fields: a sample's, by name; what a reader gets of each is bytes."""

    def __init__(self, cache: BlockCache, fields: Sequence[str], blocks: Blocks) -> None:
        self.cache = cache
        self.fields = tuple(fields)
        self.blocks = blocks

    def __len__(self) -> int:
        return int(self.blocks.sizes.sum())

    def read(self, ids: Sequence[int], fields: Sequence[str], suspect: bool = False) -> list[list[bytes]]:
        """Of each sample these fields. suspect: their blocks are looked at first, and fetched anew where they
        have suffered on this node's disk. Raises UserError naming what can't be had."""
        which = [self.fields.index(name) for name in fields]
        by_block: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for at, (block, place) in enumerate(self.blocks.of(ids)):
            by_block[block].append((place, at))
        contents: list[list[bytes]] = [[]] * len(ids)
        for block, wanted in by_block.items():
            if suspect:
                self.cache.drop_if_damaged(block)
            places = [place for place, _ in wanted]
            read = partial(read_samples, places=places, fields=len(self.fields))
            samples = read_block(self.cache, block, read)
            for (_, at), sample in zip(wanted, samples, strict=True):
                contents[at] = [sample[i] for i in which]
        return contents

    def in_block_of(self, i: int) -> range:
        """The samples of its block."""
        ((block, place),) = self.blocks.of([i])
        return range(i - place, i - place + int(self.blocks.sizes[block]))

    def decode(self, ids: Sequence[int], fields: Sequence[str], make: Callable[..., Result]) -> list[Result]:
        """What ``make`` gives of these fields of each, which it is given as `Encoded`. Of a sample that it
        refuses, once more if the block has suffered on this node's disk."""
        read = self.read(ids, fields)
        began = time.monotonic()
        decoded = [self._decode_one(i, fields, make, contents) for i, contents in zip(ids, read, strict=True)]
        self.cache.counts[DECODING_S] += time.monotonic() - began
        return decoded

    def encoded(self, i: int, fields: Sequence[str], contents: Sequence[bytes]) -> list[Encoded]:
        """Fields of a sample, with their names: the first one's is the sample's own."""
        names = [Name(self, i), *(Name(self, i, f"the {field} of ") for field in fields[1:])]
        return [Encoded(content, name) for content, name in zip(contents, names, strict=True)]

    def _decode_one(
        self, i: int, fields: Sequence[str], make: Callable[..., Result], contents: list[bytes]
    ) -> Result:
        try:
            return make(*self.encoded(i, fields, contents))
        except UserError:
            (again,) = self.read([i], fields, suspect=True)
            if again == contents:
                raise
        return make(*self.encoded(i, fields, again))

    def following_training(
        self, keys: Iterable[list[Key]], sampler: Sampler, steps: range
    ) -> Iterator[list[Key]]:
        """The same keys; blocks are fetched ahead of them."""
        needs = training_needs(self.blocks, sampler, steps)
        return prefetched(self.cache, keys, training_positions(sampler, steps), needs, PREFETCH_SHARE)

    def following(self, keys: Sequence[list[Key]]) -> Iterator[list[Key]]:
        """The same for batches that are known already."""
        needs = (Need(i, self._blocks_of(batch)) for i, batch in enumerate(keys))
        return prefetched(self.cache, keys, count(), needs, validation_share())

    def _blocks_of(self, batch: list[Key]) -> list[int]:
        """Each once, in order."""
        return list(dict.fromkeys(block for block, _ in self.blocks.of([sample for _, sample, _ in batch])))

    def reading(self) -> FetchTimes:
        """By this rank and its workers."""
        return reading_of(self.cache)


def read_block(cache: BlockCache, block: int, read: Callable[[Path], Result]) -> Result:
    """What ``read`` gets out of a block's file; fetched again where that was removed since, or is damaged.
    Raises UserError naming what can't be had."""
    problem: Exception = Damaged()
    for _ in range(_ATTEMPTS):
        path = cache.fetched(block)
        try:
            return read(path)
        except FileNotFoundError as error:  # removed since: the cache is small, or shared
            problem = error
        except Damaged as error:
            problem = error
            cache.drop_if_damaged(block)
        except OSError as error:
            raise _unreadable(path, error) from error
    key = cache.blocks[block].key
    if isinstance(problem, FileNotFoundError) and cache.in_place:
        raise UserError(f"{path}: is not there, and belongs to the set.", everywhere=False)
    if isinstance(problem, FileNotFoundError):
        raise UserError(
            f"data.source.cache_gb: {key} was removed from the cache three times before it could be read."
            " Make it larger, or give each job a cache of its own.",
            everywhere=False,
        )
    raise UserError(f"{key}: is no block of this set ({problem}). Write the set anew.", everywhere=False)


def reading_of(cache: BlockCache) -> FetchTimes:
    """What this rank and its workers have read by it."""
    fetched, size, damaged, network, decoding = cache.counts.tolist()
    again = f", {damaged:.0f} of them again, for they were damaged" if damaged else ""
    return FetchTimes(network, decoding, f"{fetched:,.0f} blocks fetched, {size / 1e6:,.1f} MB{again}")


def training_needs(blocks: Blocks, sampler: Sampler, steps: range) -> Iterator[Need]:
    """The blocks of each window of these steps; positions count the samples of the whole training."""
    first, last = steps.start * sampler.batch_size, steps.stop * sampler.batch_size
    for epoch in range(first // sampler.size, -(-last // sampler.size)):
        windows = list(blocks.windows(sampler.seed, epoch))
        ends = [begin for begin, _ in windows[1:]] + [sampler.size]
        for (begin, some), end in zip(windows, ends, strict=True):
            begin, end = epoch * sampler.size + begin, epoch * sampler.size + end
            if end > first and begin < last:
                yield Need(begin, some)


def training_positions(sampler: Sampler, steps: range) -> Iterator[int]:
    """How many samples, of all ranks, come before the step of each of this rank's micro-batches."""
    return (step * sampler.batch_size for step in steps for _ in sampler.micro_sizes)


class Name(NamedTuple):
    """Where a sample is, for people."""

    samples: StreamSamples
    i: int
    what: str = ""

    def __str__(self) -> str:
        ((block, place),) = self.samples.blocks.of([self.i])
        return f"{self.what}sample {place} of {self.samples.cache.blocks[block].key}"


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: can't be read ({error.strerror}).", everywhere=False)


def training_keys(stream: StreamSamples | None, sampler: Sampler, steps: range) -> Iterable[list[Key]]:
    """What a training reads, batch by batch; of a stream, blocks are fetched ahead of it."""
    keys = TrainingKeys(sampler, steps)
    return keys if stream is None else stream.following_training(keys, sampler, steps)


def valid_keys(stream: StreamSamples | None, chunks: Sequence[range]) -> Iterable[list[Key]]:
    """What an evaluation reads, likewise."""
    keys = validation_keys(chunks)
    return keys if stream is None else stream.following(keys)


def neighbours(stream: StreamSamples | None, i: int, size: int) -> range:
    """The samples that the i-th may be mixed with: of a set of that size all, of a stream its block's."""
    return range(size) if stream is None else stream.in_block_of(i)
