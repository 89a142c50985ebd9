"""``report``: runs or a sweep side by side."""

from ddptrain.config.arguments import Arguments
from ddptrain.errors import ExitCode
from ddptrain.observe.mirror.layout import is_mirror
from ddptrain.verbs.argv import split_words
from ddptrain.verbs.saved_run import place_of
from ddptrain.verbs.verb import Verb

HELP = """\
python -m ddptrain report <run's folder> [<another> ...] [out=<file.html>]
python -m ddptrain report <folder with runs below> [out=<file.html>]
python -m ddptrain report <sweep's folder> [out=<file.html>]
python -m ddptrain report '<pattern>' [out=<file.html>]
python -m ddptrain report run=<folder> to=mlflow|wandb|trackio [project=<name>]

The results of a run, of several side by side, or of a sweep: a table here, and a page that is one file and
loads nothing, to keep or to send. A run that still goes on, or was killed, is shown as far as it got.

  out=<file.html>   where the page goes; by default report.html in the run's or the sweep's folder, and for
                    several runs in the nearest folder that holds them all; of a mirror, in this folder
  to=<tracker>      send what a tracker lacks of these runs, from metrics.jsonl; each point once
  run=<folder>      the same as the folder alone
  project=<name>    there; by default the run's own, or the recipe's name

The table: what differs in config and environment, the last and the best value of each metric (* marks the
best run), where the time went, and the one thing that would help most. The page has this and the curves,
pictures, texts, devices and the whole config, and the command that repeats each run.

  python -m ddptrain report runs/cnn_digits/2026-11-21_02-14-19-70d7f5
  python -m ddptrain report runs/a runs/b out=compared.html
  python -m ddptrain report runs/cnn_digits
  python -m ddptrain report 'runs/cnn_*/*'
  python -m ddptrain report sweeps/cnn_digits
  python -m ddptrain report run=runs/a to=mlflow"""


def report(arguments: Arguments) -> int:
    settings, folders = split_words(arguments.overrides, str.isidentifier)
    folders += [settings.pop("run")] if "run" in settings else []
    from ddptrain.tools.report import run

    if "to" not in settings and any(map(is_mirror, folders)):
        settings.setdefault("out", "report.html")  # not into the cache
    run.run([place_of(folder, checkpoints=False) for folder in folders], settings)
    return ExitCode.DONE


VERB = Verb(
    run=report,
    summary="runs or a sweep, side by side, as one HTML page",
    help=HELP,
)
