"""Few combinations of many settings, in which any two values of two settings meet."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
_CHOICES = 12
"""Random completions of a pair, of which the one is taken that has most pairs that are still to come."""
_TRIES = 2000
"""After so many without one that is possible, two values are taken not to go together."""


def product_of(choices: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Every case."""
    return [dict(zip(choices, case, strict=True)) for case in itertools.product(*choices.values())]


def pairwise_of(
    choices: Mapping[str, Sequence[Any]], possible: Callable[[Case], bool] = lambda case: True, seed: int = 1
) -> list[Case]:
    """Cases of the product that are ``possible``; each two values that can be in one are in one. The same for
    a seed."""
    dice, cases = random.Random(seed), []
    values = [(name, value) for name, of_name in choices.items() for value in of_name]
    places = [[i for i, (name, _) in enumerate(values) if name == setting] for setting in choices]
    owner = {place: i for i, of_setting in enumerate(places) for place in of_setting}
    pairs = itertools.combinations(range(len(values)), 2)
    missing = dict.fromkeys((a, b) for a, b in pairs if owner[a] != owner[b])  # in order: a seed's cases stay

    def completed(a: int, b: int) -> list[int]:
        drawn = [of_setting[int(dice.random() * len(of_setting))] for of_setting in places]
        drawn[owner[a]], drawn[owner[b]] = a, b
        return drawn

    while missing:
        a, b = next(iter(missing))
        found: list[list[int]] = []
        for _ in range(_TRIES):
            drawn = completed(a, b)
            if possible(dict(values[place] for place in drawn)):
                found.append(drawn)
            if len(found) == _CHOICES:
                break
        if not found:
            del missing[a, b]
            continue
        best = max(found, key=lambda drawn: sum(p in missing for p in itertools.combinations(drawn, 2)))
        for pair in itertools.combinations(best, 2):
            missing.pop(pair, None)
        cases.append(dict(values[place] for place in best))
    return cases


def name_of(case: Case) -> str:
    """For a test's id: ``ddp2-bf16-average``; what is off is left out."""
    words = [name if value is True else str(value) for name, value in case.items() if value]
    return "-".join(words)
