"""``checkpoint``: checks, shows and converts what a run has saved."""

from ddptrain.config.arguments import Arguments
from ddptrain.errors import ExitCode, UserError
from ddptrain.verbs.argv import action_of, split_words
from ddptrain.verbs.composing import recorded
from ddptrain.verbs.saved_run import run_folder
from ddptrain.verbs.verb import Verb

_ACTIONS = ("verify", "show", "convert")


HELP = """\
python -m ddptrain checkpoint verify|show|convert run=<folder> [checkpoint=<which>] [out=<file>]
                                                                [weights=averaged|model]

  verify    are all of the run's checkpoints what was written?
  show      one's facts, sizes, norms, and a table of its tensors
  convert   plain weights to out=<file.pt|file.safetensors>, which load without ddptrain

  checkpoint=<which>    best, last, step-<n>, or a checkpoint's folder; by default verify reads all, show the
                        last, and convert the best, as evaluate, predict and export do"""


def checkpoint(arguments: Arguments) -> int:
    action, words = action_of(arguments, _ACTIONS, "run=runs/<recipe>/<time>-<id>")
    settings, rest = split_words(words, str.isidentifier)
    if rest:
        raise UserError(f"{rest[0]}: checkpoint {action} takes words of the form name=value only.")
    from ddptrain.config.compose import saved_tree
    from ddptrain.config.search_path import open_user_code

    open_user_code(arguments.config_dirs)
    folder = run_folder(f"checkpoint {action}", settings)
    recipe = str(saved_tree(folder / "config.yaml", arguments, []).get("recipe"))
    del settings["run"]
    from ddptrain.run import checkpoint

    with recorded():
        checkpoint.run(action, checkpoint.RunFolder(folder, recipe), settings)
    return ExitCode.DONE


VERB = Verb(
    run=checkpoint,
    summary="check a run's checkpoints, look into one, or write its weights as a plain file",
    help=HELP,
)
