"""Which strategy a config means in this world."""

import logging

import torch

from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World
from ddptrain.config.schema import Strategy as StrategyConfig
from ddptrain.errors import UserError
from ddptrain.strategies.ddp import Ddp
from ddptrain.strategies.dp import DataParallel
from ddptrain.strategies.single import Single
from ddptrain.strategies.strict import Strict

log = logging.getLogger("ddptrain")


def make_strategy(
    config: StrategyConfig, world: World, compiled: bool = False, strict: bool = False
) -> Strategy:
    """The strategy for ``strategy=...`` in this world, for a model that is ``compiled`` or not, under
    elastic=strict or not.

    Raises UserError where the two do not go together.
    """
    name = config.name
    if name == "auto":
        name = "ddp" if world.size > 1 else "single"
    if name in ("single", "dp") and world.size > 1:
        raise UserError(
            f"strategy={name}: runs in one process, but torchrun started {world.size}."
            " Use strategy=ddp, or start it with python -m ddptrain."
        )
    if name == "ddp" and not torch.distributed.is_initialized():
        raise UserError(
            "strategy=ddp: needs ranks, which torchrun starts:"
            " torchrun --standalone --nproc-per-node=2 -m ddptrain ..."
        )
    if config.sync_batchnorm and (name != "ddp" or world.device.type != "cuda"):
        raise UserError(
            "strategy.sync_batchnorm=true: PyTorch's SyncBatchNorm needs ddp on GPUs;"
            f" this is {name} on {world.device.type}."
        )
    if name == "dp" and world.device.type != "cuda":
        log.info("note       strategy=dp: on %s there is nothing to spread over; single", world.device.type)
        name = "single"
    if name == "dp" and compiled:
        raise UserError(
            "strategy=dp: its copies of a compiled model would all compute on the first GPU."
            " Use strategy=ddp, or compile=off."
        )
    if strict and (name == "dp" or config.sync_batchnorm or config.compression != "none"):
        raise UserError(
            "elastic=strict: adds the gradients of fixed shards itself, which does not go with strategy=dp,"
            " strategy.sync_batchnorm or strategy.compression. Leave these, or use elastic=fast."
        )
    if name != "ddp" and config.compression != "none":
        log.info("note       strategy.compression=%s: one process sends no gradients", config.compression)
    if strict:
        return Strict(config.shards, world)
    if name == "dp":
        return DataParallel(world.device)
    return Single() if name == "single" else Ddp(config, world)
