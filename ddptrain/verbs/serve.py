"""``serve``: all runs below a folder on a live page."""

from pathlib import Path

from ddptrain.config.arguments import Arguments
from ddptrain.errors import ExitCode, UserError
from ddptrain.verbs.argv import split_words
from ddptrain.verbs.verb import Verb

HELP = """\
python -m ddptrain serve [<folder>] [port=<n>] [address=<address>]

A page with all runs and sweeps below a folder (by default runs), which follows them: a list, and the report
on those that are chosen, several side by side. Ends with Ctrl-C.

  port=<n>              where it listens (8765); 0: any that is free
  address=<address>     127.0.0.1, this machine alone. With 0.0.0.0 anybody in the network can read the runs

  python -m ddptrain serve
  python -m ddptrain serve sweeps port=9000
  ssh -L 8765:localhost:8765 node-a                       # from another machine, and then localhost:8765"""


def serve(arguments: Arguments) -> int:
    settings, folders = split_words(arguments.overrides, str.isidentifier)
    if len(folders) > 1:
        raise UserError(f"serve {' '.join(folders)}: takes one folder, and shows all runs below it.")
    from ddptrain.tools.serve import site

    site.run(Path(folders[0] if folders else "runs"), settings)
    return ExitCode.DONE


VERB = Verb(
    run=serve,
    summary="all runs below a folder, on a page that follows them",
    help=HELP,
)
