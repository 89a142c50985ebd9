"""Builds the strategy of a config in this world."""

from collections.abc import Mapping
from typing import Any

from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World
from ddptrain.config.instantiate import build
from ddptrain.errors import UserError


def make_strategy(node: Mapping[str, Any], world: World, compiled: bool = False) -> Strategy:
    """The strategy of a config's node, for a model that is ``compiled`` or not.

    Raises UserError if it does not fit this world.
    """
    strategy = build(node, "strategy", world=world)
    if not isinstance(strategy, Strategy):
        raise UserError(f"strategy._target_={node['_target_']}: must be a ddptrain.api.Strategy.")
    strategy.check(compiled)
    return strategy
