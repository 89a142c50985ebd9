"""What can be read from a config's strategy node without importing torch."""

from typing import Any

from ddptrain.config.targets import Node

_DDP = "ddptrain.strategies.ddp.Ddp"
_DP = "ddptrain.strategies.dp.DataParallel"
_NOT_ITS_OWN = ("alone", "shards")
"""Keys of ddp's node that its target does not take: for a world of one, and for elastic=strict."""


def choice_in(node: Node, world_size: int) -> dict[str, Any]:
    """The node to build in a world of this size, with the arguments of its target alone."""
    chosen = node["alone"] if world_size == 1 and "alone" in node else node
    extra = _NOT_ITS_OWN if chosen["_target_"] == _DDP else ("alone",)
    return {name: value for name, value in chosen.items() if name not in extra}


def is_ddp(node: Node) -> bool:
    """``strategy=ddp``: with ranks also where there is one."""
    return uses_ddp(node) and "alone" not in node


def is_dp(node: Node) -> bool:
    return bool(node["_target_"] == _DP)


def uses_ddp(node: Node) -> bool:
    """``strategy=auto`` or ``ddp``."""
    return bool(node["_target_"] == _DDP)
