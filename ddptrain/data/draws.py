"""Random numbers for what is done to one sample, one after the other."""

import math

from ddptrain.api.rng import derive_seed

SampleKey = tuple[int, int, int]
"""Seed, epoch, sample index."""


class Draws:
    """The draws of one sample in one epoch for one purpose: the k-th is a hash of (seed, epoch, sample index,
    purpose, k), so another purpose's draws don't move it, however many there are.

    In Python's numbers: torch's vectorised ``cos`` and ``pow`` may round a batch's last elements otherwise
    than the others, and a sample's draws would depend on its place in the batch. A draw takes 2 us.
    """

    def __init__(self, seed: int, epoch: int, sample: int, purpose: int) -> None:
        self._key = derive_seed(seed, epoch, sample, purpose)
        self._count = 0

    def below(self, bound: int) -> int:
        """Uniform in [0, bound). Bounds are small: the modulo's bias is below bound / 2**63."""
        self._count += 1
        return derive_seed(self._key, self._count) % bound

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """In [low, high), in steps of 2**-53 of the way."""
        return low + (high - low) * (self.below(2**53) / 2**53)

    def permutation(self, count: int) -> tuple[int, ...]:
        """0 .. count - 1 in an order of which all are equally likely (Fisher, Yates)."""
        order = list(range(count))
        for last in range(count - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return tuple(order)

    def beta(self, alpha: float) -> float:
        """From the symmetric Beta(alpha, alpha), in [0, 1]; alpha above 0.

        Of a point drawn in polar coordinates, without rejection (Devroye: Random variate generation in one
        line of code, WSC 1996, after Bailey, Math. Comp. 62, 1994).
        """
        radius = math.expm1(min(-math.log(1 - self.uniform()) / alpha, 700.0))  # exp(710) overflows
        along = math.cos(2 * math.pi * self.uniform())
        spread = radius * along * along
        return 0.5 + math.copysign(0.5 * math.sqrt(spread / (1 + spread)), along)
