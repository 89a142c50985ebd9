"""strategy=auto, fsdp and hsdp: by ranks where there are several, else without them."""

import logging
from collections.abc import Sequence
from typing import Literal

from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World
from ddptrain.strategies.ddp import TORCHS_CAP_MB, Ddp, no_sync_batchnorm
from ddptrain.strategies.single import Single

log = logging.getLogger("ddptrain")


def ddp_or_single(
    world: World,
    bucket_cap_mb: float = TORCHS_CAP_MB,
    gradient_as_bucket_view: bool = True,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    compression: Literal["none", "bf16", "fp16"] = "none",
    sync_batchnorm: bool = False,
) -> Strategy:
    """`Ddp` with these arguments; `Single` for one rank.

    Raises UserError for a value out of range, and for ``sync_batchnorm`` with one rank.
    """
    ddp = Ddp(
        world, bucket_cap_mb, gradient_as_bucket_view, static_graph, find_unused_parameters, compression,
        sync_batchnorm,
    )  # fmt: skip
    if world.size > 1:
        return ddp
    if sync_batchnorm:
        raise no_sync_batchnorm("single", world)
    if compression != "none":
        log.info("note       strategy.compression=%s: one process sends no gradients", compression)
    return Single(world)


def fsdp_or_single(
    world: World,
    wrap: Sequence[str] | None = None,
    reshard_after_forward: bool = True,
    shard_over: Literal["world", "node"] = "world",
    gather: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "fp32",
    whole_checkpoint_gb: float = 4.0,
) -> Strategy:
    """`Fsdp` with these arguments; `Single` for one rank."""
    if world.size == 1:
        return Single(world)
    from ddptrain.strategies.fsdp import Fsdp  # half a second: torch's DTensor imports sympy

    return Fsdp(world, wrap, reshard_after_forward, shard_over, gather, whole_checkpoint_gb)
