"""What the jobs of a sweep are measured by, and which of them are the best."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean
from ddptrain.tools.sweep.ledger import Job


def objectives_of(jobs: Sequence[Job]) -> dict[str, str]:
    """``max`` or ``min`` by name: ``sweep.objectives`` of the last job that has some; {} where none has."""
    return next((dict(job.objectives) for job in reversed(jobs) if job.objectives), {})


def scores_of(job: Job, objectives: Mapping[str, str]) -> tuple[float, ...]:
    """A job's values, the higher the better; empty where one is not known or not finite.

    objectives: none for the best value of the job's metric.
    """
    values: list[float | None] = [job.score]
    if objectives:
        known = [(job.results.get(name), way) for name, way in objectives.items()]
        values = [-value if value is not None and way == "min" else value for value, way in known]
    finite = tuple(value for value in values if value is not None and math.isfinite(value))
    return finite if len(finite) == len(values) else ()


def check_results(job: Job, objectives: Mapping[str, str]) -> None:
    """Raises UserError where a job that is done has no such results."""
    for name in objectives:
        if job.results and name not in job.results:  # a sweep that had no objectives noted none
            raise UserError(
                f"sweep.objectives: job {job.folder} has no {name}; it has {', '.join(job.results)}."
                f"{did_you_mean(name, job.results)}"
            )


def check_one_metric(jobs: Sequence[Job], objectives: Mapping[str, str]) -> None:
    """Raises UserError where jobs without objectives are judged by several metrics."""
    metrics = sorted({job.metric for job in jobs if job.metric})
    if len(metrics) > 1 and not objectives:
        raise UserError(
            f"sweep.objectives: the jobs' best metrics are {', '.join(metrics)}, which can't be compared."
            " Name one that all of them have: sweep.objectives={accuracy: max}"
        )


def ranked(jobs: Sequence[Job]) -> list[Job]:
    """The best first: those on the Pareto front of the objectives, then by the first of them, or by the
    metric. Those that failed come last, however far they got."""
    objectives = objectives_of(jobs)
    best = pareto_best(jobs, objectives) if objectives else set()
    several = len({job.metric for job in jobs if job.metric}) > 1 and not objectives

    def place(job: Job) -> tuple[Any, ...]:
        scores = scores_of(job, objectives)
        value = (-scores[0] if scores else math.inf) if objectives else job.place
        metric = job.metric if several else ""  # values of several metrics can't be compared
        failed = job.status in ("failed", "timeout")
        return job.number not in best, metric, failed, value, job.number

    return sorted(jobs, key=place)


def pareto_best(jobs: Sequence[Job], objectives: Mapping[str, str]) -> set[int]:
    """The numbers of the jobs that are done and on the Pareto front."""
    scores = {job.number: scores_of(job, objectives) for job in jobs if job.status == "done"}
    return pareto_front({number: score for number, score in scores.items() if score})


def pareto_front(scores: Mapping[int, tuple[float, ...]]) -> set[int]:
    """Whose scores are not beaten: no others are as good in all, and better in one."""
    front: dict[int, tuple[float, ...]] = {}
    for number in sorted(scores, key=lambda number: scores[number], reverse=True):
        mine = scores[number]  # only what stands before it in this order can beat it
        others = (other for other in front.values() if other != mine)
        if not any(all(a >= b for a, b in zip(other, mine, strict=True)) for other in others):
            front[number] = mine
    return set(front)
