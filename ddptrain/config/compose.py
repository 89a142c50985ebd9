"""From a command line to a config tree, by Hydra.

A DictConfig never leaves this module, and Hydra's own exceptions leave it as UserErrors.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ddptrain.config.arguments import EXPLAIN, GROUPS, OURS, PACKAGE, SHOW_ALL, Arguments
from ddptrain.config.augment_group import Tree, place_augment
from ddptrain.config.check import type_message
from ddptrain.config.chosen_nodes import chosen_nodes
from ddptrain.config.explain import explained, hydra_loader, no_section, no_such_key, plain_tree
from ddptrain.config.limits import few_interpolations, is_below, is_plain_name, read_config
from ddptrain.config.overrides import check_added, check_override, expect_one_value, parsed
from ddptrain.config.search_path import CONF, look_in
from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean, flat_keys, key_of

_NOT_TAKEN = ("--config-name", "-cn", "--config-path", "-cp", "--experimental-rerun")
"""Options of Hydra that put another config in the place of ours, or unpickle a file."""


def composed_tree(arguments: Arguments) -> tuple[Tree, list[str]] | None:
    """The config tree of a command line, and its overrides; None where an option like ``--cfg=hydra`` or
    ``--explain`` has been answered instead."""
    words = _checked_words(arguments)
    if keys := arguments.values_of(EXPLAIN):
        with _hydra_errors_as_user_errors(words):
            print(explained(keys[0], words, partial(placed, words=words, compose=_composed_meanwhile)))
        return None
    if not arguments.shows_config and not {*_options_of_hydra(arguments)} <= {"--run", "-r"}:
        _run_hydra(arguments, words, lambda composed: None)
        return None
    # by Hydra's API and not its main function, which composes each config twice
    with _hydra_errors_as_user_errors(words), hydra_loader():
        composed = hydra.compose("config", words, return_hydra_config=True)
        with open_dict(composed):
            of_hydra = composed.pop("hydra")
        words = _typed(of_hydra)
        tree = placed(composed, of_hydra.runtime.choices, words, _composed_meanwhile)
        if {*SHOW_ALL} & {*arguments.options}:
            tree["hydra"] = OmegaConf.to_container(of_hydra)
        return tree, words


def run_jobs(arguments: Arguments, job: Callable[[Tree, list[str]], None]) -> None:
    """Call ``job`` with the tree and the overrides of each job of a ``--multirun`` (under a launcher that is
    not ours: in processes of its choice).

    Raises what a job raised.
    """

    def task(composed: DictConfig) -> None:
        of_hydra = HydraConfig.get()
        words = _typed(of_hydra)
        job(placed(composed, of_hydra.runtime.choices, words, _composed_meanwhile), words)

    _run_hydra(arguments, _checked_words(arguments), task)


def _checked_words(arguments: Arguments) -> list[str]:
    """The overrides of a command line, without ``hydra.searchpath``. Raises UserError for words, and for
    options of Hydra, that are not taken."""
    checked = _checked_overrides(arguments, arguments.overrides)
    if not arguments.sweeps:
        expect_one_value(checked)
    shown = {*arguments.values_of("--cfg"), *arguments.values_of("-c")}
    if others := shown - {"job", "hydra", "all"}:
        raise UserError(f"--cfg {others.pop()}: must be one of job, hydra, all.")
    names = [option.partition("=")[0] for option in arguments.options]
    for name in names:
        if name in _NOT_TAKEN:
            raise UserError(
                f"{name}: is not taken. Put a recipe into a folder and name that: --config-dir=..."
            )
        if name in PACKAGE and not shown:
            raise UserError(f"{name}: says what --cfg shows, and goes with it: --cfg job {name} ...")
        if name == "--resolve" and "hydra" not in shown:
            raise UserError("--resolve: is for --cfg hydra; what is trained is shown so anyway.")
        if name in ("--run", "-r") and arguments.sweeps:
            raise UserError(f"{name}: trains once, and --multirun many times; leave one out.")
    return [override.input_line or "" for override in checked]


def _options_of_hydra(arguments: Arguments) -> list[str]:
    return [option for option in arguments.options if option.partition("=")[0] not in OURS]


def _run_hydra(arguments: Arguments, words: Sequence[str], task: Callable[[DictConfig], None]) -> None:
    """Hydra's main function: the jobs of a sweep, or what an option like ``--info`` asks."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us whole instead of being printed
    shows = any(option.partition("=")[0] in ("--cfg", "-c") for option in arguments.options)
    argv = sys.argv
    sys.argv = [argv[0], *_options_of_hydra(arguments), *words]  # Hydra reads them there
    try:
        # with --cfg it looks values up itself
        with _hydra_errors_as_user_errors(words), few_interpolations() if shows else nullcontext():
            hydra.main(config_path=f"pkg://{CONF}", config_name="config", version_base="1.3")(task)()
    finally:
        sys.argv = argv


def _typed(of_hydra: Any) -> list[str]:
    """The overrides as they were typed: to go through Hydra's list looks up what they name."""
    words: Any = OmegaConf.to_container(of_hydra.overrides.task, resolve=False)
    return list(words)


def placed(
    composed: DictConfig, choices: Mapping[str, Any], words: Sequence[str],
    compose: Callable[[Sequence[str]], Tree],
) -> Tree:  # fmt: skip
    """A composed config as a plain tree, with the recipe's name, and the command line's choices in the places
    of the recipe's. choices: of the groups. compose: as `chosen_nodes` has it. Raises UserError for names
    that lead out of where a run belongs."""
    with open_dict(composed):
        for section, node in chosen_nodes(composed, words, compose).items():
            composed[section] = node
    tree = _plain(composed)  # now that what is looked up is in its place
    if choices.get("recipe") is not None:
        tree["recipe"] = choices["recipe"]
    tree = place_augment(tree, words)
    check_places(tree, words)
    return tree


def saved_tree(path: Path, arguments: Arguments, overrides: Sequence[str]) -> Tree:
    """A run's saved config with overrides applied: a group's choice replaces its whole section."""
    saved = read_config(path)
    checked = _checked_overrides(arguments, overrides)
    for override in sorted(checked, key=lambda override: override.key_or_group not in GROUPS):
        if override.is_sweep_override() or override.key_or_group == "recipe":
            raise UserError(
                f"{override.input_line}: {arguments.verb} takes one value a key, and the run's own recipe."
            )
        if override.key_or_group in GROUPS:
            choice = [override.input_line or ""]
            with _hydra_errors_as_user_errors(choice):
                saved[override.key_or_group] = _composed(choice)[override.key_or_group]
            continue
        known = flat_keys(_plain(saved))
        if override.key_or_group not in known and not override.is_add() and not override.is_force_add():
            raise UserError(no_such_key(override.key_or_group, known))
        _check_no_list(saved, [override.input_line or ""])
        if override.is_delete():
            section, _, name = override.key_or_group.rpartition(".")
            del (OmegaConf.select(saved, section) if section else saved)[name]
        else:
            OmegaConf.update(saved, override.key_or_group, override.value(), force_add=True)
    tree = place_augment(_plain(saved), overrides)
    check_places(tree, ["run.dir", "run.mirror"])  # saved as the user gave them; the folder asked is another
    return tree


def _checked_overrides(arguments: Arguments, words: Sequence[str]) -> list[Override]:
    """The overrides of these words without ``hydra.searchpath``, by which this sets where YAMLs are found."""
    places: list[str] = []
    named = [word for word in words if word.startswith("hydra.searchpath=")]
    for word in named:
        value = parsed([word])[0].value()
        if not isinstance(value, list) or not all(isinstance(place, str) for place in value):
            raise UserError(f"{word}: takes a list of folders: 'hydra.searchpath=[...]'.")
        places += value
    look_in(arguments.config_dirs, places, arguments.variables)
    overrides = parsed([word for word in words if word not in named])
    for override in overrides:
        check_override(override)
    check_added(overrides)
    return overrides


def _composed(overrides: Sequence[str]) -> DictConfig:
    """What these overrides alone make of the defaults. Raises Hydra's own exceptions."""
    with hydra_loader():
        return hydra.compose("config", list(overrides))


def _composed_meanwhile(overrides: Sequence[str]) -> Tree:
    """The same, while Hydra runs a job."""
    loader = GlobalHydra.instance().config_loader()
    return plain_tree(loader.load_configuration("config", list(overrides), RunMode.RUN), resolve=False)


def _plain(composed: DictConfig) -> Tree:
    try:
        with few_interpolations():
            tree = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(_message(error)) from error
    assert isinstance(tree, dict)
    for section, value in tree.items():
        for key in value if isinstance(value, dict) else [section]:
            if not isinstance(key, str):
                quote = " YAML reads on, off, yes and no as true and false; quote them." * isinstance(
                    key, bool
                )
                raise UserError(f"{section!s}: {key!r} is no key; keys are text.{quote}")
    return tree  # type: ignore[return-value]


def check_places(tree: Tree, words: Sequence[str]) -> None:
    """Refuse names that would lead out of where a run belongs."""
    recipe, run = tree.get("recipe"), tree.get("run") or {}
    folder, mirror = run.get("dir"), run.get("mirror")
    if recipe not in (None, "???") and not is_plain_name(recipe):
        raise UserError(f"recipe={recipe}: is no recipe's name.")
    for name, node in (tree.get("controllers") or {}).items():
        target = str((node or {}).get("_target_", "")) if isinstance(node, dict) else ""
        here = any(word.startswith(f"+controllers.{name}=") for word in words)
        if target.startswith("ddptrain.") and not here:
            raise UserError(
                f"controllers.{name}: {target} is for sweeps and benches, which name it themselves."
            )
    if isinstance(folder, str) and not is_typed("run.dir", words) and not is_below(folder):
        raise UserError(
            f"run.dir={folder}: a recipe may only name a folder below the current one. If you want this one,"
            f" say so on the command line: run.dir={folder}"
        )
    if mirror and not is_typed("run.mirror", words):
        raise UserError(
            f"run.mirror={mirror}: is for the command line alone, because the run is written there. If you"
            f" want this one, say so there: run.mirror={mirror}"
        )


def is_typed(key: str, words: Sequence[str]) -> bool:
    """Whether a word of the command line says what a section's key is: ``run.dir=x`` or ``run={dir:x}``."""
    section, _, name = key.partition(".")
    names = {word: word.lstrip("+").partition("=")[0] for word in words}
    whole = parsed([word for word in words if names[word] == section])
    return key in names.values() or any(
        isinstance(value := override.value(), dict) and name in value for override in whole
    )


@contextmanager
def _hydra_errors_as_user_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise while composing into a UserError."""
    try:
        yield
    except MissingConfigException as error:
        raise UserError(_unknown_choice(error)) from error
    except ConfigCompositionException as error:
        raise UserError(_bad_override(error, overrides)) from error
    except OmegaConfBaseException as error:
        raise UserError(_message(error)) from error
    except HydraException as error:
        raise UserError(_one_line(error)) from error
    except UserError:
        raise
    except ValueError:  # OmegaConf's, of a name in a list: freeze.x=1; or a job's own
        _check_no_list(_of_choices(overrides), overrides)
        raise
    except RecursionError as error:
        raise UserError("defaults: YAMLs that include each other can't be composed.") from error


def _message(error: OmegaConfBaseException) -> str:
    """OmegaConf's complaint, or ours that it wraps."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, UserError):
        inner = inner.__cause__ or inner.__context__
    if inner is None:
        return type_message(error)
    return f"{error.full_key}: {inner}" if error.full_key else str(inner)


def _unknown_choice(error: MissingConfigException) -> str:
    file = error.missing_cfg_file or ""
    group, _, choice = file.partition("/") if file.partition("/")[0] in GROUPS else file.rpartition("/")
    options = [option for option in error.options or [] if not option.startswith("_")]
    if not options:
        return _one_line(error)
    yours = " Folders with more are named by --config-dir=..." * (group == "recipe")
    hint = did_you_mean(choice, options) or yours
    return f"{group}={choice}: there is no such choice.{hint} There are {', '.join(options)}."


def _bad_override(error: ConfigCompositionException, overrides: Sequence[str]) -> str:
    cause = error.__cause__ or error.__context__
    if unmatched := re.search(r"In '(.+)': Could not override '(.+)'\. No match", str(error)):
        where, group = unmatched.groups()
        hint = did_you_mean(group, GROUPS)
        return f"{where}.yaml: defaults: there is no group {group}.{hint} There are {', '.join(GROUPS)}."
    if not isinstance(cause, OmegaConfBaseException):
        return _one_line(error)
    if merged := re.search(r"Error merging override (.+)", str(error)):
        return type_message(cause, merged[1])
    if re.match("Cannot merge|Cannot assign|Merge error", str(cause)) and (problem := no_section(overrides)):
        return problem
    missing = re.search(r"Could not override '([^']+)'", str(error))
    if missing is None or "not in" not in str(cause):
        return _message(cause)
    return no_such_key(missing[1], _known_keys(overrides))


def _check_no_list(config: DictConfig, words: Sequence[str]) -> None:
    """Raises UserError for a word whose key lies in a list of this config."""
    for word in words:
        section = key_of(word).rpartition(".")[0]
        if section and isinstance(OmegaConf.select(config, section), ListConfig):
            raise UserError(f"{word}: {section} is a list; give all of it: {section}=[...]")


def _known_keys(overrides: Sequence[str]) -> list[str]:
    """The keys of the config that this command line's group choices make."""
    return flat_keys(plain_tree(_of_choices(overrides), resolve=False))


def _of_choices(overrides: Sequence[str]) -> DictConfig:
    """The config that this command line's group choices make."""
    choices = [override for override in overrides if override.partition("=")[0] in GROUPS]
    try:
        return _composed(choices)
    except HydraException:  # a choice that is wrong too
        return _composed([])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
