"""The command line: ``-m ddptrain [verb] [overrides]``. The only module that imports Hydra.

Nothing here imports torch before the config is known to be good, so help, ``--cfg job`` and a typo's
message come at once. A DictConfig never leaves this module.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddptrain.build import open_package
from ddptrain.config.check import checked, type_message
from ddptrain.config.schema import Config
from ddptrain.config.suggest import did_you_mean, flat_keys
from ddptrain.errors import Diverged, ExitCode, UserError

VERBS = ("train", "evaluate")
GROUPS = ("recipe", "model", "data", "optim", "sched", "strategy")
_CONF = "ddptrain.conf"
_WAIT_FOR_FIRST_RANK_S = 5.0


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    try:
        verb, rest = _verb(arguments)
        _open_user_code(rest)
        return _train(rest) if verb == "train" else _evaluate(rest)
    except UserError as error:
        return _refuse(error)
    except Diverged as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"ddptrain: {error}", file=sys.stderr)
        return ExitCode.DIVERGED


def _verb(arguments: Sequence[str]) -> tuple[str, list[str]]:
    if not arguments or "=" in arguments[0] or arguments[0].startswith(("-", "+", "~")):
        return "train", list(arguments)
    verb = arguments[0]
    if verb in VERBS:
        return verb, list(arguments[1:])
    if verb in GROUPS:
        raise UserError(f"{verb}: overrides are written {verb}=<choice>, with no spaces.")
    raise UserError(
        f"{verb}: there is no such verb; there are {', '.join(VERBS)}.{did_you_mean(verb, VERBS)}"
    )


def _refuse(error: UserError) -> int:
    """Print a user's error once. Ranks that know rank 0 prints it wait for that: the first rank to
    exit makes torchrun end the others."""
    first = os.environ.get("RANK", "0") == "0"
    if first or not error.everywhere:
        print(f"ddptrain: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(_WAIT_FOR_FIRST_RANK_S)
    return ExitCode.USER_ERROR


def _train(arguments: list[str]) -> int:
    if not any(a.startswith("recipe=") for a in arguments) and not any(a.startswith("-") for a in arguments):
        raise UserError(_welcome(arguments))
    if {"-m", "--multirun"} & set(arguments) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "--multirun: a sweep starts its own ranks, so it can't run inside torchrun."
            " Start it with: python -m ddptrain --multirun ..."
        )
    failure: list[BaseException] = []

    def job(composed: DictConfig) -> None:
        # Hydra would report and swallow what a job raises, so it is carried past it
        try:
            config = _finished(composed, HydraConfig.get().runtime.choices.get("recipe"))
            from torch.distributed.elastic.multiprocessing.errors import record

            from ddptrain.commands import train

            overrides = [a for a in arguments if not a.startswith("-")]
            record(lambda: _expected(lambda: train.run(config, overrides), failure))()
        except (UserError, Diverged) as error:
            failure.append(error)

    _compose_and(job, arguments)
    if failure:
        raise failure[0]
    return ExitCode.DONE


def _expected(work: Callable[[], None], failure: list[BaseException]) -> None:
    """Keep errors that have a message of their own out of torchrun's record of crashes."""
    try:
        work()
    except (UserError, Diverged) as error:
        failure.append(error)


def _compose_and(job: Callable[[DictConfig], None], arguments: list[str]) -> None:
    """Let Hydra compose the config of this command line and call the job with it."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us whole instead of being printed
    _register()
    sys.argv = [sys.argv[0], *arguments]
    decorated = hydra.main(config_path=f"pkg://{_CONF}", config_name="config", version_base="1.3")(job)
    try:
        decorated()
    except MissingConfigException as error:
        raise UserError(_unknown_choice(error)) from error
    except ConfigCompositionException as error:
        raise UserError(_bad_override(error, arguments)) from error
    except OmegaConfBaseException as error:
        raise UserError(type_message(error)) from error
    except HydraException as error:
        raise UserError(" ".join(str(error).split())) from error


def _finished(composed: DictConfig, recipe: str | None) -> Config:
    tree = _plain(composed)
    if recipe is None and tree.get("recipe") in (None, "???"):
        raise UserError(_welcome([]))
    return checked({**tree, "recipe": recipe or tree["recipe"]})


def _plain(composed: DictConfig) -> dict[str, Any]:
    try:
        tree = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(type_message(error)) from error
    assert isinstance(tree, dict)
    return {str(name): value for name, value in tree.items()}


def _evaluate(arguments: list[str]) -> int:
    own = {"run": None, "checkpoint": "last"}
    overrides = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in own:
            own[name] = value
        elif not argument.startswith("-"):
            overrides.append(argument)
    if not own["run"]:
        raise UserError("evaluate: name the run's folder: evaluate run=runs/<recipe>/<time>-<id>")
    folder = Path(own["run"])
    if not (folder / "config.yaml").is_file():
        raise UserError(f"run={folder}: is no run's folder; it holds no config.yaml.")
    config = _saved_config(folder / "config.yaml", overrides)
    from ddptrain.commands import evaluate

    evaluate.run(config, folder, own["checkpoint"] or "last")
    return ExitCode.DONE


def _saved_config(path: Path, overrides: list[str]) -> Config:
    """A run's config with overrides applied: a group's choice replaces its whole section."""
    try:
        saved = OmegaConf.load(path)
        parsed = OverridesParser.create().parse_overrides(overrides)
    except (OmegaConfBaseException, ValueError, OSError) as error:
        raise UserError(f"{path}: can't be read ({error}).") from error
    except HydraException as error:
        raise UserError(" ".join(str(error).split())) from error
    assert isinstance(saved, DictConfig)
    for override in parsed:
        if override.key_or_group in GROUPS:
            _register()
            with hydra.initialize_config_module(_CONF, version_base="1.3"):
                try:
                    composed = hydra.compose("config", [override.input_line or ""])
                except MissingConfigException as error:
                    raise UserError(_unknown_choice(error)) from error
            saved[override.key_or_group] = composed[override.key_or_group]
            continue
        known = flat_keys(_plain(saved))
        if override.key_or_group not in known and not override.is_add():
            hint = did_you_mean(override.key_or_group, known)
            raise UserError(f"{override.key_or_group}: there is no such key.{hint}")
        OmegaConf.update(saved, override.key_or_group, override.value(), force_add=True)
    return checked(_plain(saved))


def _register() -> None:
    """Give Hydra the schema, and the conf folders of installed packages with recipes."""
    ConfigStore.instance().store(name="_schema_", node=Config)
    Plugins.instance().register(_InstalledRecipes)


class _InstalledRecipes(SearchPathPlugin):
    """Finds packages with the entry point group ``ddptrain.conf``; its value is a package of YAMLs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for entry in metadata.entry_points(group="ddptrain.conf"):
            search_path.append(provider=entry.name, path=f"pkg://{entry.value}")


def _open_user_code(arguments: Sequence[str]) -> None:
    """Let configs name code that the user put beside them: modules in the folder of --config-dir or
    the current folder, and installed packages that carry recipes."""
    for entry in metadata.entry_points(group="ddptrain.conf"):
        open_package(entry.value.partition(".")[0])
    folders = [Path.cwd(), *_config_dirs(arguments)]
    for folder in folders[1:]:
        sys.path.insert(0, str(folder.resolve()))
    for folder in folders:
        for path in folder.iterdir() if folder.is_dir() else []:
            is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
            if is_module and path.stem.isidentifier() and path.stem not in sys.stdlib_module_names:
                open_package(path.stem)


def _config_dirs(arguments: Sequence[str]) -> list[Path]:
    found = []
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            found += [value] if equals else list(arguments[position + 1 : position + 2])
    return [Path(value) for value in found]


def _welcome(arguments: Sequence[str]) -> str:
    recipes = sorted(p.stem for p in (Path(_conf_folder()) / "recipe").glob("*.yaml"))
    lines = [
        "say what to train: recipe=<name>. There are:",
        *(f"  {name}" for name in recipes),
        "For example:",
    ]
    given = " ".join(arguments)
    lines.append(f"  python -m ddptrain recipe=cnn_digits {given}".rstrip())
    lines.append(
        "  torchrun --standalone --nproc-per-node=2 -m ddptrain recipe=mobilenet_cifar10 data=shapes"
    )
    return "\n".join(lines)


def _conf_folder() -> str:
    from importlib.resources import files

    try:
        return str(files(_CONF))
    except ModuleNotFoundError as error:
        raise UserError("ddptrain is not installed here: run pip install -e . in its checkout.") from error


def _unknown_choice(error: MissingConfigException) -> str:
    name = error.missing_cfg_file or ""
    group, _, choice = name.rpartition("/")
    options = [o for o in error.options or [] if not o.startswith("_")]
    if not options:
        return " ".join(str(error).split())
    hint = did_you_mean(choice, options)
    return f"{group}={choice}: there is no such choice.{hint} There are {', '.join(options)}."


_KEY = re.compile(r"Could not override '([^']+)'")


def _bad_override(error: ConfigCompositionException, arguments: Sequence[str]) -> str:
    text = str(error)
    match = _KEY.search(text)
    cause = error.__cause__
    if not isinstance(cause, OmegaConfBaseException):
        return " ".join(text.split())
    if match is None or "not in" not in str(cause):
        return type_message(cause)
    key = match[1]
    return f"{key}: there is no such key.{did_you_mean(key, _known_keys(arguments)) or _add_hint(key)}"


def _add_hint(key: str) -> str:
    return f" If the target of its section takes it, add it: +{key}=..."


def _known_keys(arguments: Sequence[str]) -> list[str]:
    """The keys of the config that this command line's group choices make."""
    choices = [a for a in arguments if a.partition("=")[0] in GROUPS]
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module(_CONF, version_base="1.3"):
        try:
            composed = hydra.compose("config", choices)
        except HydraException:
            composed = hydra.compose("config")
    tree = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(tree, dict)
    return flat_keys({str(name): value for name, value in tree.items()})
