"""Where the time went: seconds by phase, and what follows from them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

TRAINING = ("data", "copy", "forward", "backward", "all_reduce", "optimizer", "logging")
"""The phases of a step: waiting for the batch, waiting for its copy to the GPU, forward pass and loss,
backward pass, what of the gradients' all-reduce is not hidden behind it (waiting for slower ranks included),
optimizer and bookkeeping, and the log lines between steps."""
PHASES = (*TRAINING, "evaluating", "drawing", "saving")
"""The last three are between steps: evaluations, their figures (for TensorBoard and plots/), checkpoints."""


class Timing(NamedTuple):
    """One rank's time. On a GPU it is the device's own: what overlaps with computing counts for nothing."""

    seconds: Mapping[str, float] = MappingProxyType(dict.fromkeys(PHASES, 0.0))
    """By phase; every moment belongs to one."""
    samples: int = 0
    """Of all ranks."""
    flops: float = 0.0
    """Of the forward and backward pass, per sample; 0 where they could not be counted."""
    peak: float = 0.0
    """FLOP/s that the devices of all ranks can do at the run's precision; 0 where not known."""

    def since(self, earlier: "Timing") -> "Timing":
        seconds = {phase: spent - earlier.seconds[phase] for phase, spent in self.seconds.items()}
        return Timing(seconds, self.samples - earlier.samples, self.flops, self.peak)

    @property
    def training(self) -> float:
        """Seconds, without evaluating and saving."""
        return sum(self.seconds[phase] for phase in TRAINING)

    @property
    def shares(self) -> dict[str, float]:
        """Of the training time, by its phases."""
        return {phase: self.seconds[phase] / max(self.training, 1e-9) for phase in TRAINING}

    @property
    def samples_per_s(self) -> float:
        return self.samples / max(self.training, 1e-9)

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation (Chowdhery et al., arXiv 2204.02311, appendix B): the share of the devices'
        peak that the model's own arithmetic makes up."""
        return self.samples_per_s * self.flops / self.peak if self.flops and self.peak else None


class Lap(NamedTuple):
    """Two readings of one rank's clock. The time between them is worked out by who wants to know."""

    end: Timing
    start: Timing = Timing()

    @property
    def timing(self) -> Timing:
        return self.end.since(self.start)


def format_shares(timing: Timing) -> str:
    """The split of the training time in one line; what rounds to nothing is left out."""
    parts = [
        f"{phase.replace('_', '-')} {share:.0%}" for phase, share in timing.shares.items() if share >= 0.005
    ]
    # a peak that was measured in a slow moment says nothing
    mfu = "" if timing.mfu is None or timing.mfu > 1 else f"  ({timing.mfu:.0%} of the device's peak)"
    return "  ".join(parts) + mfu
