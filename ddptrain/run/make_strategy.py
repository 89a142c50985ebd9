"""Builds the strategy of a config in this world."""

import logging
from collections.abc import Mapping
from typing import Any

from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World
from ddptrain.config.instantiate import build
from ddptrain.config.strategy import choice_in, uses_ddp
from ddptrain.errors import UserError
from ddptrain.strategies.strict import Strict

log = logging.getLogger("ddptrain")


def make_strategy(
    node: Mapping[str, Any], world: World, compiled: bool = False, strict: bool = False
) -> Strategy:
    """The strategy of a config's node, for a model that is ``compiled`` or not; with elastic=strict it is
    `Strict`. If the node has another one under ``alone``, a world of one uses that.

    Raises UserError if it does not fit this world.
    """
    chosen = choice_in(node, world.size)
    compression = node.get("compression", "none")
    if world.size == 1 and compression != "none":
        log.info("note       strategy.compression=%s: one process sends no gradients", compression)
    if world.size == 1 and "alone" in node and node.get("sync_batchnorm"):
        raise UserError(
            "strategy.sync_batchnorm=true: PyTorch's SyncBatchNorm needs ddp on GPUs;"
            f" this is single on {world.device.type}."
        )
    built = build(chosen, "strategy", world=world)
    if not isinstance(built, Strategy):
        raise UserError(f"strategy._target_={chosen['_target_']}: must be a ddptrain.api.Strategy.")
    strategy: Strategy = built
    if strict and not isinstance(strategy, Strict):
        if not uses_ddp(node) or node.get("sync_batchnorm") or compression != "none":
            raise UserError(
                "elastic=strict: adds the gradients of fixed shards itself, which does not go with another"
                " strategy, nor with strategy.sync_batchnorm or strategy.compression. Leave these, or use"
                " elastic=fast."
            )
        strategy = Strict(world, node.get("shards", 8))
    strategy.check(compiled)
    return strategy
