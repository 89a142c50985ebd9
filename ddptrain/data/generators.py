"""The generators that other people's code draws from: torch's, NumPy's and Python's own."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import numpy as np
import torch

from ddptrain.api.rng import seed_pythons


def seed_all(seed: int, pythons: bool = True) -> None:
    """seed: 0 or more. pythons: NumPy's and Python's, too, which takes longer than to read a row."""
    # not torch.manual_seed, which seeds the GPUs' generators too
    torch.default_generator.manual_seed(seed)
    if pythons:
        seed_pythons(seed)


@final
class GeneratorStates:
    """As they are now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def pythons_have_drawn(self) -> bool:
        """Whether something has drawn from Python's or NumPy's generator since."""
        name, keys, *place = self._numpy
        now, keys_now, *place_now = np.random.get_state()
        same = (name, place) == (now, place_now) and np.array_equal(keys, keys_now)
        return not same or self._python != random.getstate()

    def restore(self, pythons: bool = True) -> None:
        torch.set_rng_state(self._torch)
        if pythons:
            random.setstate(self._python)
            np.random.set_state(self._numpy)


@contextmanager
def restored() -> Iterator[None]:
    """Their states are the same afterwards: without workers this is the trainer's own process."""
    before = GeneratorStates()
    try:
        yield
    finally:
        before.restore()
