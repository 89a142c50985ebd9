"""A run's model in this process."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from torch import nn

from ddptrain.api.recipe import Data, Task
from ddptrain.config.arguments import SCRIPT
from ddptrain.config.targets import packages_restored
from ddptrain.recipes.given import Objects, giving, read
from ddptrain.run.setup import loaded_model
from ddptrain.verbs.argv import parse
from ddptrain.verbs.composing import own_options
from ddptrain.verbs.saved_run import read_run_to_load
from ddptrain.verbs.script import fit_arguments, objects_file


def loaded(
    folder: Path | str, words: Sequence[str], checkpoint: str, device: str, objects: Objects | None
) -> tuple[nn.Module, Task, Data, Path]:
    """The model in evaluation mode, its task and data, and the checkpoint's folder. objects: of a run of
    `fit`, whose copies are used; without them, ``--script=<file>.py`` among the words tells."""
    if objects is None and (named := parse(["evaluate", *words]).values_of(SCRIPT)):
        file = objects_file(Path(named[-1]))
        objects, words = read(file), [*words, *own_options(fit_arguments(file))]
    with packages_restored(), nullcontext() if objects is None else giving(objects.copied()):
        run = read_run_to_load([f"run={folder}", f"checkpoint={checkpoint}", *words])
        return loaded_model(*run, device)
