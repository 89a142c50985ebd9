"""What can be read from a config's strategy node without importing torch."""

from ddptrain.config.targets import Node

_DDP = "ddptrain.strategies.ddp.Ddp"
_AUTO = "ddptrain.strategies.auto.ddp_or_single"
_DP = "ddptrain.strategies.dp.DataParallel"
_FSDP = ("ddptrain.strategies.fsdp.Fsdp", "ddptrain.strategies.auto.fsdp_or_single")
_STRICT = "ddptrain.strategies.strict.Strict"


def is_ddp(node: Node) -> bool:
    """``strategy=ddp``: with ranks also where there is one."""
    return bool(node.get("_target_") == _DDP)


def uses_ddp(node: Node) -> bool:
    """``strategy=auto`` or ``ddp``."""
    return node.get("_target_") in (_DDP, _AUTO)


def is_dp(node: Node) -> bool:
    return bool(node.get("_target_") == _DP)


def is_fsdp(node: Node) -> bool:
    return node.get("_target_") in _FSDP


def is_strict(node: Node) -> bool:
    """``strategy=strict``: the same bits on any number of ranks, so of threads too."""
    return bool(node.get("_target_") == _STRICT)
