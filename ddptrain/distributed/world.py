"""The world that torchrun's environment describes."""

import os
from collections.abc import Mapping

from ddptrain.api.world import World
from ddptrain.errors import UserError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def world_from_environment(environment: Mapping[str, str] = os.environ) -> World:
    """The world torchrun describes, or a single rank without it. The device is not chosen yet.

    Raises UserError where the variables are incomplete or contradict each other.
    """
    given = [name for name in _NAMES if name in environment]
    if "RANK" not in given and environment.get("WORLD_SIZE", "1") == "1":
        return World()
    missing = [name for name in _NAMES if name not in given]
    if missing:
        raise UserError(
            f"{', '.join(given)} is set but {', '.join(missing)} is not: start ranks with torchrun,"
            " or unset these environment variables for a single process.",
            everywhere=False,
        )
    try:
        rank, size, local_rank, local_size = (int(environment[name]) for name in _NAMES)
    except ValueError as error:
        raise UserError(f"{', '.join(_NAMES)} must be whole numbers: {error}.", everywhere=False) from error
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise UserError(
            f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local_rank} LOCAL_WORLD_SIZE={local_size}"
            " contradict each other: start ranks with torchrun.",
            everywhere=False,
        )
    return World(rank, size, local_rank, local_size)
