"""BatchNorm's refusal of a single value: an error message with what helps, instead of a traceback."""

from ddptrain.api.world import World
from ddptrain.config.schema import Config
from ddptrain.errors import UserError
from ddptrain.run.assemble import samples_of_passes

_TORCHS = "Expected more than 1 value per channel when training"  # of torch.nn.functional


def of_a_single_sample(error: BaseException, config: Config, world: World) -> UserError | None:
    """A UserError with the remedy, if torch has raised this error because a BatchNorm was to normalise one
    value by itself; None for any other."""
    if not (isinstance(error, ValueError) and str(error).startswith(_TORCHS)):
        return None
    fewest = min(samples_of_passes(config, world))
    return UserError(
        f"train.micro_batch: BatchNorm can't normalise a single value a channel ({error}), and a pass of"
        f" rank {world.rank} has {fewest} of the batch's {config.train.batch_size} samples. Let each pass"
        " have 2 or more: by a larger train.batch_size, by a train.micro_batch that leaves no single one, or"
        " by fewer ranks or shards.",
        everywhere=False,
    )
