"""The generators that other people's code draws from: torch's, NumPy's and Python's own."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ddptrain.api.rng import seed_pythons


def seed_all(seed: int) -> None:
    """seed: 0 or more."""
    # not torch.manual_seed, which seeds the GPUs' generators too
    torch.default_generator.manual_seed(seed)
    seed_pythons(seed)


@contextmanager
def restored() -> Iterator[None]:
    """Their states are the same afterwards: without workers this is the trainer's own process."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
