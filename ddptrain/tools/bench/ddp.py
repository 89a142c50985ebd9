"""``bench ddp=true``: which of DDP's settings make a step shorter, what of the all-reduce is exposed."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddptrain.config.schema import Config
from ddptrain.config.strategy import uses_ddp
from ddptrain.errors import UserError
from ddptrain.tools.bench.ab_compare import BenchResult
from ddptrain.tools.bench.paced_run import LapTimes

if TYPE_CHECKING:
    from rich.table import Table

_BUCKETS_MB = (1, 5, 25, 100)
_COMPRESSIONS = ("none", "bf16", "fp16")


def ranks_for(config: Config, ranks: int | None) -> int:
    """How many ranks to bench: as given, else one for each GPU, or two. Raises UserError where DDP would have
    nothing to do."""
    if ranks is not None and ranks < 2:
        raise UserError(f"ranks={ranks}: ddp=true measures what ranks send each other; give 2 or more.")
    if not uses_ddp(config.strategy):
        raise UserError(
            f"strategy._target_={config.strategy['_target_']}: ddp=true measures DistributedDataParallel."
            " Use strategy=ddp, or leave ddp=true out."
        )
    if ranks is not None:
        return ranks
    import torch

    one = config.device.startswith("cuda:")
    gpus = 1 if one else torch.cuda.device_count() if config.device != "cpu" else 0
    if gpus == 1:
        raise UserError(
            "ddp=true: there is one GPU to use, and DDP's messages go between several. device=cpu measures"
            " two ranks on the CPU; ranks=2 has two share the GPU."
        )
    return gpus or 2


def of_ddp(config: Config, setup: Mapping[str, Any]) -> list[str]:
    """DDP's own settings, but for caps that would divide the gradients as they are divided now."""
    strategy, size = config.strategy, setup["gradient_bytes"]
    overrides = [
        f"strategy.bucket_cap_mb={cap}"
        for cap in _BUCKETS_MB
        if _buckets(cap, size) != _buckets(strategy["bucket_cap_mb"], size)
    ]
    overrides += [] if strategy["static_graph"] else ["strategy.static_graph=true"]
    overrides.append(
        f"strategy.gradient_as_bucket_view={str(not strategy['gradient_as_bucket_view']).lower()}"
    )
    overrides += [f"strategy.compression={name}" for name in _COMPRESSIONS if name != strategy["compression"]]
    return overrides


def exposed_table(bench_result: BenchResult) -> "Table":
    """Of each override: its step, and what of the all-reduce is not hidden behind its backward pass."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    table.add_column("override", overflow="fold")
    for name in ("ratio", "least", "most", "ms/step", "backward ms", "exposed ms", "exposed"):
        table.add_column(name, justify="right")
    ordered = sorted(bench_result.results, key=lambda result: result.ratio)
    for name, result in [
        ("as it is", bench_result.itself),
        *((result.override, result) for result in ordered),
    ]:
        backward, exposed = (_ms(result.lap, phase) for phase in ("backward", "all_reduce"))
        ratios = [result.ratio, min(result.ratios), max(result.ratios)]
        times = [f"{ms:.2f}" for ms in (result.lap.ms_per_step, backward, exposed)]
        share = f"{exposed / result.lap.ms_per_step:.0%}"
        style = "green" if result in bench_result.helping else ""
        table.add_row(name, *(f"{ratio:.3f}" for ratio in ratios), *times, share, style=style)
    return table


def _ms(lap: LapTimes, phase: str) -> float:
    return 1e3 * lap.seconds[phase] / lap.steps


def _buckets(cap_mb: float, size: float) -> list[float]:
    """Bytes of each of DDP's buckets, for so many bytes of gradients. Only with torch's own cap is there a
    small first one (``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``)."""
    from ddptrain.strategies.ddp import TORCHS_CAP_MB

    first = min(size, 2.0**20 * (1.0 if cap_mb == TORCHS_CAP_MB else cap_mb))
    rest = size - first
    count = math.ceil(rest / (cap_mb * 2**20))
    return [first, *[rest / count] * count] if count else [first]
