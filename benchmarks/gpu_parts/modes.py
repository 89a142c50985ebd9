"""Each recipe's step eager, captured, compiled, and both, lap by lap in turns.

The trainings of some recipes start at once, so that they compile beside each other. They stand still while
one of them does a lap.
"""

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpu_parts.losses import IMAGES, write_picture
from gpu_parts.part import Job, need
from gpu_parts.trainings import text_words

MODES = ("off", "graph", "step", "step-graph")
LAP_S = 0.4
AT_ONCE = 7
"""Recipes. Each of their trainings takes some 2 GB of the host's memory."""
FOLDER = ("data=imagefolder", "data.root=photographs")
SCENES = (
    "data=shapes_detection",
    "data.source.train=512",
    "data.source.valid=16",
    "train.eval_batch_size=16",
)
RECIPES: dict[str, Sequence[str]] = {
    "cnn_digits": (),
    "cnn_cifar10": ("data=shapes",),
    "mobilenet_cifar10": ("data=shapes",),
    "resnet18_cifar10": ("data=shapes",),
    "speedrun_cifar10": ("data=shapes",),
    "rnn_text": (),
    "gru_text": (),
    "lstm_text": (),
    "transformer_text": (),
    "transformer_translate": (),
    "yolo_shapes": (),
    "mobilenet_v3": FOLDER,
    "resnet50_imagenet": FOLDER,
    "yolo_coco": SCENES,
}
OWN = (
    *("device=cuda", "train.steps=1000000", "train.eval_every=1000000", "checkpoint.every=1000000"),
    *("observers=[]", "hang_timeout=null"),
)


def modes(job: Job) -> str:
    for number in range(job.pick(600, 40)):
        place = f"{'train' if number % 20 else 'val'}/{'ab'[number // 20 % 2]}"
        write_picture(job.folder / "photographs" / place / f"{number}.jpg", 256, number)
    # a dozen compile at the same time: each with as many threads as torch takes, memory would not do
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    asked = [mode for mode in MODES if "step" not in mode or "compiles" not in job.lacks]
    names, rows = list(RECIPES)[: job.pick(len(RECIPES), 2)], {}
    for first in range(0, len(names), AT_ONCE):
        for name, row in _in_turns(job, names[first : first + AT_ONCE], asked):
            rows[name] = row
            job.figure("recipes", rows)
    unfit = [
        f"{name}, {mode}: {of['unfit']}" for name in rows for mode, of in rows[name].items() if "unfit" in of
    ]
    need(not unfit, "; ".join(unfit))
    faster = [row["off"]["ms"] / row["graph"]["ms"] for row in rows.values()]
    return f"{len(rows)} recipes; captured steps are {min(faster):.2f} to {max(faster):.2f} times as fast"


def _in_turns(job: Job, names: Sequence[str], asked: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each recipe and mode the milliseconds of a step, those in which it waits for data, and the peak of
    memory; or why there are none."""
    from ddptrain.tools.bench.paced_run import PacedRun, Unfit

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))  # a socket's name must be short
        paced: dict[str, dict[str, PacedRun]] = {name: {} for name in names}
        for name in names:
            words = [f"recipe={name}", *RECIPES[name], *(text_words(job) if "_text" in name else ()), *OWN]
            if job.small:
                words += [*(IMAGES if "cifar10" in name else ()), "train.batch_size=16"]
            for mode in asked:
                run = PacedRun([*words, f"compile={mode}"], 1, folder / f"{name}-{mode}", job.pick(10, 2))
                stack.callback(run.end)
                paced[name][mode] = run
        unfit: dict[str, dict[str, Any]] = {name: {} for name in names}
        for name in names:
            for mode in asked:
                try:
                    paced[name][mode].warm_up()
                except Unfit as error:
                    unfit[name][mode] = {"unfit": str(error)}
                    del paced[name][mode]
        for name in names:
            yield name, {**unfit[name], **_laps(paced[name], job.pick(4, 2))}


def _laps(paced: Mapping[str, Any], turns: int) -> dict[str, Any]:
    """Of one recipe, each mode after the other and back again."""
    seconds = {mode: sum(run.lap().seconds.values()) for mode, run in paced.items()}
    times = {mode: max(1, round(LAP_S / max(1e-3, shortest))) for mode, shortest in seconds.items()}
    laps: dict[str, list[Any]] = {mode: [] for mode in paced}
    for turn in range(turns):
        for mode in list(paced)[:: 1 if turn % 2 == 0 else -1]:
            laps[mode].append(paced[mode].lap(times[mode]))
    return {
        mode: {
            "ms": statistics.median(lap.ms_per_step for lap in own),
            "data": statistics.median(1e3 * lap.seconds["data"] / lap.steps for lap in own),
            "MiB": own[-1].peak_memory / 2**20,
        }
        for mode, own in laps.items()
    }
