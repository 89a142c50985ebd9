"""The words of a command line as Hydra's overrides, and which of them are taken."""

import re
from collections.abc import Sequence
from itertools import pairwise

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException

from ddptrain.config.arguments import GROUPS
from ddptrain.config.limits import is_plain_name
from ddptrain.errors import UserError
from ddptrain.text import quoted

HYDRA_KEYS = ("hydra.searchpath", "hydra/launcher", "hydra/sweeper", "hydra.launcher.*", "hydra.sweeper.*")
"""Of Hydra's own keys these may be given, and on the command line alone: the others start code (callbacks,
logging), set the environment, or write files where they like. Launcher and sweeper are installed plugins."""
_PLUGIN_KEY = re.compile(r"hydra(/(launcher|sweeper)|\.(launcher|sweeper)\.[\w.]+)")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+(e[+-]?\d+)?", re.IGNORECASE)


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Hydra's overrides of these words. Raises UserError for what is none."""
    for word, following in pairwise(overrides):
        if following.startswith("=") or (word.endswith("=") and "=" not in following):
            raise UserError(f"{word} {following}: write key=value, without a blank beside the =.")
    parser = OverridesParser.create()
    parsed_words = []
    for override in overrides:
        short = _short(override)
        try:
            parsed_words += parser.parse_overrides([override])
        except HydraException as error:
            key, equals, value = override.partition("=")
            if equals and not value.isascii() and not set(value) & set("'\"[]{},"):
                raise UserError(
                    f'{short}: letters beyond ASCII are read within quotes: "{key}={quoted(value)}"'
                ) from error
            raise UserError(
                f"{short}: is no override; write key=value, and quote what holds commas, brackets"
                " or blanks: 'key=\"a, b\"'."
            ) from error
        except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
            raise UserError(f"{short}: can't be read ({error}).") from error
    return parsed_words


def check_override(override: Override) -> None:
    """Refuse Hydra's own keys, and choices that are no names: on some Hydra raises a bare ValueError."""
    key, word = override.key_or_group, override.input_line or ""
    if not key:
        raise UserError(f"{word}: is no override; write key=value.")
    if _PLUGIN_KEY.fullmatch(key) and override.package is None and not override.is_sweep_override():
        is_name = "/" not in key or is_plain_name(override.value())
        if is_name and "_target_" not in f"{key} {override.value()}":
            return
        raise UserError(f"{word}: plugins are chosen by their names: hydra/launcher=<name>.")
    if re.match(r"hydra([./]|$)", key):
        raise UserError(f"{word}: of Hydra's own keys only {', '.join(HYDRA_KEYS)} may be set; leave it out.")
    if "/" in key or override.package is not None:
        raise UserError(f"{word}: there is no such key; the groups are {', '.join(GROUPS)}.")
    choice = word.partition("=")[2]
    if "." not in key and re.search(r"\.\.|//|\\|^['\"]?[/~]", choice):
        raise UserError(f"{word}: {key} takes a name, not a path. Folders of recipes go by --config-dir=...")
    if key not in GROUPS or override.is_delete() or override.is_sweep_override():
        return
    if not isinstance(override.value(), str | list):
        raise UserError(f"{word}: {key} takes the name of a choice; python -m ddptrain --help lists them.")


def check_added(overrides: Sequence[Override]) -> None:
    """Refuse choices of one group that are given, added and taken out: Hydra ignores one of them."""
    for group in GROUPS:
        words = [override for override in overrides if override.key_or_group == group]
        ways = {(override.is_add(), override.is_delete()): override.input_line for override in words}
        if len(ways) > 1:
            first, second, *_ = ways.values()
            raise UserError(f"{second}: does not go with {first}. Name all in one list: '{group}=[...]'.")


def expect_one_value(overrides: Sequence[Override]) -> None:
    """Raise UserError for a value that stands for several, without ``--multirun``."""
    for override in overrides:
        if not override.is_sweep_override():
            continue
        word, values = override.input_line or "", override.value()
        key, _, value = word.partition("=")
        by_commas = isinstance(values, ChoiceSweep) and values.simple_form
        if not by_commas:
            meant = "Or give one value."
        elif _DECIMAL_COMMA.fullmatch(value):
            meant = f"Or, for one number, write a point: {key}={value.replace(',', '.')}"
        elif key in GROUPS:
            meant = f"Or give one name; observers and controllers take several as a list: '{key}=[{value}]'"
        else:
            meant = f"Or quote it: \"{key}={quoted(value)}\" is one text, '{key}=[{value}]' a list."
        why = "a comma separates values to sweep over" if by_commas else "is for a sweep"
        raise UserError(
            f"{_short(word)}: {why}, and a sweep needs --multirun: python -m ddptrain --multirun ..."
            f" {_short(meant)}"
        )


def _short(words: str) -> str:
    return words if len(words) < 200 else f"{words[:60]}..."
