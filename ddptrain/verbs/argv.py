"""A command line's words: the verb, Hydra's overrides, and its options."""

import os
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path

from ddptrain.config.arguments import CONFIG_DIR, ENV, EXPLAIN, GROUPS, OURS, TRUST, Arguments
from ddptrain.config.choices import choices, known_keys, yaml_folders
from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean
from ddptrain.verbs.installed import verb_named, verb_names

_SWITCHES = (*("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),)
INFO = ("--info", "-i")
INFO_OF = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_TAKE_A_VALUE = (
    *OURS,
    *("--config-name", "-cn", "--config-path", "-cp", "--cfg", "-c", "--package", "-p"),
    *("--experimental-rerun", EXPLAIN),
)
HYDRA_OPTIONS = frozenset({*_SWITCHES, *INFO, *_TAKE_A_VALUE})
"""And ours that go with them."""

_NAMES_FILE = re.compile(r"(^|[.-])(dir|resume|root|path|run|out|checkpoint)$")
"""Words whose value names a file or a folder, as those without a value do."""
_LONGEST_NAME = 255
_NEAR = 0.7
"""How much like a key's last word an option must be to have meant it (difflib's ratio)."""
_MOST_MEANT = 3


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
        if verb not in (names := verb_names()):
            if verb in choices("recipe", yaml_folders([])):
                raise UserError(f"{verb}: is a recipe, and no verb. Write recipe={verb}.")
            hint = did_you_mean(verb, names)
            raise UserError(f"{verb}: there is no such verb; there are {', '.join(names)}.{hint}")
    known = verb_named(verb)
    overrides, options, config_dirs, own_options = [], [], [], []
    asks_help = bool({"-h", "--help"} & set(rest))
    verb_options = {} if asks_help else known.options(rest)
    of_a_config = HYDRA_OPTIONS.difference(OURS, verb_options, ["--version"])
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not equals or _NAMES_FILE.search(name):
            _check_length(word, value if equals else word)
        if name in of_a_config and not known.composes and not asks_help:
            compose = ", ".join(other for other in verb_names() if verb_named(other).composes)
            raise UserError(f"{name}: is for {compose}; {verb} composes no config.")
        if not word.startswith("-"):
            if verb == "train" and word in verb_names():
                raise UserError(f"{word}: a verb comes first: python -m ddptrain {word} ...")
            overrides.append(word)
        elif verb_options.get(name) is False and not equals:
            own_options.append(word)
        elif verb_options.get(name) or name in _TAKE_A_VALUE:
            if not equals and not rest:
                raise UserError(f"{word}: needs a value: {word}=...")
            value = value if equals else rest.pop(0)
            _check_length(f"{name}={value}", value)
            if name == ENV and not re.fullmatch(r"[A-Za-z_]\w*", value):
                raise UserError(f"{name} {value}: takes the name of an environment variable: {name} DATA")
            if name == TRUST and not all(part.strip().isidentifier() for part in value.split(",")):
                raise UserError(
                    f"{name} {value}: takes names of installed packages: {name} albumentations,transformers"
                )
            if name in verb_options:
                own_options.append(f"{name}={value}")
                continue
            options.append(f"{name}={value}")
            config_dirs += [Path(value)] if name in CONFIG_DIR else []
        elif name in INFO and not equals:
            what = rest.pop(0) if rest and rest[0] in INFO_OF else "all"
            options.append(f"{name}={what}")
        elif name in (*_SWITCHES, *verb_options):
            if equals:
                raise UserError(f"{word}: {name} takes no value here; write {name}.")
            options.append(word)
        elif not asks_help:  # which answers whatever else is there
            hint = _key_meant(name, value if equals else rest[0] if rest else "") if known.composes else ""
            hint = hint or did_you_mean(name, (*_SWITCHES, *INFO, *_TAKE_A_VALUE, *verb_options))
            raise UserError(f"{word}: there is no such option.{hint}")
    return Arguments(verb, tuple(overrides), tuple(options), tuple(config_dirs), tuple(own_options))


def _key_meant(option: str, value: str) -> str:
    """A sentence that names the keys which an option such as ``--batch-size`` could mean, written as
    overrides of this value; '' where there are none."""
    name = option.strip("-").replace("-", "_")
    keys = [*GROUPS, *known_keys()]
    lasts = {key.rpartition(".")[2] for key in keys}
    near = [name] if name in lasts else get_close_matches(name, lasts, n=1, cutoff=_NEAR)
    meant = [name] if name in keys else [key for key in keys if key.rpartition(".")[2] in near]
    if len(name) < 2 or not meant:
        return ""
    shown = value if re.fullmatch(r"[\w./+-]+", value) and not value.startswith("-") else "..."
    words = " or ".join(f"{key}={shown}" for key in dict.fromkeys(meant[:_MOST_MEANT]))
    return f" Keys of the config are set without dashes: {words}"


def _check_length(word: str, value: str) -> None:
    """Raise UserError for a path that no file system takes."""
    longest = max(len(os.fsencode(part)) for part in value.split("/"))
    if longest > _LONGEST_NAME:
        raise UserError(
            f"{word[:60]}...: holds a name of {longest} bytes, and file systems take at most {_LONGEST_NAME}."
            " Choose a shorter one."
        )


def action_of(arguments: Arguments, actions: Sequence[str], example: str) -> tuple[str, list[str]]:
    """The word after the verb, which says what to do, and the others.

    Raises UserError where it is none of ``actions``; ``example`` shows how one goes on.
    """
    action, *words = arguments.overrides or ("",)
    if action not in actions:
        command, hint = f"{arguments.verb} {action}".strip(), did_you_mean(action, actions)
        raise UserError(f"{command}: say what to do: {arguments.verb} {'|'.join(actions)} {example}.{hint}")
    return action, words


def split_words(words: Sequence[str], is_setting: Callable[[str], bool]) -> tuple[dict[str, str], list[str]]:
    """The verb's own settings, of the words name=value, and the overrides among them."""
    settings, overrides = {}, []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and is_setting(name):
            settings[name] = value
        else:
            overrides.append(word)
    return settings, overrides
