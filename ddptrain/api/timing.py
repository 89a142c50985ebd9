"""Seconds by phase, and figures derived from them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

TRAINING = ("data", "copy", "forward", "backward", "all_reduce", "optimizer", "replay", "logging")
"""The phases of a step: waiting for the batch, waiting for its copy to the GPU, forward pass and loss,
backward pass, the part of the gradients' all-reduce that does not overlap with it (including waiting for
slower ranks), optimizer and bookkeeping, all of these in the replay of a captured step, and the log lines
between steps."""
PHASES = (*TRAINING, "evaluating", "drawing", "saving")
"""The last three are between steps: evaluations, their figures (for TensorBoard and plots/), checkpoints."""


class Timing(NamedTuple):
    """One rank's time. On a GPU it is the device's time: work that overlaps with computing counts as zero."""

    seconds: Mapping[str, float] = MappingProxyType(dict.fromkeys(PHASES, 0.0))
    """By phase; every moment belongs to one phase."""
    samples: int = 0
    """Of all ranks."""
    flops: float = 0.0
    """Of the forward and backward pass, per sample; 0 if they could not be counted."""
    peak: float = 0.0
    """Peak FLOP/s of all ranks' devices at the run's precision; 0 if not known."""

    def since(self, earlier: "Timing") -> "Timing":
        seconds = {phase: spent - earlier.seconds[phase] for phase, spent in self.seconds.items()}
        return Timing(seconds, self.samples - earlier.samples, self.flops, self.peak)

    @property
    def training(self) -> float:
        """Seconds without evaluating and saving."""
        return sum(self.seconds[phase] for phase in TRAINING)

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of the training time, by phase; without replays where there are none."""
        phases = [phase for phase in TRAINING if phase != "replay" or self.seconds[phase]]
        return {phase: self.seconds[phase] / max(self.training, 1e-9) for phase in phases}

    @property
    def samples_per_s(self) -> float:
        return self.samples / max(self.training, 1e-9)

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation (Chowdhery et al., arXiv 2204.02311, appendix B): the model's FLOP/s as a
        fraction of the devices' peak, in (0, 1]; None where it is not known."""
        fraction = self.samples_per_s * self.flops / self.peak if self.flops and self.peak else 0.0
        return fraction if 0 < fraction <= 1 else None  # above 1 the peak was measured in a slow moment


class Lap(NamedTuple):
    """Two readings of one rank's clock."""

    end: Timing
    start: Timing = Timing()

    @property
    def timing(self) -> Timing:
        return self.end.since(self.start)


class FetchTimes(NamedTuple):
    """What reading a set that lies elsewhere has taken so far, of a rank and its workers."""

    network: float
    """Seconds that readers have waited for what was not there yet."""
    decoding: float
    """Seconds."""
    fetched: str
    """How much, in words."""


def format_shares(timing: Timing, data: str = "") -> str:
    """The split of the training time in one line; phases below 0.5 % are omitted. data: what waiting for data
    was made of."""
    parts = [
        f"{phase.replace('_', '-')} {share:.0%}{data * (phase == 'data')}"
        for phase, share in timing.shares.items()
        if share >= 0.005
    ]
    mfu = "" if timing.mfu is None else f"  ({timing.mfu:.0%} of the device's peak)"
    return "  ".join(parts) + mfu
