"""What a search draws from: for each key the values that it may have, and how these are written."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

Point = Mapping[str, str]
"""One value for each range: texts as on the command line, by the ranges' names."""


@final
@dataclass(frozen=True, slots=True)
class Numbers:
    """From ``low`` to ``high``, both among them."""

    name: str
    """The word up to its ``=``."""
    low: float
    high: float
    log: bool = False
    """Drawn evenly by their logarithms."""
    whole: bool = False
    steps: tuple[str, ...] = ()
    """Of a ``range(...)``: its values; the numbers are the places among them."""

    def read(self, text: str) -> float | None:
        """The number that a text stands for; None where it is not among these."""
        if self.steps:
            return self.steps.index(text) if text in self.steps else None
        try:
            number = int(text) if self.whole else float(text)
        except ValueError:
            return None
        return number if self.low <= number <= self.high else None

    def write(self, number: float) -> str:
        """Fractions with six significant digits: what is drawn is what the table shows."""
        if self.steps:
            return self.steps[round(number)]
        if self.whole:
            return str(round(number))
        return repr(min(max(float(f"{number:.6g}"), self.low), self.high))

    @property
    def count(self) -> float:
        """Of its values; infinity where it has fractions."""
        return self.high - self.low + 1 if self.whole else math.inf

    def ends(self) -> tuple[str, ...]:
        return self.write(self.low), self.write(self.high)

    def every(self) -> Iterator[str]:
        """Its values, where they can be counted."""
        assert self.whole
        return (self.write(number) for number in range(int(self.low), int(self.high) + 1))

    def __str__(self) -> str:
        shape = f"{'whole numbers ' if self.whole else ''}from {self.ends()[0]} to {self.ends()[1]}"
        if self.steps:
            shape = f"{len(self.steps)} values from {self.steps[0]} to {self.steps[-1]}"
        return f"{self.name}: {shape}{', by their logarithm' if self.log else ''}"


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """One of several, in no order."""

    name: str
    texts: tuple[str, ...]

    def read(self, text: str) -> str | None:
        return text if text in self.texts else None

    def write(self, text: str) -> str:
        return text

    @property
    def count(self) -> float:
        return len(self.texts)

    def ends(self) -> tuple[str, ...]:
        return self.texts

    def every(self) -> Iterator[str]:
        return iter(self.texts)

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(self.texts)}"


Range = Numbers | Choice


def ends(ranges: Sequence[Range]) -> list[Point]:
    """Points that together have each end of each range, and each choice."""
    first = {each.name: each.ends()[0] for each in ranges}
    return [first, *({**first, each.name: end} for each in ranges for end in each.ends()[1:])]
