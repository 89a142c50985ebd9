"""``write``: a recipe's data set as files."""

import dataclasses
from pathlib import Path

from ddptrain.config.arguments import Arguments
from ddptrain.errors import ExitCode, UserError
from ddptrain.verbs.argv import split_words
from ddptrain.verbs.composing import checked_config, is_no_key, recorded, tree_to_train
from ddptrain.verbs.verb import Verb

HELP = """\
python -m ddptrain write recipe=<name> [overrides] layout=<one of the data's> out=<new folder>

Write a recipe's data set to disk: pictures, masks, boxes and text as layout=stream (blocks of
block_mb=32, text also with tokenizer=<tokenizer.json>), boxes also as layout=yolo or coco, or
with layout=check the likely mistakes in their labels, as text and as a page of pictures."""


def write(arguments: Arguments) -> int:
    """What is no key of a config is for the data: a layout."""
    settings, overrides = split_words(arguments.overrides, is_no_key)
    if arguments.sweeps:
        raise UserError("write: writes one set of data; leave --multirun out.")
    composed = tree_to_train(dataclasses.replace(arguments, overrides=tuple(overrides)))
    if composed is None:
        return ExitCode.DONE
    if composed[0].get("recipe") in (None, "???"):
        raise UserError("write: say whose data: write recipe=<name> out=<folder>")
    if not settings.get("out"):
        raise UserError("write: name a new folder: write recipe=<name> out=<folder>")
    out = Path(settings.pop("out"))
    config = checked_config(composed[0], arguments)
    from ddptrain.run import write

    with recorded():
        write.run(config, out, settings)
    return ExitCode.DONE


VERB = Verb(
    run=write,
    summary="a recipe's data set as files",
    help=HELP,
    composes=True,
)
