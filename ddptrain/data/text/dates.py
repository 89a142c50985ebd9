"""Dates as people write them, with their ISO form: pairs of texts, drawn by the program."""

import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from ddptrain.api.recipe import Data
from ddptrain.api.rng import derive_seed
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.identity import digest
from ddptrain.data.prefetch import to_device
from ddptrain.errors import UserError, check_least

PADDING, BEGIN, END = 0, 1, 2
CHARACTERS = "".join(map(chr, range(32, 127)))
VOCABULARY = 3 + len(CHARACTERS)
"""Tokens: padding, begin, end, and the printable characters of ASCII."""

_FIRST_DAY = datetime.date(1900, 1, 1).toordinal()
_DAYS = datetime.date(2100, 1, 1).toordinal() - _FIRST_DAY
_HELD_OUT = 10  # Every tenth day, by a hash, is seen in validation only

_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _ordinal(day: int) -> str:
    ending = "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


_FORMATS: tuple[Callable[[datetime.date], str], ...] = (
    lambda d: f"{d.day} {_MONTHS[d.month - 1]} {d.year}",
    lambda d: f"{_MONTHS[d.month - 1]} {d.day}, {d.year}",
    lambda d: f"{_ordinal(d.day)} of {_MONTHS[d.month - 1]} {d.year}",
    lambda d: f"{_MONTHS[d.month - 1]} {_ordinal(d.day)}, {d.year}",
    lambda d: f"{_WEEKDAYS[d.weekday()]}, {d.day} {_MONTHS[d.month - 1]} {d.year}",
    lambda d: f"{_WEEKDAYS[d.weekday()][:3]} {_MONTHS[d.month - 1][:3]} {d.day} {d.year}",
    lambda d: f"{d.day}-{_MONTHS[d.month - 1][:3]}-{d.year}",
    lambda d: f"{d.day}.{d.month}.{d.year}",
    lambda d: f"{d.day:02}.{d.month:02}.{d.year}",
    lambda d: f"{d.year} {_MONTHS[d.month - 1]} {d.day}",
)
_CASES: tuple[Callable[[str], str], ...] = (str, str.lower, str.upper)


class Pairs(NamedTuple):
    """A batch. source: int64 (n, `DatePairs.longest`), padded at the end. target: int64 (n, length + 1), from
    BEGIN to END; the model is given ``target[:, :-1]`` and has to tell ``target[:, 1:]``."""

    source: Tensor
    target: Tensor


def encoded(text: str, key: str) -> list[int]:
    """The tokens of a text. Raises UserError, naming ``key``, for what is not printable ASCII."""
    unknown = sorted(set(text) - set(CHARACTERS))
    if unknown:
        raise UserError(f"{key}: {', '.join(map(repr, unknown))}: takes printable ASCII only.")
    return [3 + ord(character) - ord(CHARACTERS[0]) for character in text]


def decoded(tokens: Sequence[int]) -> str:
    """The text of tokens, up to END."""
    kept = list(tokens)
    kept = kept[: kept.index(END)] if END in kept else kept
    return "".join(CHARACTERS[token - 3] for token in kept if token > END)


@final
class DatePairs(Data):
    """``3rd of MARCH 1998`` -> ``1998-03-03``, in ten ways of writing and three of using capitals, from
    1900 to 2099. A pair follows from (seed, its index); no day is in both parts.

    train, valid: pairs of each part.
    """

    longest = 32
    """Characters of a source."""
    target_length = 11
    """Tokens to tell: ten characters and END."""

    def __init__(self, train: int = 20_000, valid: int = 2_000, seed: int = 0) -> None:
        check_least("data", 1, train=train, valid=valid)
        self._sizes = (train, valid)
        self._seed = seed
        self._prepared: _Prepared | None = None

    def prepare(self, world: World, seed: int) -> None:
        trained_days: list[int] = []
        held_out_days: list[int] = []
        for day in range(_FIRST_DAY, _FIRST_DAY + _DAYS):
            (trained_days if derive_seed(day) % _HELD_OUT else held_out_days).append(day)
        sizes, device = self._sizes, world.device
        train = _random_pairs(sizes[0], trained_days, derive_seed(self._seed, 0))
        valid = _random_pairs(sizes[1], held_out_days, derive_seed(self._seed, 1))
        self._prepared = _Prepared(to_device(train, device), to_device(valid, device), device)

    @property
    def _ready(self) -> "_Prepared":
        assert self._prepared is not None, "prepare comes first"
        return self._prepared

    @property
    def train_size(self) -> int:
        return self._sizes[0]

    @property
    def valid_size(self) -> int:
        return self._sizes[1]

    @property
    def identity(self) -> str:
        return digest([repr(("dates", self._sizes, self._seed)).encode()])

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Pairs]:
        train, _, device = self._ready
        for ids, _ in sampler.samples(steps, device):
            yield Pairs(train.source[ids], train.target[ids])

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Pairs]:
        valid = self._ready.valid
        for chunk in chunks:
            chosen = slice(chunk.start, chunk.stop)
            yield Pairs(valid.source[chosen], valid.target[chosen])

    def preview(self) -> None:
        return None

    def describe(self) -> str:
        train, valid = self._sizes
        return f"dates: {train:,} pairs to train, {valid:,} of other days held out"

    def examples(self, count: int) -> Pairs:
        """The first held-out pairs."""
        valid = self._ready.valid
        return Pairs(valid.source[:count], valid.target[:count])


class _Prepared(NamedTuple):
    """Both parts, on the device."""

    train: Pairs
    valid: Pairs
    device: torch.device


def padded(text: str, key: str) -> list[int]:
    """The tokens of a source, filled up to `DatePairs.longest`. Raises UserError where it is too long."""
    tokens = encoded(text, key)
    if not 1 <= len(tokens) <= DatePairs.longest:
        raise UserError(f"{key}: has {len(tokens)} characters; takes 1 to {DatePairs.longest}.")
    return tokens + [PADDING] * (DatePairs.longest - len(tokens))


def _random_pairs(count: int, days: Sequence[int], seed: int) -> Pairs:
    sources, targets = [], []
    for i in range(count):
        day = datetime.date.fromordinal(days[derive_seed(seed, i, 0) % len(days)])
        text = _FORMATS[derive_seed(seed, i, 1) % len(_FORMATS)](day)
        text = _CASES[derive_seed(seed, i, 2) % len(_CASES)](text)
        sources.append(padded(text, "data"))
        targets.append([BEGIN, *encoded(day.isoformat(), "data"), END])
    return Pairs(torch.tensor(sources), torch.tensor(targets))
