"""The command line: ``-m ddptrain [verb] [overrides]``.

Nothing here imports torch before the config is known to be good, so help, ``--cfg job`` and a typo's
message come at once.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from ddptrain.arguments import GROUPS, Arguments, parse
from ddptrain.build import open_package
from ddptrain.compose import ENTRY_POINTS, Tree, recipes, run_composed, saved_tree
from ddptrain.config.check import checked
from ddptrain.config.suggest import did_you_mean
from ddptrain.errors import Diverged, ExitCode, UserError

_WAIT_FOR_FIRST_RANK_S = 30.0
"""Longer than rank 0 takes to write its last files; when it exits, torchrun ends the others."""
_LIBRARIES = frozenset({"ddptrain", "torch", "torchvision", *sys.stdlib_module_names})
"""Never a user's own code, also where the current folder is a checkout of one of them."""


def main(words: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    try:
        arguments = parse(words)
        _open_user_code(arguments)
        return _train(arguments) if arguments.verb == "train" else _evaluate(arguments)
    except UserError as error:
        _print_once(error, error.everywhere)
        return ExitCode.USER_ERROR
    except Diverged as error:
        _print_once(error, everywhere=True)
        return ExitCode.DIVERGED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _train(arguments: Arguments) -> int:
    if not arguments.options and not any(word.startswith("recipe=") for word in arguments.overrides):
        for key in (word.partition("=")[0] for word in arguments.overrides):
            if "." not in key and key not in GROUPS and (hint := did_you_mean(key, GROUPS)):
                raise UserError(f"{key}: there is no such key.{hint}")
        raise UserError(_welcome(arguments))
    if arguments.sweeps and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            "--multirun: a sweep starts its own ranks, so it can't run inside torchrun."
            " Start it with: python -m ddptrain --multirun ..."
        )
    if arguments.sweeps and any(word.startswith("run.dir=") for word in arguments.overrides):
        raise UserError("run.dir: the jobs of a sweep need folders of their own; leave run.dir out.")

    def job(tree: Tree, overrides: list[str]) -> None:
        if tree.get("recipe") in (None, "???"):
            raise UserError(_welcome(arguments))
        config = checked(tree)
        from ddptrain.commands import train

        folders = [f"--config-dir={folder}" for folder in arguments.config_dirs]
        _recorded(lambda: train.run(config, [*folders, *overrides]))

    run_composed(arguments, job)
    return ExitCode.DONE


def _evaluate(arguments: Arguments) -> int:
    own = {"run": "", "checkpoint": "last"}
    overrides = []
    for word in arguments.overrides:
        name, _, value = word.partition("=")
        if name in own:
            own[name] = value
        else:
            overrides.append(word)
    if not own["run"]:
        raise UserError("evaluate: name the run's folder: evaluate run=runs/<recipe>/<time>-<id>")
    folder = Path(own["run"])
    if not (folder / "config.yaml").is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/config.yaml"))
        hint = f" Did you mean run={folder / inside[-1]}?" if inside else ""
        raise UserError(f"run={folder}: is no run's folder; it holds no config.yaml.{hint}")
    config = checked(saved_tree(folder / "config.yaml", arguments, overrides))
    from ddptrain.commands import evaluate

    _recorded(lambda: evaluate.run(config, folder, own["checkpoint"]))
    return ExitCode.DONE


def _recorded(work: Callable[[], None]) -> None:
    """Let torchrun record a crash, so that it shows its traceback. What has a message of its own is none."""
    from torch.distributed.elastic.multiprocessing.errors import record

    expected: list[UserError | Diverged] = []

    def caught() -> None:
        try:
            work()
        except (UserError, Diverged) as error:
            expected.append(error)

    record(caught)()
    if expected:
        raise expected[0]


def _print_once(error: Exception, everywhere: bool) -> None:
    """Print what ends the run. Ranks that know rank 0 prints it wait for that: the first rank to exit
    makes torchrun end the others."""
    if not everywhere or os.environ.get("RANK", "0") == "0":
        print(f"ddptrain: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(_WAIT_FOR_FIRST_RANK_S)


def _open_user_code(arguments: Arguments) -> None:
    """Let configs name code that the user put beside them: modules in the folder of --config-dir or
    the current folder, and installed packages that carry recipes."""
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        open_package(entry.value.partition(".")[0])
    for folder in arguments.config_dirs:
        if not folder.is_dir():
            raise UserError(f"--config-dir={folder}: there is no such folder.")
        sys.path.insert(0, str(folder.resolve()))
    for folder in (Path.cwd(), *arguments.config_dirs):
        for path in folder.iterdir() if folder.is_dir() else []:
            is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
            if is_module and path.stem.isidentifier() and path.stem not in _LIBRARIES:
                open_package(path.stem)


def _welcome(arguments: Arguments) -> str:
    names = [f"  {name}" for name in recipes(arguments)]
    given = " ".join(arguments.overrides)
    return "\n".join(
        [
            "say what to train: recipe=<name>. There are:",
            *names,
            "For example:",
            f"  python -m ddptrain recipe=cnn_cifar10 data=shapes {given}".rstrip(),
            "  torchrun --standalone --nproc-per-node=2 -m ddptrain recipe=mobilenet_cifar10 data=shapes",
        ]
    )
