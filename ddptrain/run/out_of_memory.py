"""Out of memory: an error message with the override that helps, instead of a traceback."""

import traceback

from ddptrain.api.world import World
from ddptrain.config.schema import Config
from ddptrain.config.strategy import is_dp, is_fsdp
from ddptrain.engine.compiled import WITH_GRAPHS
from ddptrain.engine.out_of_memory import in_one_line, is_lack_of_memory
from ddptrain.errors import UserError
from ddptrain.run.assemble import samples_of_passes


def lack_of_memory(error: BaseException, config: Config, world: World, place: str) -> UserError | None:
    """A UserError with the remedy, if torch has raised this error for lack of memory; None for any other.

    place: `Watchdog.place`.
    """
    if not is_lack_of_memory(error):
        return None
    said = f"rank {world.rank} at {place}: {in_one_line(error)}. {_remedy(error, config, world, place)}"
    return UserError(said, everywhere=False)


def _sizes_itself(config: Config, world: World) -> bool:
    """Whether ``train.micro_batch=auto`` works there."""
    return not (is_dp(config.strategy) or is_fsdp(config.strategy) or world.shares_device)


def _remedy(error: BaseException, config: Config, world: World, place: str) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    sharded = is_fsdp(config.strategy)

    def within(part: str) -> bool:
        return any(f"ddptrain/{part}.py" in frame.filename for frame in frames)

    train = config.train
    if sharded and within("strategies/fsdp") and any(frame.name == "evaluating" for frame in frames):
        return "An evaluation gathers all weights on each GPU: take a smaller model or larger GPUs."
    if within("engine/evaluate"):
        if train.eval_batch_size > 1:
            fewer = f"train.eval_batch_size={train.eval_batch_size // 2} (now {train.eval_batch_size})"
            return f"Evaluate fewer samples at once: {fewer}."
    elif (within("engine/loop") or within("engine/lr_range")) and not place.endswith("optimizer"):
        most = max(samples_of_passes(config, world))
        if most > 1:
            fewer = f"train.micro_batch={most // 2} (now {most})"
            if world.device.type == "cuda" and config.compile in WITH_GRAPHS:  # which take one pass a step
                fewer = f"compile=default {fewer}"
            elif train.micro_batch is None and _sizes_itself(config, world):
                fewer = f"{fewer}, or train.micro_batch=auto, which finds the number"
            batch = f"the global batch stays {train.batch_size}"
            return f"Put fewer samples through the model at once: {fewer}; {batch}."
        if not train.recompute:
            return "Compute activations again instead of keeping them: train.recompute=[<blocks>]."
        if config.precision in ("fp32", "tf32"):
            return "What the forward pass keeps is about half as much with precision=bf16."
    elif within("data/images/loaders"):
        return "Leave the data in files, and have them read by workers: data.resident=false."
    several = "more ranks" if sharded else "several: strategy=fsdp"
    smaller = "No batch size makes the model smaller: take a smaller one"
    return f"{smaller}, a device with more memory, or {several}."
