"""The verb ``write``: a recipe's data set as files on disk."""

from collections.abc import Mapping
from pathlib import Path

from ddptrain.api.recipe import Data
from ddptrain.config.instantiate import typed_arguments
from ddptrain.config.schema import Config
from ddptrain.distributed.world import world_from_environment
from ddptrain.errors import UserError
from ddptrain.run.setup import make_task


def run(config: Config, out: Path, settings: Mapping[str, str]) -> None:
    """Write the whole set to the folder ``out``. ``settings``: the words of the data's own `write`."""
    if not world_from_environment().is_first:
        return
    _, data = make_task(config)
    if type(data).write is Data.write:
        raise UserError(f"write: {type(data).__name__} offers none.")
    for line in data.write(out, **typed_arguments(data.write, settings, "write")):
        print(line, flush=True)
