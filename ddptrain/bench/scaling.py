"""How a data-parallel step could grow with more nodes: the alpha-beta model, fed with what was measured.

All-reduce of S bytes over N ranks: a ring takes 2 (N-1) alpha + 2 (N-1)/N S/B (Thakur, Rabenseifner, Gropp
2005, doi 10.1177/1094342005051521), a tree 2 ceil(log2 N) alpha + 2 S/B; who chooses takes the smaller.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

STRAGGLING = 0.05
"""For the lower end: the standard deviation of the ranks' steps, as a share of a step. The slowest of N such
is late by about sqrt(2 ln N) of it."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """What lies between two neighbours."""

    latency_s: float  # alpha: of a message without content
    bytes_per_s: float  # B, that is 1 / beta

    def all_reduce_s(self, ranks: int, size: float) -> float:
        """Seconds to sum so many bytes over the ranks; 0 for one rank."""
        ring = 2 * (ranks - 1) * self.latency_s + 2 * (ranks - 1) / ranks * size / self.bytes_per_s
        tree = 2 * math.ceil(math.log2(ranks)) * self.latency_s + 2 * size / self.bytes_per_s
        return min(ring, tree)


@dataclass(frozen=True, slots=True)
class Step:
    """One training's step on one node, as measured."""

    seconds: float
    backward_s: float  # Of it: the rank's own backward pass, behind which messages can hide
    exposed_s: float  # Of it: waiting for gradients
    samples: int  # Of all ranks
    ranks: int
    messages: Sequence[float]  # Bytes of each all-reduce of a step


@dataclass(frozen=True, slots=True)
class Estimate:
    """So many nodes, each with the measured one's ranks and their share of a batch. Both are ends of an upper
    bound: the lower is no promise."""

    nodes: int
    lower: float
    """Efficiency: the share of nodes times the measured rate. Nothing of what the messages grow by is hidden,
    and ranks straggle."""
    upper: float  # All of it is hidden that has room behind the backward pass, and no rank is late


def fitted(measured: Sequence[tuple[int, float]], ranks: int) -> LinkModel:
    """The link that explains (bytes, seconds) of all-reduces over so many ranks by a ring's time, with the
    least sum of squared relative errors; neither alpha nor beta is negative. Two sizes or more, two ranks or
    more."""
    rows = [(1 / seconds, size / seconds) for size, seconds in measured]
    a, b, c = sum(x * x for x, _ in rows), sum(x * y for x, y in rows), sum(y * y for _, y in rows)
    p, q = sum(x for x, _ in rows), sum(y for _, y in rows)
    determinant = a * c - b * b
    fixed, per_byte = (c * p - b * q) / determinant, (a * q - b * p) / determinant
    if fixed < 0:
        fixed, per_byte = 0.0, q / c
    if per_byte <= 0:
        # larger messages take no longer: all that can be said is that the largest went through
        size, seconds = max(measured)
        fixed, per_byte = p / a, seconds / size
    return LinkModel(fixed / (2 * (ranks - 1)), 2 * (ranks - 1) / ranks / per_byte)


def misses(link: LinkModel, measured: Sequence[tuple[int, float]], ranks: int) -> list[float]:
    """By which share of what was measured the link is off, size by size."""
    return [abs(link.all_reduce_s(ranks, size) / seconds - 1) for size, seconds in measured]


def estimated(step: Step, link: LinkModel, nodes: int) -> Estimate:
    """For a node count of 1 or more; at 1 both bounds are 1."""
    ranks = nodes * step.ranks
    now, then = (sum(link.all_reduce_s(n, size) for size in step.messages) for n in (step.ranks, ranks))
    grown = max(0.0, then - now)
    hidden = min(max(0.0, now - step.exposed_s), step.backward_s)
    room = step.backward_s - hidden
    lateness = math.sqrt(2 * math.log(ranks)) - math.sqrt(2 * math.log(step.ranks))
    slowest = step.seconds + grown + STRAGGLING * step.seconds * lateness
    fastest = step.seconds + max(0.0, grown - room)
    return Estimate(nodes, step.seconds / slowest, step.seconds / fastest)
