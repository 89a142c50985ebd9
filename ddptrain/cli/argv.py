"""A command line's words: the verb, Hydra's overrides, and its options."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from ddptrain.cli.choices import known_keys
from ddptrain.config.suggest import did_you_mean
from ddptrain.errors import UserError

VERBS = (
    *("train", "evaluate", "predict", "export", "write", "checkpoint"),
    *("launch", "prove", "report", "doctor", "bench", "find", "completion"),
)
GROUPS = ("recipe", "model", "data", "augment", "optim", "sched", "strategy", "observers", "controllers")
_SWITCHES = (*("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),)
_INFO = ("--info", "-i")
_INFO_OF = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
OF_DOCTOR = ("--json", "--cluster")
CONFIG_DIR = ("--config-dir", "-cd")
EXPLAIN = "--explain"
ENV = "--env"
_COMPOSES = ("train", "launch", "write", "prove", "bench", "find")
_TAKE_A_VALUE = (
    *CONFIG_DIR,
    *("--config-name", "-cn", "--config-path", "-cp", "--cfg", "-c", "--package", "-p"),
    *("--experimental-rerun", EXPLAIN, ENV),
)
OF_TORCHRUN = {
    **dict.fromkeys(("--nnodes", "--nproc-per-node", "--node-rank", "--role", "--local-addr"), True),
    **dict.fromkeys(("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"), True),
    **dict.fromkeys(("--master-addr", "--master-port", "--max-restarts", "--monitor-interval"), True),
    **dict.fromkeys(("--log-dir", "-r", "--redirects", "-t", "--tee", "--local-ranks-filter"), True),
    **dict.fromkeys(("--signals-to-handle", "--numa-binding"), True),
    **dict.fromkeys(("--standalone", "--virtual-local-rank"), False),
}
"""torchrun's options that every torch from 2.11 on has, and whether each has a value: with these a command
line is understood before torch is imported. Each may be spelled with _ for its inner -, too."""
_LAUNCH_KNOWS = ("help", "module", "no_python", "run_path", "training_script", "print_completion")
"""torchrun's options that are not for ``launch``: it always starts ddptrain."""


_NAMES_FILE = re.compile(r"(^|[.-])(dir|resume|root|path|run|out|checkpoint|facts)$")
"""Words whose value names a file or a folder, as those without a value do."""
_LONGEST_NAME = 255
_NEAR = 0.7
"""How much like a key's last word an option must be to have meant it (difflib's ratio)."""
_MOST_MEANT = 3


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
    torchrun: tuple[str, ...] = ()
    """torchrun's own options, for ``launch``."""

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
    overrides, options, config_dirs, torchrun = [], [], [], []
    helps = bool({"-h", "--help"} & set(rest))
    of_torchrun = _torchrun_options(rest) if verb == "launch" and not helps else {}
    switches = (*_SWITCHES, *(OF_DOCTOR if verb == "doctor" else ()))
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not equals or _NAMES_FILE.search(name):
            _check_length(word, value if equals else word)
        if not word.startswith("-"):
            overrides.append(word)
        elif of_torchrun.get(name) is False:
            torchrun.append(word)
        elif name in (*_TAKE_A_VALUE, *of_torchrun):
            if not equals and not rest:
                raise UserError(f"{word}: needs a value: {word}=...")
            value = value if equals else rest.pop(0)
            _check_length(f"{name}={value}", value)
            if name == EXPLAIN and verb not in _COMPOSES:
                raise UserError(f"{name}: is for {', '.join(_COMPOSES)}; {verb} composes no config.")
            if name == ENV and not re.fullmatch(r"[A-Za-z_]\w*", value):
                raise UserError(f"{name} {value}: takes the name of an environment variable: {name} DATA")
            if name in of_torchrun:
                torchrun.append(f"{name}={value}")
                continue
            options.append(f"{name}={value}")
            config_dirs += [Path(value)] if name in CONFIG_DIR else []
        elif name in _INFO and not equals and rest and rest[0] in _INFO_OF:
            options.append(f"{name}={rest.pop(0)}")
        elif name in (*switches, *_INFO):
            if equals:
                raise UserError(f"{word}: {name} takes no value here; write {name}.")
            options.append(word)
        else:
            hint = _key_meant(name, value if equals else rest[0] if rest else "") if verb in _COMPOSES else ""
            hint = hint or did_you_mean(name, (*switches, *_INFO, *_TAKE_A_VALUE, *of_torchrun))
            raise UserError(f"{word}: there is no such option.{hint}")
    return Arguments(verb, tuple(overrides), tuple(options), tuple(config_dirs), tuple(torchrun))


def _key_meant(option: str, value: str) -> str:
    """A sentence that names the keys which an option such as ``--batch-size`` could mean, written as
    overrides of this value; '' where there are none."""
    name = option.strip("-").replace("-", "_")
    keys = [*GROUPS, *known_keys()]
    lasts = {key.rpartition(".")[2] for key in keys}
    near = [name] if name in lasts else get_close_matches(name, lasts, n=1, cutoff=_NEAR)
    found = [name] if name in keys else [key for key in keys if key.rpartition(".")[2] in near]
    if len(name) < 2 or not found:
        return ""
    shown = value if re.fullmatch(r"[\w./+-]+", value) and not value.startswith("-") else "..."
    words = " or ".join(f"{key}={shown}" for key in dict.fromkeys(found[:_MOST_MEANT]))
    return f" Keys of the config are set without dashes: {words}"


def _check_length(word: str, value: str) -> None:
    """Raise UserError for a path that no file system takes."""
    longest = max(len(os.fsencode(part)) for part in value.split("/"))
    if longest > _LONGEST_NAME:
        raise UserError(
            f"{word[:60]}...: holds a name of {longest} bytes, and file systems take at most {_LONGEST_NAME}."
            " Choose a shorter one."
        )


def check_sweep(arguments: Arguments) -> None:
    """Raise UserError for words that ``--multirun`` can't go with."""
    for option in arguments.options:
        if option.partition("=")[0] in ("--cfg", "-c", EXPLAIN, *_INFO):
            raise UserError(f"{option}: shows one config; leave --multirun out.")
    launchers = [word for word in arguments.overrides if word.startswith("hydra/launcher=")]
    if launchers and launchers[-1] != "hydra/launcher=gpu_pool":
        expect_no_sweep(arguments)
    for word in arguments.overrides:
        if word.startswith(("run.dir=", "run.resume=")):
            raise UserError(
                f"{word}: the jobs of a sweep have folders of their own, below sweep.dir, and go on there;"
                " leave it out."
            )


def expect_no_sweep(arguments: Arguments) -> None:
    """Raise UserError for words that say how a sweep is run."""
    for word in arguments.overrides:
        if word.lstrip("+").startswith("sweep."):
            raise UserError(f"{word}: is for --multirun with its own launcher; here it would do nothing.")


def action_of(arguments: Arguments, actions: Sequence[str], example: str) -> tuple[str, list[str]]:
    """The word after the verb, which says what to do, and the others.

    Raises UserError where it is none of ``actions``; ``example`` shows how one goes on.
    """
    action, *words = arguments.overrides or ("",)
    if action not in actions:
        asked, hint = f"{arguments.verb} {action}".strip(), did_you_mean(action, actions)
        raise UserError(f"{asked}: say what to do: {arguments.verb} {'|'.join(actions)} {example}.{hint}")
    return action, words


def divided(words: Sequence[str], is_own: Callable[[str], bool]) -> tuple[dict[str, str], list[str]]:
    """The verb's own key=value words, and the overrides among them."""
    own, overrides = {}, []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and is_own(name):
            own[name] = value
        else:
            overrides.append(word)
    return own, overrides


def _torchrun_options(words: Sequence[str]) -> dict[str, bool]:
    """The options of torchrun that ``launch`` takes, and whether each has a value."""
    known = {name[:2] + name[2:].replace("-", "_"): takes for name, takes in OF_TORCHRUN.items()}
    known |= OF_TORCHRUN
    asked = {word.partition("=")[0] for word in words if word.startswith("-")}
    if asked <= known.keys() | {*_SWITCHES, *_INFO, *_TAKE_A_VALUE}:
        return known
    from torch.distributed.run import get_args_parser  # it knows all, and takes a second to import

    actions = [action for action in get_args_parser()._actions if action.dest not in _LAUNCH_KNOWS]
    return {name: action.nargs != 0 for action in actions for name in action.option_strings}
