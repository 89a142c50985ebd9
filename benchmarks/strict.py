"""A training step under strategy=strict beside one under strategy=auto, on the CPU, of one thread a rank.

    python benchmarks/strict.py                                    # a Markdown table, in some 5 minutes
    python benchmarks/strict.py --write docs/reliability.md        # and into that file
    python benchmarks/strict.py --ranks 2 --recipes cnn_cifar10 --rounds 10

All train the same recipe on the same global batches. The ranks are one set of processes, in which short turns
of all take turns, A B C, then C B A. A ratio is taken within one round, so what else the machine does hits
both its sides. A step is timed with its data, optimizer and log, but without evaluation and checkpoints.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from common import composed, made_with, publish, rounds_parser

from ddptrain.api.world import World
from ddptrain.config.strategy import is_strict
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.engine.warmup import warm_up
from ddptrain.run.setup import make_task, torch_settings
from ddptrain.run.train import make_train_step
from ddptrain.testing import run_ranks

NAME = "strict"
"""Of the markers."""
SETTINGS = {
    "`auto`": [],
    "`strict`, 4 shards": ["strategy=strict", "strategy.shards=4"],
    "`strict`, 8 shards": ["strategy=strict", "strategy.shards=8"],
}
RECIPES = {
    "mobilenet_cifar10": "MobileNetV3-small",
    "cnn_cifar10": "a network of two convolutions",
}
BATCH, STEPS = 128, 3
"""Pictures of a global batch; steps of a turn."""


def main() -> None:
    arguments = _arguments()
    lines = [
        f"| {BATCH} CIFAR-sized pictures per step | {' | '.join(SETTINGS)} |",
        f"|---|{'---|' * len(SETTINGS)}",
    ]
    for recipe in arguments.recipes.split(","):
        for ranks in (int(count) for count in arguments.ranks.split(",")):
            print(f"{recipe} on {ranks} ranks: {arguments.rounds} rounds", file=sys.stderr, flush=True)
            cells = _cells(recipe, ranks, arguments.rounds)
            lines.append(f"| {RECIPES[recipe]}, {_ranks_in_words(ranks)} | {cells} |")
    note = (
        "A step's median, and its ratio to `auto` in the same round: median (quartiles) of"
        f" {arguments.rounds} rounds of {STEPS} steps. {made_with('torch')}"
        " Made by `python benchmarks/strict.py`."
    )
    publish("\n".join([*lines, "", note]), NAME, arguments.write)


def _cells(recipe: str, ranks: int, rounds: int) -> str:
    measured = run_ranks(lambda world: _rounds(world, recipe, rounds), ranks, timeout=3000)[0]
    base, *others = measured
    cells = [_milliseconds(base)]
    for seconds in others:
        ratios = sorted(own / auto for own, auto in zip(seconds, base, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        cells.append(f"{_milliseconds(seconds)}, {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")
    return " | ".join(cells)


def _rounds(world: World, recipe: str, rounds: int) -> list[list[float]]:
    """Seconds of a step, by setting and round."""
    turns = [_turn(world, recipe, words) for words in SETTINGS.values()]
    seconds: list[list[float]] = [[] for _ in turns]
    for number in range(rounds + 1):
        order = list(zip(turns, seconds, strict=True))
        for turn, own in reversed(order) if number % 2 else order:
            own.append(turn())
    return [own[1:] for own in seconds]  # in the first one caches are filled


def _turn(world: World, recipe: str, words: Sequence[str]) -> Callable[[], float]:
    """The seconds of a step in the next few of them."""
    config = composed(
        [f"recipe={recipe}", "data=shapes", "data.source.train=1024", "data.source.valid=8", "device=cpu",
         f"train.batch_size={BATCH}", "train.steps=100000", *words]
    )  # fmt: skip
    task, data = make_task(config)
    step = make_train_step(config, task, data, world, Watchdog(world), None)
    torch.set_num_threads(1)
    batches = data.train_batches(step.sampler, range(100000))
    warm_up(step, next(batches), step.plan.progress(0))
    for _ in step.micro_batches[1:]:
        next(batches)
    numbers = iter(range(100000))

    def turn() -> float:
        with torch_settings(deterministic=is_strict(config.strategy)):
            if world.size > 1:
                dist.barrier()
            began = time.perf_counter()
            for _ in range(STEPS):
                step(batches, step.plan.progress(next(numbers)))
            return (time.perf_counter() - began) / STEPS

    return turn


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.0f} ms"


def _ranks_in_words(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} gloo ranks"


def _arguments() -> argparse.Namespace:
    parser = rounds_parser(__doc__, NAME, 40)
    parser.add_argument("--ranks", default="1,2", help="numbers of them (%(default)s)")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="of %(default)s")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.recipes.split(",") if name not in RECIPES]
    if unknown:
        parser.error(f"--recipes: {unknown[0]} is none of {', '.join(RECIPES)}")
    return arguments


if __name__ == "__main__":
    main()
