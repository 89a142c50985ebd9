"""What the verbs that compose a config share. Hydra is imported when there is one to compose."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ddptrain.config.arguments import GROUPS, OURS, PACKAGE, Arguments
from ddptrain.config.augment_group import Tree
from ddptrain.config.choices import choices, yaml_folders
from ddptrain.config.schema import Config
from ddptrain.errors import KNOWN_ENDS, UserError
from ddptrain.keys import did_you_mean, flat_keys
from ddptrain.text import as_yaml
from ddptrain.verbs.argv import split_words
from ddptrain.verbs.help import of_recipe

OF_A_RUN = ("run", "checkpoint")
"""Words that name a run and its checkpoint, though sections of the config have these names."""


def composed(arguments: Arguments) -> tuple[Config, list[str]] | None:
    """The checked config of a command line, and its overrides; None where an option like ``--cfg`` has been
    answered instead."""
    if arguments.sweeps:
        raise UserError(f"{arguments.verb}: takes one config; a sweep is python -m ddptrain --multirun ...")
    if (known := tree_to_train(arguments)) is None:
        return None
    tree, overrides = known
    return checked_config(tree, arguments), overrides


def tree_to_train(arguments: Arguments) -> tuple[Tree, list[str]] | None:
    """The same, not checked."""
    from ddptrain.config.compose import composed_tree
    from ddptrain.config.search_path import open_user_code

    open_user_code(arguments.config_dirs, arguments.trusted)
    known = composed_tree(arguments)
    if known is None or not arguments.shows_config:
        return known
    if arguments.asks_help:
        print(of_recipe(known[0], yaml_folders(arguments.config_dirs)))
    else:
        print(as_yaml(_part(known[0], arguments)), end="")
    return None


def split_arguments(arguments: Arguments, words: Sequence[str]) -> tuple[dict[str, str], Arguments]:
    """The verb's own settings, which are the words that are no keys of a config, and the command line without
    them, which has to name a recipe."""
    settings, overrides = split_words(words, is_no_key)
    training = dataclasses.replace(arguments, overrides=tuple(overrides))
    expect_a_recipe(training)
    return settings, training


def expect_a_recipe(arguments: Arguments) -> None:
    if not arguments.options and not any(word.startswith("recipe=") for word in arguments.overrides):
        for key in (word.partition("=")[0] for word in arguments.overrides):
            if "." not in key and key not in GROUPS and (hint := did_you_mean(key, GROUPS)):
                raise UserError(f"{key}: there is no such key.{hint}")
        recipes = choices("recipe", yaml_folders(arguments.config_dirs))
        for word in arguments.overrides:
            if word in recipes:
                raise UserError(f"{word}: overrides are written key=value. Write recipe={word}.")
        raise UserError(_welcome(arguments))


def checked_config(tree: Tree, arguments: Arguments) -> Config:
    """The checked config of a tree. Raises UserError where it names no recipe, or is wrong."""
    if tree.get("recipe") in (None, "???"):
        raise UserError(_welcome(arguments))
    from ddptrain.config.check import checked

    return checked(tree)


def expect_no_sweep(arguments: Arguments) -> None:
    """Raise UserError for words that say how a sweep is run."""
    for word in arguments.overrides:
        if word.lstrip("+").startswith("sweep."):
            raise UserError(
                f"{word}: says how a sweep is run: it needs --multirun without hydra/launcher; here it would"
                " do nothing."
            )


def own_options(arguments: Arguments) -> list[str]:
    """What is no override of a key, and not Hydra's option: where the user's own recipes are, what they may
    read, and whom they may name."""
    places = [word for word in arguments.overrides if word.startswith("hydra.searchpath=")]
    return [*(option for option in arguments.options if option.partition("=")[0] in OURS), *places]


@contextmanager
def recorded() -> Iterator[None]:
    """Inside, a crash is recorded for torchrun, which then shows its traceback. Known ends are no crash."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    try:
        yield
    except KNOWN_ENDS:
        raise
    except Exception as error:
        handler.record_exception(error)
        raise


def is_no_key(name: str) -> bool:
    """Whether a word is the verb's own, not an override of the config."""
    return name.isidentifier() and name not in {field.name for field in dataclasses.fields(Config)}


def _part(tree: Tree, arguments: Arguments) -> Any:
    """All of it, or what --package names."""
    part: Any = tree
    for option in PACKAGE:
        for package in arguments.values_of(option):
            if package not in (keys := flat_keys(tree)):
                raise UserError(f"{option} {package}: there is no such section.{did_you_mean(package, keys)}")
            for name in package.split("."):
                part = part[name]
    return part


def _welcome(arguments: Arguments) -> str:
    names = "\n".join(f"  {name}" for name in choices("recipe", yaml_folders(arguments.config_dirs)))
    words = () if arguments.sweeps else arguments.overrides
    given = "".join(f" {word}" for word in words if "=" in word)
    return f"""\
say what to train: recipe=<name>. There are:
{names}
For example:
  python -m ddptrain recipe=cnn_cifar10 data=shapes{given}
  torchrun --standalone --nproc-per-node=2 -m ddptrain recipe=mobilenet_cifar10 data=shapes"""
