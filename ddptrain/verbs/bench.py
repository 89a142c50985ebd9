"""``bench``: which overrides make a step faster here."""

import os

from ddptrain.config.arguments import Arguments
from ddptrain.errors import ExitCode, UserError
from ddptrain.verbs.composing import composed, split_arguments
from ddptrain.verbs.verb import Verb

HELP = """\
python -m ddptrain bench recipe=<name> [overrides] [ranks=<n>] [steps=<n>] [rounds=<n>] [try='<a>;<b>']
                         [ddp=true]

Where the time of a step goes on this machine, and which overrides make it shorter: each is a separate
training, in turns with the training as it is, so that the ratios hold on a busy machine too.

  ranks=<n>    ranks of each training (1)
  steps=<n>    of the shortest lap (10); a lap lasts a second at least
  rounds=<n>   laps of each override, in turns with as many of the training as it is (6)
  try='...'    what to try, split by semicolons: try='precision=bf16;compile=default optim=adamw'. By default
               channels_last, precision, compile, data.resident, data.workers, the fused optimizer and, with
               several ranks, DDP's buckets and compression, as far as the recipe has them. try= tries nothing
  ddp=true     several ranks (by default one for each GPU, else two), and what DDP offers: its buckets, static
               graph, gradient views, compression

The table shows each one's time a step, its ratio to the training as it is (median, least and most of the
laps), its peak memory, and the split of its time; its first row is the training as it is against itself:
what gains no more than that differs by is not called faster. Below it stands the fastest command, to copy.
Nothing is saved or evaluated meanwhile, and what is trained is thrown away.

With ddp=true the table has what of the all-reduce is exposed: not hidden behind the backward pass."""


def bench(arguments: Arguments) -> int:
    """The words that are no keys of a config are for the bench: how many steps, what to try."""
    if arguments.sweeps or "RANK" in os.environ:
        raise UserError(
            "bench: starts the trainings that it compares, and their ranks, itself. Start it without"
            " --multirun and torchrun: python -m ddptrain bench recipe=<name> ranks=2"
        )
    settings, training = split_arguments(arguments, arguments.overrides)
    if (known := composed(training)) is None:
        return ExitCode.DONE
    from ddptrain.tools.bench import run

    return run.run(known[0], [*training.options, *training.overrides], settings)


VERB = Verb(
    run=bench,
    summary="which overrides make a step faster on this machine",
    help=HELP,
    composes=True,
)
