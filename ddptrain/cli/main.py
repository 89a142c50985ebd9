"""The command line: ``-m ddptrain [verb] [overrides]``.

Nothing here imports torch before the config is known to be good, so ``--cfg job`` and a typo's message come
at once; nor Hydra before there is a config to compose, so help and completion do.
"""

import dataclasses
import io
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ddptrain.cli import plain_verbs
from ddptrain.cli.argv import ENV, GROUPS, Arguments, action_of, check_sweep, divided, expect_no_sweep, parse
from ddptrain.cli.augment_group import Tree
from ddptrain.cli.choices import choices, yaml_folders
from ddptrain.cli.help import TEXTS, overview
from ddptrain.config.schema import Config
from ddptrain.config.suggest import did_you_mean
from ddptrain.errors import Diverged, ExitCode, OutOfStep, RankLost, Stopped, UserError
from ddptrain.launcher.process import end_with_agent, gc_paused
from ddptrain.launcher.spinning import choose_spinning
from ddptrain.version import __version__

_WAIT_FOR_FIRST_RANK_S = 30.0
"""Longer than rank 0 takes to write its last files; when it exits, torchrun ends the others."""
_BY_SIGPIPE = 141
"""What a shell says of a program that ended so."""
_PROOFS = ("resume", "world", "eval")


def main(words: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    end_with_agent()
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr does: a name may hold what the terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        arguments = parse(words)
        if "--version" in words:
            print(f"ddptrain {__version__}")
            return ExitCode.DONE
        if arguments.asks_help and arguments.verb in TEXTS:
            print(TEXTS[arguments.verb])
            return ExitCode.DONE
        if arguments.asks_help and not arguments.overrides:
            print(overview(yaml_folders(arguments.config_dirs)))
            return ExitCode.DONE
        code = _verb(arguments)(arguments)
        sys.stdout.flush()  # while a reader that has ended is still met here
        return code
    except UserError as error:
        _print_once(error, error.everywhere)
        return ExitCode.USER_ERROR
    except (Diverged, OutOfStep) as error:
        _print_once(error, everywhere=True)
        return ExitCode.DIVERGED if isinstance(error, Diverged) else ExitCode.CRASH
    except RankLost as error:
        if str(error):
            print(f"ddptrain: {error}", file=sys.stderr, flush=True)
        return error.code
    except Stopped:  # the log has said so
        return ExitCode.STOPPED
    except BrokenPipeError:
        if not _nobody_reads_stdout():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return _BY_SIGPIPE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _verb(arguments: Arguments) -> Callable[[Arguments], int]:
    """What a command line asks for; the user's own code may be imported from then on."""
    if arguments.verb in plain_verbs.VERBS:
        return plain_verbs.VERBS[arguments.verb]
    from ddptrain.cli.run_verbs import checkpoint, on_saved_run
    from ddptrain.cli.search_path import open_user_code

    open_user_code(arguments.config_dirs)
    return {
        "train": _train,
        **dict.fromkeys(("evaluate", "predict", "export"), on_saved_run),
        "write": _write,
        "checkpoint": checkpoint,
        "launch": _launch,
        "prove": _prove,
        "bench": _bench,
        "find": _find,
    }[arguments.verb]


def _nobody_reads_stdout() -> bool:
    """Whether a pipe's reader has ended: ``| head`` has seen enough."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _train(arguments: Arguments) -> int:
    _expect_a_recipe(arguments)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"
    if arguments.sweeps and under_torchrun:
        raise UserError(
            "--multirun: a sweep starts its own ranks, so it can't run inside torchrun."
            " Start it with: python -m ddptrain --multirun ..."
        )
    if arguments.sweeps:
        return _sweep(arguments)
    expect_no_sweep(arguments)

    if (composed := _composed(arguments)) is None:
        return ExitCode.DONE
    config, overrides = composed
    choose_spinning()
    with gc_paused():
        from ddptrain.cli.run_verbs import recorded
        from ddptrain.commands import train

    with recorded():
        train.run(config, [*_own_options(arguments), *overrides])
    return ExitCode.DONE


def _sweep(arguments: Arguments) -> int:
    from ddptrain.cli import hydra_sweep
    from ddptrain.cli.compose import run_jobs
    from ddptrain.cli.search_path import open_user_code
    from ddptrain.sweep.run import SweepPoint, SweepRunner

    check_sweep(arguments)
    places = [word for word in arguments.overrides if word.startswith("hydra.searchpath=")]
    sweep = SweepRunner()

    def point(tree: Tree, words: Sequence[str]) -> SweepPoint:
        own = [word for word in words if not word.lstrip("+").startswith("sweep.")]
        return SweepPoint(_complete(tree, arguments), (*_own_options(arguments), *places, *own))

    def job(tree: Tree, overrides: list[str]) -> None:  # under a launcher that is not ours
        open_user_code(arguments.config_dirs)  # in a process of its making
        config = _complete(tree, arguments)
        from ddptrain.commands import train

        train.run(config, [*_own_options(arguments), *overrides])

    try:
        with hydra_sweep.launching(sweep, point):
            run_jobs(arguments, job)
    finally:
        code = sweep.close()
    return code


def _bench(arguments: Arguments) -> int:
    """The words that are no keys of a config are for the bench: how many steps, what to try."""
    if arguments.sweeps or "RANK" in os.environ:
        raise UserError(
            "bench: starts the trainings that it compares, and their ranks, itself. Start it without"
            " --multirun and torchrun: python -m ddptrain bench recipe=<name> ranks=2"
        )
    own, asked = _without_own(arguments, arguments.overrides)

    if (composed := _composed(asked)) is None:
        return ExitCode.DONE
    from ddptrain.commands import bench

    return bench.run(composed[0], [*asked.options, *asked.overrides], own)


def _own_options(arguments: Arguments) -> list[str]:
    """The options that are not Hydra's: where the user's own recipes are, and what they may read."""
    folders = [f"--config-dir={folder}" for folder in arguments.config_dirs]
    return [*folders, *(f"{ENV}={name}" for name in arguments.variables)]


def _write(arguments: Arguments) -> int:
    """What is no key of a config is for the data: a layout."""
    from ddptrain.cli.compose import composed_tree
    from ddptrain.cli.run_verbs import is_no_key, recorded

    own, overrides = divided(arguments.overrides, is_no_key)
    if arguments.sweeps:
        raise UserError("write: writes one set of data; leave --multirun out.")
    if not own.get("out"):
        raise UserError("write: name a new folder: write recipe=<name> out=<folder>")
    out = Path(own.pop("out"))

    composed = composed_tree(dataclasses.replace(arguments, overrides=tuple(overrides)))
    if composed is None:
        return ExitCode.DONE
    if composed[0].get("recipe") in (None, "???"):
        raise UserError("write: say whose data: write recipe=<name> out=<folder>")
    config = _complete(composed[0], arguments)
    from ddptrain.commands import write

    with recorded():
        write.run(config, out, own)
    return ExitCode.DONE


def _launch(arguments: Arguments) -> int:
    os.environ.pop("RANK", None)  # some schedulers' number of this node; each node's launch speaks for itself
    _expect_a_recipe(arguments)
    expect_no_sweep(arguments)
    if (composed := _composed(arguments)) is None:
        return ExitCode.DONE
    config, _ = composed
    if not os.environ.get("OMP_NUM_THREADS"):  # as torchrun does, but before what reads it is imported:
        os.environ["OMP_NUM_THREADS"] = "1"  # the ranks take their threads when they know how many they are
    choose_spinning()
    with gc_paused():
        from ddptrain.launcher.prefork import prefork_for

        prefork = prefork_for(main, config)  # now, so that it imports its part while this does the rest
        from ddptrain.commands import launch

    return launch.run(config, arguments.torchrun, [*arguments.options, *arguments.overrides], prefork)


def _prove(arguments: Arguments) -> int:
    """The words that are no keys of a config are for the proof: how many ranks."""
    proof, words = action_of(arguments, _PROOFS, "recipe=<name>")
    if arguments.sweeps or "RANK" in os.environ:
        raise UserError(
            "prove: starts the trainings of one recipe, and their ranks, itself. Start it without --multirun"
            f" and torchrun: python -m ddptrain prove {proof} ..."
        )
    from ddptrain.prove.process import short

    own, asked = _without_own(arguments, words)
    asked = dataclasses.replace(asked, overrides=(*asked.overrides, *short(asked.overrides)))
    if (composed := _composed(asked)) is None:
        return ExitCode.DONE
    from ddptrain.commands import prove

    return prove.run(composed[0], proof, own, [*asked.options, *asked.overrides])


def _find(arguments: Arguments) -> int:
    """The words that are no keys of a config are for the test: how many steps."""
    own, asked = _without_own(arguments, action_of(arguments, ("lr",), "recipe=<name>")[1])
    if (composed := _composed(asked)) is None:
        return ExitCode.DONE
    from ddptrain.cli.run_verbs import recorded
    from ddptrain.commands import find_lr

    with recorded():
        find_lr.run(composed[0], own)
    return ExitCode.DONE


def _composed(arguments: Arguments) -> tuple[Config, list[str]] | None:
    """The checked config of a command line, and its overrides; None where an option like ``--cfg`` has been
    answered instead."""
    if arguments.sweeps:
        raise UserError(f"{arguments.verb}: takes one config; a sweep is python -m ddptrain --multirun ...")
    from ddptrain.cli.compose import composed_tree

    composed = composed_tree(arguments)
    return composed and (_complete(composed[0], arguments), composed[1])


def _without_own(arguments: Arguments, words: Sequence[str]) -> tuple[dict[str, str], Arguments]:
    """The words that are no keys of a config, for the verb itself, and the command line without them, which
    has to name a recipe."""
    keys = {field.name for field in dataclasses.fields(Config)}
    own, overrides = divided(words, lambda name: name.isidentifier() and name not in keys)
    asked = dataclasses.replace(arguments, overrides=tuple(overrides))
    _expect_a_recipe(asked)
    return own, asked


def _expect_a_recipe(arguments: Arguments) -> None:
    if not arguments.options and not any(word.startswith("recipe=") for word in arguments.overrides):
        for key in (word.partition("=")[0] for word in arguments.overrides):
            if "." not in key and key not in GROUPS and (hint := did_you_mean(key, GROUPS)):
                raise UserError(f"{key}: there is no such key.{hint}")
        raise UserError(_welcome(arguments))


def _complete(tree: Tree, arguments: Arguments) -> Config:
    if tree.get("recipe") in (None, "???"):
        raise UserError(_welcome(arguments))
    from ddptrain.config.check import checked

    return checked(tree)


def _print_once(error: Exception, everywhere: bool) -> None:
    """Print what ends the run. Ranks that know rank 0 prints it wait for that: the first rank to exit
    makes torchrun end the others."""
    if not everywhere or os.environ.get("RANK", "0") == "0":
        print(f"ddptrain: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(_WAIT_FOR_FIRST_RANK_S)


def _welcome(arguments: Arguments) -> str:
    names = "\n".join(f"  {name}" for name in choices("recipe", yaml_folders(arguments.config_dirs)))
    given = "" if arguments.sweeps else "".join(f" {word}" for word in arguments.overrides)
    return f"""\
say what to train: recipe=<name>. There are:
{names}
For example:
  python -m ddptrain recipe=cnn_cifar10 data=shapes{given}
  torchrun --standalone --nproc-per-node=2 -m ddptrain recipe=mobilenet_cifar10 data=shapes"""
