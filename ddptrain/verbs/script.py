"""The option ``--script``: what a program gives to ``ddptrain.fit``, for any verb. Imports no torch."""

import atexit
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import takewhile
from pathlib import Path

from ddptrain.config.arguments import SCRIPT, Arguments
from ddptrain.distributed.launcher.process import OBJECTS, environment_of_no_rank
from ddptrain.errors import UserError
from ddptrain.keys import key_of
from ddptrain.verbs.argv import parse

FIT_INTO = "DDPTRAIN_FIT_INTO"
"""Environment variable: a folder into which ``ddptrain.fit`` writes its objects and words, and then ends the
program."""
WORDS = "words.json"
_SHOWN = 20


def with_script(arguments: Arguments, composes: bool) -> Arguments:
    """The command line with the words that the program of ``--script`` gives to `fit`, where the user gives
    no others; its objects are known to this process and those that it starts."""
    if not (named := arguments.values_of(SCRIPT)):
        return arguments
    # in a rank of a launch it is there; on another node (sweep.on=slurm) its name alone is
    if not Path(os.environ.get(OBJECTS, "")).is_file():
        os.environ[OBJECTS] = str(objects_file(Path(named[-1])))
    given = fit_arguments(Path(os.environ[OBJECTS]))
    own = set(map(key_of, arguments.overrides))
    if arguments.verb not in ("train", "launch") or arguments.sweeps:  # these name folders of their own
        own.add("run.dir")
    more = [word for word in given.overrides if key_of(word) not in own] if composes else []
    actions = list(takewhile(str.isidentifier, arguments.overrides))  # as in `find lr`
    return dataclasses.replace(
        arguments,
        # before the user's: a section that these give, train={epochs:7}, has the last word
        overrides=(*actions, *more, *arguments.overrides[len(actions) :]),
        options=tuple(dict.fromkeys((*arguments.options, *given.options))),
        config_dirs=tuple(dict.fromkeys((*arguments.config_dirs, *given.config_dirs))),
    )


def fit_arguments(objects: Path) -> Arguments:
    """The command line that a program gives to `fit` with these objects."""
    return parse(["train", *json.loads(objects.with_name(WORDS).read_text())])


def objects_file(script: Path) -> Path:
    """Run a program up to its first `fit`; the file with the objects that it gives. It lives as long as this
    process. Raises UserError where there is no such call."""
    if not script.is_file():
        raise UserError(f"{SCRIPT}={script}: there is no such file.")
    folder = Path(tempfile.mkdtemp(prefix="ddptrain-"))
    atexit.register(_remove, folder, os.getpid())
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**environment_of_no_rank(), FIT_INTO: str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    if not (folder / WORDS).exists():
        end = "\n".join(ended.stderr.splitlines()[-_SHOWN:])
        said = f"it ended with exit code {ended.returncode}:\n{end}" if ended.returncode else "it never does."
        raise UserError(f"{SCRIPT}={script}: must call ddptrain.fit, and {said}")
    return folder / "objects.pkl"


def _remove(folder: Path, owner: int) -> None:
    """Only by the process that has made it: ranks are forked, and a restart needs it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
