"""``prove``: whether a recipe keeps its bits."""

import dataclasses
import os

from ddptrain.config.arguments import Arguments
from ddptrain.errors import ExitCode, UserError
from ddptrain.verbs.argv import action_of
from ddptrain.verbs.composing import composed, split_arguments
from ddptrain.verbs.verb import Verb

_PROOFS = ("resume", "world", "eval")


HELP = """\
python -m ddptrain prove resume|world|eval recipe=<name> [overrides] [ranks=<n>] [out=<new folder>]

Whether a recipe keeps the engine's promises, by whole trainings that are compared bit for bit.

  resume    killed at random moments and started again, it ends with the same bits (kills=<n>)
  world     any number of ranks trains the same
  eval      any number of ranks finds the same metrics"""


def prove(arguments: Arguments) -> int:
    """The words that are no keys of a config are for the proof: how many ranks."""
    proof, words = action_of(arguments, _PROOFS, "recipe=<name>")
    if arguments.sweeps or "RANK" in os.environ:
        raise UserError(
            "prove: starts the trainings of one recipe, and their ranks, itself. Start it without --multirun"
            f" and torchrun: python -m ddptrain prove {proof} ..."
        )
    from ddptrain.tools.prove.process import short

    settings, training = split_arguments(arguments, words)
    training = dataclasses.replace(training, overrides=(*training.overrides, *short(training.overrides)))
    if (known := composed(training)) is None:
        return ExitCode.DONE
    from ddptrain.tools.prove import run

    return run.run(known[0], proof, settings, [*training.options, *training.overrides])


VERB = Verb(
    run=prove,
    summary="whether a recipe keeps its bits over kills and ranks",
    help=HELP,
    composes=True,
)
