"""The sweep that is under way. Hydra makes sweeper and launcher itself, and hands them nothing of ours.

By its name's underscore Hydra's scan leaves this module as it is; it executes the others a second time.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from omegaconf import DictConfig


class RunningSweep(NamedTuple):
    """What sweeper and launcher call, with Hydra's loader and the sweep's own config."""

    launch: Callable[[ConfigLoader, DictConfig, Sequence[Sequence[str]]], list[JobReturn]]
    search: Callable[[ConfigLoader, DictConfig, Sequence[Override]], None]
    check_grid: Callable[[Sequence[Override]], None]


running: list[RunningSweep] = []
"""The last one is meant."""
