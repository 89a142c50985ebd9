"""``bench ddp=true``: which of DDP's settings make a step shorter, what of the all-reduce stays exposed, and
how far more nodes could go."""

import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from ddptrain.bench.ab_compare import Bench, Compared, OverrideResult
from ddptrain.bench.paced_run import LapTimes, Unfit, kill_group, last_lines, start_group
from ddptrain.bench.scaling import STRAGGLING, LinkModel, Step, estimated, fitted, misses
from ddptrain.config.schema import Config
from ddptrain.config.strategy import uses_ddp
from ddptrain.errors import UserError
from ddptrain.text import print_tables

if TYPE_CHECKING:
    from rich.table import Table

_BUCKETS_MB = (1, 5, 25, 100)
_COMPRESSIONS = ("none", "bf16", "fp16", "powersgd")
_BYTES = {"none": 1.0, "bf16": 0.5, "fp16": 0.5}
"""What of a gradient's bytes travels, where the gradients are float32; powersgd's depends on their shapes."""
_NODES = (1, 2, 4, 8, 16)
_NOISY = 1.15  # A training that differs from its like by more than this factor: the estimate says so
_WITHIN_S = 300.0
_LEFT_OUT = f"""\
An upper bound: links between nodes are taken to be as fast as those measured here, with nobody else on them.
Left out: slower or shared links, data and checkpoints on shared disks, the broadcast of buffers, and what a
larger batch does to learning. At the lower end none of what the messages grow by is hidden, and ranks differ
by {STRAGGLING:.0%}; at the upper end it hides behind the backward pass, and no rank is late."""


def ranks_for(config: Config, asked: int | None) -> int:
    """How many ranks to bench: as asked, else one for each GPU, or two. Raises UserError where DDP would have
    nothing to do."""
    if asked is not None and asked < 2:
        raise UserError(f"ranks={asked}: ddp=true measures what ranks send each other; give 2 or more.")
    if config.elastic == "strict":
        raise UserError("elastic=strict: adds up gradients by itself, without DDP. Leave it or ddp=true out.")
    if not uses_ddp(config.strategy):
        raise UserError(
            f"strategy._target_={config.strategy['_target_']}: ddp=true measures DistributedDataParallel."
            " Use strategy=ddp, or leave ddp=true out."
        )
    if asked is not None:
        return asked
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
    found = [
        f"strategy.bucket_cap_mb={cap}"
        for cap in _BUCKETS_MB
        if _buckets(cap, size) != _buckets(strategy["bucket_cap_mb"], size)
    ]
    found += [] if strategy["static_graph"] else ["strategy.static_graph=true"]
    found.append(f"strategy.gradient_as_bucket_view={str(not strategy['gradient_as_bucket_view']).lower()}")
    found += [f"strategy.compression={name}" for name in _COMPRESSIONS if name != strategy["compression"]]
    return found


def exposed_table(found: Compared) -> "Table":
    """Of each override: its step, and what of the all-reduce is not hidden behind its backward pass."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    table.add_column("override", overflow="fold")
    for name in ("ratio", "least", "most", "ms/step", "backward ms", "exposed ms", "exposed"):
        table.add_column(name, justify="right")
    ordered = sorted(found.results, key=lambda result: result.ratio)
    for name, result in [("as it is", found.itself), *((result.override, result) for result in ordered)]:
        backward, exposed = (_ms(result.lap, phase) for phase in ("backward", "all_reduce"))
        ratios = [result.ratio, min(result.ratios), max(result.ratios)]
        times = [f"{ms:.2f}" for ms in (result.lap.ms_per_step, backward, exposed)]
        share = f"{exposed / result.lap.ms_per_step:.0%}"
        style = "green" if result in found.helping else ""
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


def estimate(bench: Bench, config: Config, itself: OverrideResult) -> None:
    """Measure all-reduces between as many ranks, and print the link they show and what it lets more nodes do,
    for the training as it is. Raises Unfit."""
    lap = itself.lap
    traffic = _BYTES.get(config.strategy["compression"])
    size = lap.setup["gradient_bytes"] * (traffic or 1.0)
    parts = _buckets(config.strategy["bucket_cap_mb"], lap.setup["gradient_bytes"])
    messages, count = [part * (traffic or 1.0) for part in parts], len(parts)
    backend, measured = _all_reduces(bench, config.device, round(max(messages)))
    link = fitted(measured, bench.ranks)
    off = misses(link, measured, bench.ranks)
    exposed = _ms(lap, "all_reduce")
    print(
        f"\nexposed     {exposed:.2f} ms of a step's {lap.ms_per_step:.2f} ms"
        f" ({exposed / lap.ms_per_step:.0%}) wait for gradients: {size / 1e6:.2f} MB in"
        f" {count} bucket{'s' * (count > 1)}, {bench.ranks} ranks over {backend}"
    )
    if traffic is not None:
        alone = sum(link.all_reduce_s(bench.ranks, size) for size in messages)
        print(f"{'':12}(the messages alone take {1e3 * alone:.2f} ms; waiting for late ranks counts too)")
    print(
        f"all-reduce  latency {1e6 * link.latency_s:.0f} us and {link.bytes_per_s / 1e9:.2f} GB/s between"
        f" neighbours, fitted to {len(measured)} sizes from {_size(measured[0][0])} to"
        f" {_size(measured[-1][0])} (the fit is off by {median(off):.0%} of the measured"
        f" time in the median, {max(off):.0%} at most)"
    )
    if traffic is None:
        print("more nodes  not estimated: what powersgd sends depends on the gradients' shapes", flush=True)
        return
    per_step = 1 / lap.steps
    step = Step(
        seconds=lap.ms_per_step / 1e3,
        backward_s=lap.seconds["backward"] * per_step,
        exposed_s=lap.seconds["all_reduce"] * per_step,
        samples=config.train.batch_size,
        ranks=bench.ranks,
        messages=messages,
    )
    print_tables(_scaling_table(step, link, lap.setup["steps_per_epoch"]))
    if not 1 / _NOISY <= itself.ratio <= _NOISY:
        print(
            f"Noise: the training against itself is x{itself.ratio:.2f};"
            " the estimate is no more certain than that."
        )
    print(_LEFT_OUT, flush=True)


def _scaling_table(step: Step, link: LinkModel, steps_per_epoch: int) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for name in ("nodes", "ranks", "samples/s, at most", "efficiency, at most", "batch", "steps an epoch"):
        table.add_column(name, justify="right")
    rate = step.samples / step.seconds
    for nodes in _NODES:
        bound = estimated(step, link, nodes)
        rates = f"{nodes * rate * bound.lower:,.0f} to {nodes * rate * bound.upper:,.0f}"
        shares = f"{bound.lower:.0%} to {bound.upper:.0%}"
        if nodes == 1:
            rates, shares = f"{rate:,.0f} (measured)", "100%"
        epoch = math.ceil(steps_per_epoch / nodes)
        table.add_row(
            str(nodes), str(nodes * step.ranks), rates, shares, f"{nodes * step.samples}", f"{epoch}"
        )
    return table


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _all_reduces(bench: Bench, device: str, largest: int) -> tuple[str, Sequence[tuple[int, float]]]:
    """The backend, and (bytes, seconds) of all-reduces between so many ranks of their own. Raises Unfit."""
    out, said = bench.folder / "reduces.json", bench.folder / "reduces.txt"
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={bench.ranks}"]
    program = ["-m", "ddptrain.bench.allreduce_bench", device, str(largest), str(out)]
    process = start_group([*torchrun, *program], said)
    try:
        process.wait(_WITHIN_S)
    except subprocess.TimeoutExpired as error:
        raise Unfit(f"the all-reduces are not done within {_WITHIN_S:.0f} s") from error
    finally:
        kill_group(process)
    if process.returncode != 0:
        raise Unfit(f"the all-reduces failed: {last_lines(said)}", process.returncode)
    result = json.loads(out.read_text())
    return result["backend"], [(size, seconds) for size, seconds in result["measured"]]
