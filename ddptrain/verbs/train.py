"""``train``, which may be left out: trains what a recipe and its overrides say."""

import os

from ddptrain.config.arguments import Arguments
from ddptrain.distributed.launcher.process import gc_paused
from ddptrain.distributed.launcher.spinning import choose_spinning
from ddptrain.errors import ExitCode, UserError
from ddptrain.verbs.composing import composed, expect_a_recipe, expect_no_sweep, own_options, recorded
from ddptrain.verbs.verb import Verb


def train(arguments: Arguments) -> int:
    expect_a_recipe(arguments)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"
    if arguments.sweeps and under_torchrun:
        raise UserError(
            "--multirun: a sweep starts its own ranks, so it can't run inside torchrun."
            " Start it with: python -m ddptrain --multirun ..."
        )
    if arguments.sweeps:
        from ddptrain.verbs.multirun import multirun

        return multirun(arguments)
    expect_no_sweep(arguments)
    if (known := composed(arguments)) is None:
        return ExitCode.DONE
    config, overrides = known
    choose_spinning()
    with gc_paused():
        from ddptrain.run import train

    with recorded():
        train.run(config, [*own_options(arguments), *overrides])
    return ExitCode.DONE


VERB = Verb(run=train, summary="train a recipe; the verb itself may be left out", composes=True)
