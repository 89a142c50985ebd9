"""``find``: a learning rate."""

from ddptrain.config.arguments import Arguments
from ddptrain.errors import ExitCode
from ddptrain.verbs.argv import action_of
from ddptrain.verbs.composing import composed, recorded, split_arguments
from ddptrain.verbs.verb import Verb

HELP = """\
python -m ddptrain find lr recipe=<name> [overrides] [steps=<n>] [lowest=<rate>] [highest=<rate>] [out=<file>]

The learning-rate range test (arXiv 1506.01186): a short training in which the rate rises by equal factors
until the loss diverges. Prints from where to where the loss falls, and the override to copy: a tenth of the
rate at which the loss is lowest. The model is thrown away. On several ranks under torchrun.

  steps=<n>                         200
  lowest=<rate>  highest=<rate>     1e-6 and 10
  out=<file>                        the picture (find-lr-<recipe>.png); its numbers lie beside it, as JSON

  python -m ddptrain find lr recipe=cnn_digits
  torchrun --standalone --nproc-per-node=2 -m ddptrain find lr recipe=mobilenet_cifar10"""


def find(arguments: Arguments) -> int:
    """The words that are no keys of a config are for the test: how many steps."""
    settings, training = split_arguments(arguments, action_of(arguments, ("lr",), "recipe=<name>")[1])
    if (known := composed(training)) is None:
        return ExitCode.DONE
    from ddptrain.run import find_lr

    with recorded():
        find_lr.run(known[0], settings)
    return ExitCode.DONE


VERB = Verb(
    run=find,
    summary="a learning rate, by a short training in which it rises",
    help=HELP,
    composes=True,
)
