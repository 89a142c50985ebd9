"""A run's model in this process."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from torch import nn

from ddptrain.api.recipe import Data
from ddptrain.recipes.given import Objects, giving
from ddptrain.run.setup import loaded_model
from ddptrain.verbs.saved_run import asked_to_load


def loaded(
    folder: Path, words: Sequence[str], checkpoint: str, device: str, objects: Objects | None
) -> tuple[nn.Module, Data, Path]:
    """The model in evaluation mode, its data, and the checkpoint's folder. objects: of a run of `fit`; their
    model gets the weights."""
    asked = asked_to_load([f"run={folder}", f"checkpoint={checkpoint}", *words])
    with nullcontext() if objects is None else giving(objects):
        return loaded_model(*asked, device)
