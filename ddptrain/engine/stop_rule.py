"""Whether a run goes on after an evaluation: where many compete, somebody else decides."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run does at an evaluation."""

    step: int
    steps: int
    """Of the whole run."""
    metric: str
    value: float
    higher_is_better: bool


Judge = Callable[[Standing], bool]
"""Called on rank 0 after each evaluation; where it says no, all ranks save and stop."""


Steps = Callable[[range], Iterable[int]]
"""The steps to do, one by one: what goes through them may look on from between two of them."""


def always(_: Standing) -> bool:
    """Nobody else decides: a run goes on to its end."""
    return True
