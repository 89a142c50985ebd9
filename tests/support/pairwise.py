"""Few combinations of many settings, in which any two values of two settings meet."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Excluded = Callable[[Case], Any]
"""Whether a case can't be. It is asked of incomplete cases too: a setting that it reads may be missing."""
_TRIES = 12
"""Random completions of a pair, of which the one is taken that has most pairs that are still to come. Where
none is possible, two values are taken not to go together."""


def product_of(choices: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Every case."""
    return [dict(zip(choices, case, strict=True)) for case in itertools.product(*choices.values())]


def pairwise_of(
    choices: Mapping[str, Sequence[Any]], excluded: Sequence[Excluded] = (), seed: int = 1
) -> list[Case]:
    """Cases of the product that nothing excludes; each two values that can be in one are in one. The same for
    a seed."""
    dice, cases = random.Random(seed), []

    def completed(pair: Sequence[tuple[str, Any]]) -> Case | None:
        """By random values, setting by setting; None where one is left without a value."""
        case = dict(pair)
        if _is_excluded(case, excluded):
            return None
        for name in dice.sample(list(choices), len(choices)):
            if name not in case:
                values = [v for v in choices[name] if not _is_excluded({**case, name: v}, excluded)]
                if not values:
                    return None
                case[name] = dice.choice(values)
        return {name: case[name] for name in choices}

    settings = [[(name, value) for value in values] for name, values in choices.items()]
    both = itertools.chain.from_iterable(
        itertools.starmap(itertools.product, itertools.combinations(settings, 2))
    )
    missing = dict.fromkeys(both)  # in order: a seed's cases stay
    while missing:
        pair = next(iter(missing))
        best = max(
            (case for _ in range(_TRIES) if (case := completed(pair)) is not None),
            key=lambda case: sum(met in missing for met in itertools.combinations(case.items(), 2)),
            default=None,
        )
        if best is None:
            del missing[pair]
            continue
        for met in itertools.combinations(best.items(), 2):
            missing.pop(met, None)
        cases.append(best)
    return cases


def _is_excluded(case: Case, excluded: Sequence[Excluded]) -> bool:
    return any(_answer(rule, case) for rule in excluded)


def _answer(rule: Excluded, case: Case) -> bool:
    try:
        return bool(rule(case))
    except KeyError:
        return False


def name_of(case: Case) -> str:
    """For a test's id: ``ddp2-bf16-average``; what is off is left out."""
    words = [name if value is True else str(value) for name, value in case.items() if value]
    return "-".join(words)
