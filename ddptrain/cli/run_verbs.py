"""The verbs on a run's folder: its saved config, and the words that are no overrides of it."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddptrain.cli.argv import Arguments, action_of, divided
from ddptrain.cli.compose import saved_tree
from ddptrain.config.check import checked
from ddptrain.config.schema import Config
from ddptrain.errors import ExitCode, UserError
from ddptrain.launcher.record import recorded

_OF_A_RUN = ("run", "checkpoint")
_CHECKPOINT_ACTIONS = ("verify", "show", "convert")


def evaluate(arguments: Arguments) -> int:
    own, overrides = divided(arguments.overrides, lambda name: name in _OF_A_RUN)
    config, folder = _saved_config(arguments, own, overrides)
    from ddptrain.commands import evaluate

    recorded(lambda: evaluate.run(config, folder, own.get("checkpoint") or "last"))
    return ExitCode.DONE


def predict(arguments: Arguments) -> int:
    config, folder, checkpoint, own = _asked_of_a_run(arguments)
    from ddptrain.commands import predict

    recorded(lambda: predict.run(config, folder, checkpoint, own))
    return ExitCode.DONE


def export(arguments: Arguments) -> int:
    config, folder, checkpoint, own = _asked_of_a_run(arguments)
    from ddptrain.commands import export

    recorded(lambda: export.run(config, folder, checkpoint, own))
    return ExitCode.DONE


def checkpoint(arguments: Arguments) -> int:
    action, words = action_of(arguments, _CHECKPOINT_ACTIONS, "run=runs/<recipe>/<time>-<id>")
    own, rest = divided(words, str.isidentifier)
    if rest:
        raise UserError(f"{rest[0]}: checkpoint {action} takes words of the form name=value only.")
    folder = _run_folder(f"checkpoint {action}", own)
    recipe = saved_tree(folder / "config.yaml", arguments, []).get("recipe")
    own.pop("run")
    from ddptrain.commands import checkpoint

    recorded(lambda: checkpoint.run(action, checkpoint.Run(folder, str(recipe)), own))
    return ExitCode.DONE


def _asked_of_a_run(arguments: Arguments) -> tuple[Config, Path, str, dict[str, str]]:
    """The config of a run, its folder, the checkpoint, and the words for its task: a prompt, a picture."""
    own, overrides = divided(arguments.overrides, is_no_key)
    config, folder = _saved_config(arguments, own, overrides)
    checkpoint = own.pop("checkpoint", "") or "last"
    own.pop("run")
    return config, folder, checkpoint, own


def is_no_key(name: str) -> bool:
    """Whether a word is the verb's own, not an override of the config."""
    of_config = {field.name for field in dataclasses.fields(Config)} - {"seed", *_OF_A_RUN}
    return name.isidentifier() and name not in of_config


def _saved_config(
    arguments: Arguments, own: Mapping[str, str], overrides: Sequence[str]
) -> tuple[Config, Path]:
    """The config of the run that ``run=`` names, with the overrides, and its folder."""
    folder = _run_folder(arguments.verb, own)
    return checked(saved_tree(folder / "config.yaml", arguments, overrides)), folder


def _run_folder(verb: str, own: Mapping[str, str]) -> Path:
    """The folder that ``run=`` names."""
    if not own.get("run"):
        raise UserError(f"{verb}: name the run's folder: {verb} run=runs/<recipe>/<time>-<id>")
    folder = Path(own["run"])
    if not (folder / "config.yaml").is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/config.yaml"))
        hint = f" Did you mean run={folder / inside[-1]}?" if inside else ""
        raise UserError(f"run={folder}: is no run's folder; it holds no config.yaml.{hint}")
    return folder
