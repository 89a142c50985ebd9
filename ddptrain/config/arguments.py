"""What a command line asks of the config: groups and keys to set, Hydra's options, and ours beside them."""

from dataclasses import dataclass
from pathlib import Path

GROUPS = ("recipe", "model", "data", "augment", "optim", "sched", "strategy", "observers", "controllers")
CONFIG_DIR = ("--config-dir", "-cd")
EXPLAIN = "--explain"
ENV = "--env"


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a command line says."""

    verb: str
    overrides: tuple[str, ...]
    """key=value, group=choice, +key=value, ~key."""
    options: tuple[str, ...]
    """Hydra's, those with a value as ``--option=value``."""
    config_dirs: tuple[Path, ...]
    """The folders of --config-dir."""
    own_options: tuple[str, ...] = ()
    """The verb's own, those with a value as ``--option=value``."""

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables of --env, which configs may read."""
        return tuple(word.partition("=")[2] for word in self.options if word.startswith(f"{ENV}="))

    @property
    def sweeps(self) -> bool:
        return bool({"-m", "--multirun"} & set(self.options))

    @property
    def asks_help(self) -> bool:
        return bool({"-h", "--help"} & set(self.options))
