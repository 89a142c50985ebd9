"""``evaluate``: the metrics of a run."""

from ddptrain.config.arguments import Arguments
from ddptrain.distributed.launcher.spinning import choose_spinning
from ddptrain.errors import ExitCode
from ddptrain.verbs.composing import recorded
from ddptrain.verbs.saved_run import CHECKPOINT_WORDS, read_run
from ddptrain.verbs.verb import Verb

HELP = f"""\
python -m ddptrain evaluate run=<folder> [checkpoint=<which>] [overrides]

The metrics of a finished or running run, on any number of ranks (torchrun), as one JSON object on standard
output.

{CHECKPOINT_WORDS}

  python -m ddptrain evaluate run=runs/mine data=imagefolder data.root=other"""


def evaluate(arguments: Arguments) -> int:
    config, folder, checkpoint = read_run(arguments)
    choose_spinning()
    from ddptrain.run import evaluate

    with recorded():
        evaluate.run(config, folder, checkpoint)
    return ExitCode.DONE


VERB = Verb(
    run=evaluate,
    summary="the metrics of a run, as JSON",
    help=HELP,
    of_a_run=True,
)
