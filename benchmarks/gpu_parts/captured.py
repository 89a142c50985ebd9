"""`compile=graph` beside eager steps: the same losses to the bit, killed or not, and how much sooner."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu_parts.losses import IMAGES, RECIPES, write_pictures
from gpu_parts.part import Failed, Job, need
from gpu_parts.trainings import proved, speedrun, text_words

MODES = ("compile=graph", "compile=step", "compile=step-graph")


def captured(job: Job) -> str:
    """Each recipe, 20 steps with deterministic kernels; four at once."""
    write_pictures(job.folder)
    text = text_words(job)

    def losses(name: str) -> dict[str, Any]:
        words = [f"recipe={name}", *RECIPES[name], *(text if "_text" in name else ())]
        words += [
            f"train.steps={job.pick(20, 6)}",
            "train.batch_size=16",
            "log.every=1",
            "deterministic=true",
        ]
        try:
            eager, graph = (
                job.train(f"{name}-{mode}", *words, f"compile={mode}") for mode in ("off", "graph")
            )
            need("captured at step" in graph.ran.said, f"{name}: no step was captured")
            same = eager.losses == graph.losses
        except Failed as failure:
            return {"wrong": str(failure)}
        wrong = "" if same else f"{name}: other losses than eagerly"
        return {"wrong": wrong, "eager": eager.losses, "captured": graph.losses}

    with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as pool:
        rows = dict(zip(RECIPES, pool.map(losses, RECIPES), strict=True))
    job.figure("recipes", rows)
    wrong = [row["wrong"] for row in rows.values() if row["wrong"]]
    need(not wrong, "; ".join(wrong))
    return f"{len(RECIPES)} recipes have the bits of eager steps"


def prove_captured(job: Job) -> str:
    return proved(job, "compile=graph")


def captured_speed(job: Job) -> str:
    """Eager, compiled and captured steps, in turns."""
    said = []
    recipes = {
        "cnn_cifar10": ["data=shapes"],
        "resnet18_cifar10": ["data=shapes"],
        "transformer_text": text_words(job),
        "lstm_text": text_words(job),
        "yolo_shapes": [],
    }
    for name, own in list(recipes.items())[: job.pick(5, 1)]:
        line = [f"recipe={name}", *own, "device=cuda", f"try={';'.join(MODES[: job.pick(3, 1)])}"]
        if job.small:
            line += ["steps=2", "rounds=3", *IMAGES, "train.batch_size=16"]
        ran = job.run(name, "-m", "ddptrain", "bench", *line)
        job.figure(name, ran.out)
        said += [
            f"{name}: {found}" for found in re.findall(r"^ *(compile=graph +[\d.]+)", ran.out, re.MULTILINE)
        ]
    job.figure("ratios", said)
    return "; ".join(said)


def speedrun_captured(job: Job) -> str:
    return speedrun(job, "compile=graph")
