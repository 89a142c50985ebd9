"""``bench memory=true``: what a step of a recipe takes of the memory, before any training."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import nn

from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World
from ddptrain.commands import setup
from ddptrain.config.instantiate import build
from ddptrain.config.schema import Config
from ddptrain.config.strategy import choice_in
from ddptrain.engine.freeze import freeze
from ddptrain.engine.memory import step_memory
from ddptrain.engine.optimizer import check_optimizer
from ddptrain.engine.plan import plan_run
from ddptrain.engine.precision import choose_precision
from ddptrain.engine.recompute import recompute
from ddptrain.engine.state import TrainState, make_state
from ddptrain.errors import ExitCode, UserError
from ddptrain.strategies.single import Single
from ddptrain.strategies.strict import Strict
from ddptrain.text import counted, print_tables

if TYPE_CHECKING:
    from rich.table import Table

_HOLDS = {
    "weights": "parameters and buffers",
    "gradients": "of trained parameters",
    "optimizer": "its state",
    "average": "ema.decay: averaged weights",
    "activations": "kept for the backward pass; the batch; temporary tensors",
    "communication": "what the strategy adds: buckets, other ranks' parts",
}
_LEFT_OUT = """\
Left out: CUDA itself (about 0.5 GiB), scratch memory inside of kernels, fragmentation (leave a tenth), and
data that is kept on the device."""


def run(config: Config, ranks: int | None) -> int:
    """Print it for one rank of so many; None: one for each GPU of this machine, or one. Raises UserError."""
    if ranks is not None and ranks < 1:
        raise UserError(f"ranks={ranks}: must be 1 or more.")
    task, data = setup.make_task(config)
    check_optimizer(config.optim)
    with setup.joined_world(config, alone=True) as (world, _, _):
        device = world.device
        gpus = 1 if config.device.startswith("cuda:") or device.type != "cuda" else torch.cuda.device_count()
        strategy = _strategy(config, device, ranks, gpus)
        setup.prepare(data, world, config.seed)
        plan = plan_run(
            config, data.train_size, data.identity, strategy.shards, data.sample_weights, data.blocks
        )
        sampler = plan.sampler(strategy.world)
        largest = sampler.micro_sizes.index(max(sampler.micro_sizes))
        batch = next(islice(data.train_batches(sampler, range(1)), largest, None))
        precision = choose_precision(config.precision, device)
        model = setup.make_model(config, task, torch.device("cpu"))
        recompute(model, config.train.recompute)
        frozen = freeze(model, config.optim, config.freeze) if config.thaw is None else None

        def state(model: nn.Module) -> TrainState:
            return make_state(replace(config, compile="off"), model, Single(world), precision, 1, frozen)

        passes = len(sampler.pieces) // max(1, len(sampler.own_shards) if strategy.shards else 1)
        alone = step_memory(model, state, task, batch, precision, device, passes, plan.clip_norm)
        parts = strategy.memory(model, alone, passes)
        micro = max(sampler.micro_sizes)
        ranks_in_words = f"{counted(strategy.world.size, 'rank')} of {strategy.describe()}"
        print(
            f"memory     of a rank's step, estimated: {ranks_in_words}, on {device}, {precision.name},"
            f" {counted(micro, 'sample')} at once"
        )
        print_tables(_table(parts))
        if device.type == "cuda":
            _print_whether_it_fits(sum(parts.values()), config, strategy, micro, precision.name)
        print(_LEFT_OUT, flush=True)
    return ExitCode.DONE


def _strategy(config: Config, device: torch.device, ranks: int | None, gpus: int) -> Strategy:
    """That of the last of so many ranks, which has the most samples; not checked: they are not there."""
    strict = config.elastic == "strict"
    size = gpus if ranks is None else ranks
    if not strict and choice_in(config.strategy, size)["_target_"].endswith(
        ("single.Single", "dp.DataParallel")
    ):
        if size > 1 and ranks is not None:
            raise UserError(f"ranks={ranks}: this strategy runs in one process. Use strategy=ddp.")
        size = 1
    local = gpus if 1 < gpus < size and size % gpus == 0 else size
    world = World(size - 1, size, local - 1, local, device)
    if strict:
        return Strict(world, config.strategy.get("shards", 8))
    built: Strategy = build(choice_in(config.strategy, size), "strategy", world=world)
    return built


def _table(parts: Mapping[str, int]) -> "Table":
    from rich import box
    from rich.table import Table

    total = sum(parts.values())
    table = Table(box=box.SIMPLE)
    table.add_column("part")
    table.add_column("MiB", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for name, size in parts.items():
        if size:
            table.add_row(name, f"{size / 2**20:,.1f}", f"{size / total:.0%}", _HOLDS.get(name, ""))
    table.add_row("total", f"{total / 2**20:,.1f}", "")
    return table


def _print_whether_it_fits(
    total: int, config: Config, strategy: Strategy, micro: int, precision: str
) -> None:
    has = torch.cuda.get_device_properties(strategy.world.device).total_memory
    sizes = f"{total / 2**30:.1f} of {has / 2**30:.1f} GiB"
    if total < has:
        print(f"fits       {sizes}")
        return
    print(f"too large  {sizes}: {advice(config, strategy, micro, precision)}")


def advice(config: Config, strategy: Strategy, micro: int, precision: str) -> str:
    """What helps, the cheapest first."""
    steps = [f"train.micro_batch={micro // 2}"] if micro > 1 else []
    steps += [] if config.train.recompute else ["train.recompute=[<blocks>]"]
    steps += ["precision=bf16"] if precision in ("fp32", "tf32") else []
    steps += ["strategy=fsdp"] if not strategy.sharded else []
    return ", then ".join(steps) or "take a smaller model, or a device with more memory"
