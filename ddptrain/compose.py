"""From a command line to a config tree, by Hydra: the only module that imports it.

A DictConfig never leaves this module, and Hydra's own exceptions leave it as UserErrors.
"""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ddptrain.arguments import GROUPS, Arguments
from ddptrain.config.check import type_message
from ddptrain.config.schema import Config
from ddptrain.config.suggest import did_you_mean, flat_keys
from ddptrain.errors import Diverged, UserError

CONF = "ddptrain.conf"
ENTRY_POINTS = "ddptrain.conf"
Tree = dict[str, Any]


def run_composed(arguments: Arguments, job: Callable[[Tree, list[str]], None]) -> None:
    """Compose what the command line says and call ``job`` with the tree and the overrides of this job
    (``--multirun`` calls it several times); or do what an option like ``--cfg`` or ``--help`` asks.

    Raises the first of the jobs' own UserErrors and Diverged.
    """
    for override in _parsed(arguments.overrides):
        _check_choice(override)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us whole instead of being printed
    _register()
    sys.argv = [sys.argv[0], *arguments.options, *arguments.overrides]

    failures: list[UserError | Diverged] = []

    def task(composed: DictConfig) -> None:
        try:
            tree = _plain(composed)
            choices = HydraConfig.get().runtime.choices
            if choices.get("recipe") is not None:
                tree["recipe"] = choices["recipe"]
            job(tree, list(HydraConfig.get().overrides.task))
        except (UserError, Diverged) as error:  # carried past Hydra, which would report it in its own way
            failures.append(error)

    with _speaking_plainly(arguments.overrides, arguments.config_dirs):
        hydra.main(config_path=f"pkg://{CONF}", config_name="config", version_base="1.3")(task)()
    if failures:
        raise failures[0]


def saved_tree(path: Path, arguments: Arguments, overrides: Sequence[str]) -> Tree:
    """A run's saved config with overrides applied: a group's choice replaces its whole section."""
    try:
        saved = OmegaConf.load(path)
    except (OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        raise UserError(f"{path}: can't be read ({error}).") from error
    if not isinstance(saved, DictConfig):
        raise UserError(f"{path}: is no run's config: it holds a list.")
    groups_first = sorted(_parsed(overrides), key=lambda override: override.key_or_group not in GROUPS)
    for override in groups_first:
        _check_choice(override)
        if override.is_sweep_override() or override.key_or_group == "recipe":
            raise UserError(
                f"{override.input_line}: {arguments.verb} takes one value a key, and the run's own recipe."
            )
        if override.key_or_group in GROUPS:
            choice = [override.input_line or ""]
            with _speaking_plainly(choice, arguments.config_dirs):
                composed = _composed(choice, arguments.config_dirs)
            saved[override.key_or_group] = composed[override.key_or_group]
            continue
        known = flat_keys(_plain(saved))
        if override.key_or_group not in known and not override.is_add():
            raise UserError(_no_such_key(override.key_or_group, known))
        OmegaConf.update(saved, override.key_or_group, override.value(), force_add=True)
    return _plain(saved)


def recipes(arguments: Arguments) -> list[str]:
    """Names of the recipes in reach: ours, those of --config-dir and of installed packages."""
    try:
        folders = [Path(str(files(CONF)))]
    except ModuleNotFoundError as error:
        raise UserError("ddptrain is not installed here: run pip install -e . in its checkout.") from error
    folders += arguments.config_dirs
    folders += [Path(str(files(entry.value))) for entry in metadata.entry_points(group=ENTRY_POINTS)]
    return sorted({path.stem for folder in folders for path in (folder / "recipe").glob("*.yaml")})


class _InstalledRecipes(SearchPathPlugin):
    """Finds packages with the entry point group ``ddptrain.conf``; its value is a package of YAMLs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for entry in metadata.entry_points(group=ENTRY_POINTS):
            search_path.append(provider=entry.name, path=f"pkg://{entry.value}")


def _register() -> None:
    ConfigStore.instance().store(name="_schema_", node=Config)
    Plugins.instance().register(_InstalledRecipes)


def _composed(overrides: Sequence[str], config_dirs: Sequence[Path]) -> DictConfig:
    """What these overrides alone make of the defaults. Raises Hydra's own exceptions."""
    _register()
    GlobalHydra.instance().clear()
    folders = ",".join(f"file://{folder.resolve()}" for folder in config_dirs)
    with hydra.initialize_config_module(CONF, version_base="1.3"):
        return hydra.compose("config", [*overrides, f"hydra.searchpath=[{folders}]"])


def _plain(composed: DictConfig) -> Tree:
    try:
        tree = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(type_message(error)) from error
    assert isinstance(tree, dict)
    return {str(name): value for name, value in tree.items()}


def _parsed(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    found = []
    for override in overrides:
        try:
            found += parser.parse_overrides([override])
        except HydraException as error:
            raise UserError(
                f"{override}: is no override; write key=value, and quote what holds commas, brackets"
                " or blanks: 'key=\"a, b\"'."
            ) from error
    return found


def _check_choice(override: Override) -> None:
    """A group takes the name of a choice; on anything else Hydra raises a bare ValueError."""
    if override.key_or_group not in GROUPS or override.is_delete() or override.is_sweep_override():
        return
    if not isinstance(override.value(), str | list):
        raise UserError(
            f"{override.input_line}: {override.key_or_group} takes the name of a choice;"
            " python -m ddptrain --help lists them."
        )


@contextmanager
def _speaking_plainly(overrides: Sequence[str], config_dirs: Sequence[Path]) -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise while composing into a UserError."""
    with warnings.catch_warnings():
        # a search path that does not exist is only warned of, and its recipes are then missing
        warnings.filterwarnings("error", message="provider=", category=UserWarning)
        try:
            yield
        except MissingConfigException as error:
            raise UserError(_unknown_choice(error)) from error
        except ConfigCompositionException as error:
            raise UserError(_bad_override(error, overrides, config_dirs)) from error
        except OmegaConfBaseException as error:
            raise UserError(type_message(error)) from error
        except HydraException as error:
            raise UserError(_one_line(error)) from error
        except UserWarning as error:
            if not str(error).startswith("provider="):
                raise
            raise UserError(
                f"hydra.searchpath: {_one_line(error)} Name a folder or package of YAMLs."
            ) from error


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    options = [option for option in error.options or [] if not option.startswith("_")]
    if not options:
        return _one_line(error)
    hint = did_you_mean(choice, options)
    return f"{group}={choice}: there is no such choice.{hint} There are {', '.join(options)}."


_KEY = re.compile(r"Could not override '([^']+)'")
_MERGED = re.compile(r"Error merging override (.+)")


def _bad_override(
    error: ConfigCompositionException, overrides: Sequence[str], config_dirs: Sequence[Path]
) -> str:
    cause = error.__cause__
    if not isinstance(cause, OmegaConfBaseException):
        return _one_line(error)
    if merged := _MERGED.search(str(error)):
        return f"{merged[1]}: {str(cause).splitlines()[0].rstrip('.')}."
    missing = _KEY.search(str(error))
    if missing is None or "not in" not in str(cause):
        return type_message(cause)
    return _no_such_key(missing[1], _known_keys(overrides, config_dirs))


def _no_such_key(key: str, known: Sequence[str]) -> str:
    add = f" If the target of its section takes it, add it: +{key}=..." if "." in key else ""
    hint = _choices_with(key) or did_you_mean(key, known) or add
    return f"{key}: there is no such key.{hint}"


def _choices_with(key: str) -> str:
    """A sentence that names the choices of the key's group which have it, or ''."""
    group, _, inner = key.partition(".")
    if group not in GROUPS or not inner:
        return ""
    found = []
    for path in sorted((Path(str(files(CONF))) / group).glob("*.yaml")):
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        assert isinstance(tree, dict)
        if inner in flat_keys({str(name): value for name, value in tree.items()}):
            found.append(f"{group}={path.stem}")
    return (
        f" {' and '.join(found)} {'has' if len(found) == 1 else 'have'} it; choose that too." if found else ""
    )


def _known_keys(overrides: Sequence[str], config_dirs: Sequence[Path]) -> list[str]:
    """The keys of the config that this command line's group choices make."""
    choices = [override for override in overrides if override.partition("=")[0] in GROUPS]
    try:
        composed = _composed(choices, config_dirs)
    except HydraException:  # a choice that is wrong too
        composed = _composed([], config_dirs)
    tree = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(tree, dict)
    return flat_keys({str(name): value for name, value in tree.items()})


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
