"""``--multirun``: a sweep of trainings."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ddptrain.config.arguments import EXPLAIN, HELP, SCRIPT, Arguments
from ddptrain.config.augment_group import Tree
from ddptrain.config.compose import run_jobs
from ddptrain.config.search_path import open_user_code
from ddptrain.errors import UserError
from ddptrain.keys import key_of
from ddptrain.tools.sweep.hydra_sweep import launching
from ddptrain.tools.sweep.run import SweepPoint, SweepRunner
from ddptrain.verbs.argv import INFO
from ddptrain.verbs.composing import checked_config, expect_no_sweep, own_options

_HAVE_FOLDERS = (
    "the jobs of a sweep have folders of their own, below sweep.dir, and go on there; leave it out."
)


def multirun(arguments: Arguments) -> int:
    _check(arguments)
    open_user_code(arguments.config_dirs, arguments.trusted)
    sweep, programs = SweepRunner(), [Path(path).read_bytes() for path in arguments.values_of(SCRIPT)]
    program = hashlib.sha256(b"".join(programs)).hexdigest() if programs else ""

    def point(tree: Tree, words: Sequence[str]) -> SweepPoint:
        config = checked_config(tree, arguments)
        if config.run.resume != "auto":
            raise UserError(f"run.resume={config.run.resume}: {_HAVE_FOLDERS}")
        own = [word for word in words if not word.lstrip("+").startswith("sweep.")]
        return SweepPoint(config, (*own_options(arguments), *own), program)

    def job(tree: Tree, overrides: list[str]) -> None:  # under a launcher that is not ours
        open_user_code(arguments.config_dirs, arguments.trusted)  # in a process of its making
        config = checked_config(tree, arguments)
        from ddptrain.run import train

        train.run(config, [*own_options(arguments), *overrides])

    try:
        with launching(sweep, point):
            run_jobs(arguments, job)
    finally:
        code = sweep.close()
    return code


def _check(arguments: Arguments) -> None:
    """Raise UserError for words that ``--multirun`` can't go with."""
    for option in arguments.options:
        if option.partition("=")[0] in (*HELP, "--cfg", "-c", EXPLAIN, *INFO):
            raise UserError(f"{option}: shows one config; leave --multirun out.")
    launchers = [word for word in arguments.overrides if word.startswith("hydra/launcher=")]
    foreign = bool(launchers) and launchers[-1] != "hydra/launcher=gpu_pool"
    if foreign:
        expect_no_sweep(arguments)
    for word in arguments.overrides:
        if foreign and key_of(word) == "run.mirror":
            raise UserError(f"{word}: the jobs of {launchers[-1]} would all be sent there; leave it out.")
        if key_of(word) in ("run.dir", "run.resume"):
            raise UserError(f"{word}: {_HAVE_FOLDERS}")
