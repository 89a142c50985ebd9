"""A command line's words: the verb, Hydra's overrides, and its options."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddptrain.config.suggest import did_you_mean
from ddptrain.errors import UserError

VERBS = ("train", "evaluate", "predict", "export", "write")
GROUPS = ("recipe", "model", "data", "optim", "sched", "strategy")
_SWITCHES = (
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc"),
)
_INFO = ("--info", "-i")
_INFO_OF = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_CONFIG_DIR = ("--config-dir", "-cd")
_TAKE_A_VALUE = (
    *_CONFIG_DIR,
    *("--config-name", "-cn", "--config-path", "-cp", "--cfg", "-c", "--package", "-p"),
    "--experimental-rerun",
)


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

    @property
    def sweeps(self) -> bool:
        return bool({"-m", "--multirun"} & set(self.options))


def parse(words: Sequence[str]) -> Arguments:
    """Sort a command line's words, wherever they stand.

    Raises UserError for an unknown verb or option.
    """
    rest = list(words)
    verb = "train"
    if rest and "=" not in rest[0] and not rest[0].startswith(("-", "+", "~")):
        verb = rest.pop(0)
        if verb in GROUPS:
            raise UserError(f"{verb}: overrides are written {verb}=<choice>, with no spaces.")
        if verb not in VERBS:
            hint = did_you_mean(verb, VERBS)
            raise UserError(f"{verb}: there is no such verb; there are {', '.join(VERBS)}.{hint}")
    overrides, options, config_dirs = [], [], []
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            overrides.append(word)
        elif name in _TAKE_A_VALUE:
            if not equals and not rest:
                raise UserError(f"{word}: needs a value: {word}=...")
            value = value if equals else rest.pop(0)
            options.append(f"{name}={value}")
            config_dirs += [Path(value)] if name in _CONFIG_DIR else []
        elif name in _INFO and not equals and rest and rest[0] in _INFO_OF:
            options.append(f"{name}={rest.pop(0)}")
        elif name in (*_SWITCHES, *_INFO):
            options.append(word)
        else:
            hint = did_you_mean(name, (*_SWITCHES, *_INFO, *_TAKE_A_VALUE))
            raise UserError(f"{word}: there is no such option.{hint}")
    return Arguments(verb, tuple(overrides), tuple(options), tuple(config_dirs))
