"""What a command line asks of the config: groups and keys to set, Hydra's options, and ours beside them."""

from dataclasses import dataclass
from pathlib import Path

GROUPS = ("recipe", "model", "data", "augment", "optim", "sched", "strategy", "observers", "controllers")
CONFIG_DIR = ("--config-dir", "-cd")
EXPLAIN = "--explain"
ENV = "--env"
SCRIPT = "--script"
TRUST = "--trust"
OURS = (*CONFIG_DIR, ENV, SCRIPT, TRUST)
"""Options that are not Hydra's, and go into a run's record."""
HELP = ("--help", "-h")
SHOW_JOB, SHOW_ALL = ("--cfg=job", "-c=job"), ("--cfg=all", "-c=all")
PACKAGE = ("--package", "-p")


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

    def values_of(self, option: str) -> tuple[str, ...]:
        """Of an option that may be given several times."""
        return tuple(word.partition("=")[2] for word in self.options if word.startswith(f"{option}="))

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables of --env, which configs may read."""
        return self.values_of(ENV)

    @property
    def trusted(self) -> tuple[str, ...]:
        """The installed packages of --trust, whose classes configs may name."""
        return tuple(name.strip() for value in self.values_of(TRUST) for name in value.split(","))

    @property
    def sweeps(self) -> bool:
        return bool({"-m", "--multirun"} & set(self.options))

    @property
    def asks_help(self) -> bool:
        return bool({*HELP} & set(self.options))

    @property
    def shows_config(self) -> bool:
        """Whether the config is printed, and nothing is done."""
        return bool({*HELP, *SHOW_JOB, *SHOW_ALL} & set(self.options))
