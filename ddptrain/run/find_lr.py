"""``find lr``: which learning rate? By a short training in which it rises."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddptrain.config.instantiate import typed_arguments
from ddptrain.config.schema import Config
from ddptrain.distributed.comm import on_first_rank
from ddptrain.engine.lr_range import FEWEST, Range, losses_at, range_of, rising_rates, smoothed
from ddptrain.errors import UserError, of_this_rank
from ddptrain.run.optimizer import check_optimizer
from ddptrain.run.setup import check_extensions, joined_world, make_task
from ddptrain.run.train import make_train_step

log = logging.getLogger("ddptrain")

_RISING = {"_target_": "ddptrain.engine.lr_schedules.rising"}


@dataclass(frozen=True, slots=True)
class _Settings:
    steps: int = 200
    lowest: float = 1e-6
    highest: float = 10.0
    out: str = ""

    def __post_init__(self) -> None:
        if self.steps < 20:
            raise UserError(f"steps={self.steps}: must be at least 20.")
        if not 0 < self.lowest < self.highest:
            raise UserError(
                f"lowest={self.lowest:g}, highest={self.highest:g}: must be above 0, and highest above"
                " lowest."
            )


def run(config: Config, settings: Mapping[str, str]) -> None:
    """Train a few steps of what the config says, as one rank, and keep nothing of it but a picture.

    settings: steps, lowest and highest rate, out: the picture. Raises UserError for a word that is wrong, and
    where no rate makes the loss fall.
    """
    chosen = _Settings(**typed_arguments(_Settings, settings, "find lr"))
    out = Path(chosen.out or f"find-lr-{config.recipe.replace('/', '-')}.png")
    if out.suffix != ".png" or not out.parent.resolve().parent.is_dir() or out.is_dir():
        raise UserError(f"out={out}: must be a .png in a folder that is there, or in a new one beside it.")
    steps, bounds = chosen.steps, {"lowest": chosen.lowest, "highest": chosen.highest}
    thaws = config.thaw is not None
    if thaws:
        config.freeze = []
    config.train.steps, config.sched, config.ema.decay, config.thaw = steps, {**_RISING, **bounds}, None, None
    task, data = make_task(config)
    check_extensions(config)
    check_optimizer(config.optim)
    with joined_world(config) as (world, reason, watchdog):
        log.info("device     %s (%s)", world.device, reason)
        if thaws:
            log.info("note       what thaw= trains later is trained in all steps of this test")
        step = make_train_step(config, task, data, world, watchdog, None)
        step.state.scatter(task, step.sampler.share)
        tested = rising_rates(**bounds, steps=steps)
        with of_this_rank():
            points = list(losses_at(tested, step, data))
        rates, losses = [rate for rate, _ in points], [loss for _, loss in points]
        usable = range_of(rates, losses)
        on_first_rank(world, lambda: _write(rates, losses, usable, out))
        if len(points) < FEWEST:
            raise UserError(
                f"find lr: only {len(points)} steps had a finite loss and gradients, too few to see anything."
                f" A training says where it begins: optim.lr={chosen.lowest:g}"
            )
        if usable is None:
            tried = f"from {chosen.lowest:g} to {max(rates, default=chosen.lowest):g}"
            raise UserError(
                f"find lr: {tried} the loss does not fall; see {out}. Try another range (lowest=, highest=)"
                " or more steps (steps=)."
            )
        if world.is_first:
            low, high = f"{usable.falls_from:.1e}", f"{usable.lowest_at:.1e}"
            print(f"the loss falls from lr {low} on, and is lowest at {high}: {out}")
            print(f"optim.lr={usable.suggestion:g}")


def _write(rates: Sequence[float], losses: Sequence[float], usable: Range | None, out: Path) -> None:
    """The picture, and its numbers beside it."""
    try:
        out.parent.mkdir(exist_ok=True)
        _draw(rates, losses, usable, out)
        out.with_suffix(".json").write_text(json.dumps({"lr": rates, "loss": losses}) + "\n")
    except OSError as error:
        raise UserError(f"out={out}: can't be written ({error.strerror}). Name another file.") from error


def _draw(rates: Sequence[float], losses: Sequence[float], usable: Range | None, out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(rates, losses, color="#2b6cb0", alpha=0.3, linewidth=0.8, label="loss of each step")
    axes.plot(rates, smoothed(losses), color="#2b6cb0", linewidth=1.8, label="running mean")
    if usable is not None:
        axes.axvspan(usable.falls_from, usable.lowest_at, color="#2b6cb0", alpha=0.07, label="the loss falls")
        axes.axvline(usable.suggestion, color="#dd6b20", label=f"optim.lr={usable.suggestion:g}")
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    if losses:
        start, lowest = losses[0], min(losses)
        if lowest < start:
            axes.set_ylim(lowest - 0.1 * (start - lowest), start + 0.5 * (start - lowest))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(out, dpi=150)
