"""`compile=graph` beside eager steps: the same losses to the bit, killed or not."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu_parts.losses import RECIPES, write_pictures
from gpu_parts.part import Failed, Job, need
from gpu_parts.trainings import proved, speedrun, text_words


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


def speedrun_captured(job: Job) -> str:
    return speedrun(job, "compile=graph")
