"""`compile=graph` beside eager steps: the same losses to the bit, killed or not, and how much sooner."""

import json
import re

from gpu_parts.losses import IMAGES, RECIPES, write_pictures
from gpu_parts.part import Job, Trained, need
from gpu_parts.trainings import FEW_IMAGES, speedrun, text_words

MODES = ("compile=graph", "compile=step", "compile=step-graph")


def captured(job: Job) -> str:
    """Each recipe, 20 steps with deterministic kernels."""
    write_pictures(job.folder)
    steps, wrong = job.pick(20, 6), []
    for name, own in RECIPES.items():
        words = [f"recipe={name}", *own, *(text_words(job) if "_text" in name else ())]
        words += [f"train.steps={steps}", "train.batch_size=16", "log.every=1", "deterministic=true"]
        eager, graph = (job.train(f"{name}-{mode}", *words, f"compile={mode}") for mode in ("off", "graph"))
        need("captured at step" in graph.ran.said, f"{name}: no step was captured")
        if _losses(eager) != _losses(graph):
            wrong.append(name)
        job.figure(name, {"eager": _losses(eager), "captured": _losses(graph)})
    need(not wrong, f"other losses than eagerly: {', '.join(wrong)}")
    return f"{len(RECIPES)} recipes have the bits of eager steps"


def _losses(trained: Trained) -> list[float]:
    return list(trained.losses)


def prove_captured(job: Job) -> str:
    kills = job.pick(3, 1)
    words = ["recipe=cnn_cifar10", "data=shapes", "device=cuda", "deterministic=true", *FEW_IMAGES]
    words += ["compile=graph", "ranks=1", f"kills={kills}", "moments=1", f"train.steps={job.pick(200, 12)}"]
    job.run("prove", "-m", "ddptrain", "prove", "resume", *words)
    return f"killed {kills} times, it ends with the same bits"


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
    job.figure("ratios", json.dumps(said))
    return "; ".join(said)


def speedrun_captured(job: Job) -> str:
    return speedrun(job, "compile=graph")
