"""First losses of the recipes that need no data of one's own, on the GPU in each precision, beside the CPU's
in fp32."""

import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_parts.machine import is_simulated
from gpu_parts.part import BENCHMARKS, Failed, Job, apart
from gpu_parts.trainings import text_words

FIRST = {"fp32": 3e-4, "bf16": 3e-2, "fp16": 1e-2}
"""Relative: how far the first step's loss may lie from the CPU's. The weights are the same then."""
LATER = {"fp32": 5e-2, "bf16": 1e-1, "fp16": 1e-1}
"""And those of the next steps, in which rounding grows with what was learned from it."""
IMAGES = ("data=shapes", "data.source.train=128", "data.source.valid=16", "train.eval_batch_size=16")
SCENES = ("data=shapes_detection", "data.source.train=24", "data.source.valid=4", "train.eval_batch_size=4")
RECIPES: dict[str, Sequence[str]] = {
    "cnn_cifar10": IMAGES,
    "cnn_digits": (),
    "mobilenet_cifar10": (*IMAGES, "model.dropout=0"),
    "mobilenet_v3": ("data.root=pictures", "data.source.size=64", "data.augment.crop=4", "model.dropout=0"),
    "resnet18_cifar10": IMAGES,
    "speedrun_cifar10": (*IMAGES, "model.width=8", "optim.head_lr=104", "optim.bias_lr=11"),
    "rnn_text": (),
    "gru_text": (),
    "lstm_text": (),
    "transformer_text": (),
    "transformer_translate": ("data.train=200", "data.valid=16"),
    "yolo_shapes": SCENES,
    "yolo_custom": ("data.source.path=scenes/data.yaml",),
    "yolo_coco": SCENES,
}
"""Without dropout, whose masks come from the device's own generator."""
CONVOLVE = ("mobilenet", "resnet", "speedrun", "yolo")
"""Recipes whose steps take a CPU minutes in fp16, for which it has no convolutions of its own."""
RATE = 1 / 16
"""Of the recipe's learning rates: the batches are that much smaller, and a loss that leaps says nothing."""


def losses(job: Job) -> str:
    """The part: each recipe in a process of its own, some at once."""
    write_pictures(job.folder)
    steps, text = job.pick(6, 3), text_words(job)
    asked = [name for name in RECIPES if name != "cnn_digits" or importlib.util.find_spec("sklearn")]
    search = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])

    def losses_of(recipe: str) -> dict[str, Any]:
        words = [f"recipe={recipe}", *RECIPES[recipe], *(text if "_text" in recipe else ())]
        words += [f"train.batch_size={64 if recipe == 'speedrun_cifar10' else 8}", f"train.steps={steps}"]
        file = job.folder / f"{recipe}.json"
        slow = is_simulated(job.lacks) and recipe.startswith(CONVOLVE)
        asked = ",".join(name for name in FIRST if not (slow and name == "fp16"))
        try:
            job.run(recipe, str(Path(__file__)), str(file), asked, *words, PYTHONPATH=search)
        except Failed as failure:
            return {"cpu": str(failure)}
        losses: dict[str, Any] = json.loads(file.read_text())
        return losses

    rows = {}
    job.figure("left out", sorted(set(RECIPES) - set(asked)))
    with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as pool:
        for name, losses in zip(asked, pool.map(losses_of, asked), strict=True):
            rows[name] = _row(losses)
            job.figure("rows", rows)
    wrong = [f"{name} {row['wrong']}" for name, row in rows.items() if row["wrong"]]
    if wrong:
        raise Failed("; ".join(wrong))
    slow = f"; without fp16 where it convolves: {', '.join(CONVOLVE)}" if is_simulated(job.lacks) else ""
    return f"{len(rows)} recipes in {', '.join(FIRST)}: the first {steps} losses are the CPU's{slow}"


def main(file: Path, precisions: Sequence[str], words: Sequence[str]) -> None:
    """One recipe: what it makes of its first steps on each device, or why it did not."""
    import torch  # here, for the part only starts this
    from common import DataWatch, Watched, composed
    from loops import fit

    from ddptrain.api.world import World
    from ddptrain.run.setup import make_task

    losses: dict[str, Any] = {}
    for name in ("cpu", *precisions):
        world = World() if name == "cpu" else World(device=torch.device("cuda", 0))
        precision = "fp32" if name == "cpu" else name
        config = composed([*words, f"precision={precision}", "checkpoint.every=1000000"])
        config.optim |= {key: rate * RATE for key, rate in config.optim.items() if key.endswith("lr")}
        watch = DataWatch(config.train.steps or 0)
        try:
            task, data = make_task(config)
            data.prepare(world, config.seed)
            with tempfile.TemporaryDirectory() as folder:
                fit(config, Watched(task, watch), data, Path(folder), world)
        except Exception as error:
            traceback.print_exc()
            losses[name] = f"{type(error).__name__}: {error}"[:300]
        else:
            losses[name] = [float(loss) for loss in watch.losses]
    file.write_text(json.dumps(losses))


def _row(losses: Mapping[str, list[float] | str]) -> dict[str, Any]:
    """The losses of each, the greatest differences, and what is wrong with them."""
    row: dict[str, Any] = {"losses": {}, "first": {}, "later": {}, "wrong": ""}
    theirs = losses["cpu"]
    if isinstance(theirs, str):
        return {**row, "wrong": f"on the CPU: {theirs}"}
    row["losses"]["cpu"] = theirs
    for precision in losses.keys() & FIRST.keys():
        ours = losses[precision]
        if isinstance(ours, str):
            row["wrong"] += f"in {precision}: {ours} "
            continue
        first, *later = apart(ours, theirs)
        row["losses"][precision] = ours
        row["first"][precision], row["later"][precision] = first, max(later)
        if not first <= FIRST[precision]:
            row["wrong"] += f"in {precision}: the first loss is off by {first:.2g} "
        elif not max(later) <= LATER[precision]:
            row["wrong"] += f"in {precision}: a later loss is off by {max(later):.2g} "
    return row


def write_pictures(folder: Path) -> None:
    """Two small sets of noise: pictures in folders by class, and pictures with boxes in YOLO's layout."""
    for part, count in (("train", 16), ("val", 4)):
        for number in range(count):
            write_picture(folder / "pictures" / part / "ab"[number % 2] / f"{number}.png", 96, number)
            write_picture(folder / "scenes/images" / part / f"{number}.png", 128, number)
            label = folder / "scenes/labels" / part / f"{number}.txt"
            label.parent.mkdir(parents=True, exist_ok=True)
            label.write_text(f"{number % 2} 0.5 0.5 0.4 0.{3 + number % 3}\n")
    described = {"path": ".", "train": "images/train", "val": "images/val", "names": ["a", "b"]}
    (folder / "scenes/data.yaml").write_text(json.dumps(described))  # JSON is YAML


def write_picture(file: Path, side: int, seed: int) -> None:
    """Noise, 8x8, stretched."""
    import numpy as np
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    rough = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8))
    rough.resize((side, side)).save(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
