"""The learning-rate range test: the loss while the rate rises step by step.

Smith, "Cyclical Learning Rates for Training Neural Networks", 2017 (arXiv 1506.01186), section 3.3.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ddptrain.api.recipe import Batch, Data
from ddptrain.engine.health import NotFinite
from ddptrain.engine.step import TrainStep

_MEMORY = 0.9
"""Of the running mean of the losses."""
_DIVERGED = 4.0
"""The test is over when the mean loss has risen by so many times what it had fallen."""
_LEAST = 0.02
"""The loss has fallen if by this share; less is noise."""
_FALL = 0.05
"""It begins to fall where it has come this part of the way down."""
FEWEST = 10
"""Points from which on there is something to see."""


class Range(NamedTuple):
    """What a curve says."""

    falls_from: float
    """From this rate on the loss falls."""
    lowest_at: float
    """The rate at the lowest loss; beyond it the loss rises."""

    @property
    def suggestion(self) -> float:
        """A tenth of the rate at the lowest loss, in two digits: a common rule, for one step at that rate is
        already near divergence."""
        return float(f"{self.lowest_at / 10:.1e}")


def rising_rates(lowest: float, highest: float, steps: int) -> list[float]:
    """Equal factors from one to the next."""
    return [lowest * (highest / lowest) ** (i / (steps - 1)) for i in range(steps)]


def losses_at(rates: Sequence[float], step: TrainStep, data: Data) -> Iterator[tuple[float, float]]:
    """(rate, loss) of a step at each rate of the schedule, until the loss diverges; the loss is that of the
    global batch, before the step. Collectives and a sync point in each step."""
    batches: Iterator[Batch] = iter(data.train_batches(step.sampler, range(len(rates))))
    seen: list[float] = []
    for number, rate in enumerate(rates):
        try:
            step(batches, step.plan.progress(number))
            step.synchronize()
        except NotFinite:
            return
        read = step.state.meter.read()
        if "loss" not in read:  # the step was left out
            continue
        loss = read["loss"]
        if not math.isfinite(loss):
            return
        yield rate, loss
        seen.append(loss)
        mean = smoothed(seen)
        fallen, risen = mean[0] - min(mean), mean[-1] - min(mean)
        if len(seen) > FEWEST and risen > _DIVERGED * max(fallen, _LEAST * abs(mean[0])):
            return


def smoothed(losses: Sequence[float]) -> list[float]:
    """The exponential running mean, corrected for its start as Adam's averages are (arXiv 1412.6980)."""
    means, mean = [], 0.0
    for i, loss in enumerate(losses, start=1):
        mean = _MEMORY * mean + (1 - _MEMORY) * loss
        means.append(mean / (1 - _MEMORY**i))
    return means


def range_of(rates: Sequence[float], losses: Sequence[float]) -> Range | None:
    """None where the loss does not fall: too few points, or none of the rates does anything."""
    means = smoothed(losses)
    if len(means) < FEWEST:
        return None
    lowest = means.index(min(means))
    fall = means[0] - means[lowest]
    if fall <= _LEAST * abs(means[0]):
        return None
    begins = max(i for i, mean in enumerate(means[:lowest]) if mean >= means[0] - _FALL * fall)
    return Range(rates[begins], rates[lowest])
