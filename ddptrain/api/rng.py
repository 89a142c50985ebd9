"""Counter-based (stateless) random numbers.

A draw is a hash of (seed, epoch, sample index, purpose), in integer arithmetic, so it is the same on a CPU
and a GPU, in a worker process or not, for any batch and any number of ranks.

The mixer is splitmix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, OOPSLA 2014), constants as in https://prng.di.unimi.it/splitmix64.c.
"""

import random

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = 2**64 - 1


def derive_seed(*keys: int) -> int:
    """A 63-bit hash of a sequence of integers, for seeding generators."""
    state = 0
    for key in keys:  # inlined: called in every step
        state = (state + key + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state >> 1


def draw(seed: int, epochs: Tensor, ids: Tensor, purpose: int) -> Tensor:
    """int64 (n,) in [0, 2**31): one draw for each (epoch, sample), different for each purpose.

    epochs, ids: int64 (n,) on the same device.
    """
    state = _mix_tensor(epochs + _signed(derive_seed(seed, purpose) + _GOLDEN))
    return _mix_tensor(state + ids + _signed(_GOLDEN)) >> 32 & 0x7FFFFFFF


def draw_below(bound: int, seed: int, epochs: Tensor, ids: Tensor, purpose: int) -> Tensor:
    """int64 (n,) in [0, bound). Bounds are small here: the modulo's bias is below bound / 2**31."""
    return draw(seed, epochs, ids, purpose) % bound


def _mix_tensor(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)  # int64 products wrap, as intended
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical shift: torch's >> on int64 is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    x &= _MASK
    return torch.iinfo(torch.int64).min + (x - 2**63) if x >= 2**63 else x


def seed_pythons(seed: int) -> None:
    """Seed the generators of Python and NumPy. seed: 0 or more."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def state_of_pythons() -> tuple[object, ...]:
    """Theirs, to be compared: whether something has drawn from them."""
    name, keys, *place = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), *place


def state_of_generators() -> tuple[object, ...]:
    """The same of torch's (on the CPU), NumPy's and Python's."""
    return torch.get_rng_state().numpy().tobytes(), *state_of_pythons()
