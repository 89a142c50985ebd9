"""What the settings of a sweep's jobs did to their results: which mattered most."""

import math
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ddptrain.tools.sweep.board import common_words
from ddptrain.tools.sweep.ledger import Job
from ddptrain.tools.sweep.objectives import objectives_of, scores_of
from ddptrain.tools.sweep.ranges import Choice, Numbers, Point, Range
from ddptrain.tools.sweep.study import study_of, trial_of

_SPAN, _SMALL = 30.0, 0.1
"""Numbers above 0 count by their logarithms where the largest is so many times the smallest, and a quarter of
them are at most such a share of the largest. (Evenly drawn from 0 to 1, few are.)"""
_LEAST = 50
"""Jobs from which importances are computed. In made-up sweeps of two settings, one of which moved the results
three times as much or more, up to three of ten with fewer jobs named the other one first; one of fifty with
50."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The jobs of a sweep that have results, where they differ by the same settings."""

    ranges: tuple[Range, ...]
    """What differs, in the words' order; each goes from the smallest to the largest value that was tried."""
    jobs: tuple[Job, ...]
    points: tuple[Point, ...]
    objectives: dict[str, str]
    """``max`` or ``min`` by name."""
    scores: tuple[tuple[float, ...], ...]
    """Of each job, the higher the better."""

    @property
    def have_importances(self) -> bool:
        """Whether there are jobs enough, and more than one setting."""
        return len(self.jobs) >= _LEAST and len(self.ranges) > 1


def outcomes_of(jobs: Sequence[Job]) -> Outcomes | None:
    """None where less than two jobs have a result, or nothing differs. A job that was pruned counts with the
    best value that it has, but where there are several objectives. Without objectives they are those of one
    metric."""
    objectives = objectives_of(jobs)
    known = [job for job in jobs if job.status in ("done", "pruned") and scores_of(job, objectives)]
    known = [job for job in known if objectives or job.metric == known[-1].metric]
    common = common_words(known)
    texts = [dict(word.partition("=")[::2] for word in job.words if word not in common) for job in known]
    if len(known) < 2:
        return None
    names = Counter(tuple(point) for point in map(sorted, texts)).most_common(1)[0][0]
    chosen = [(job, point) for job, point in zip(known, texts, strict=True) if tuple(sorted(point)) == names]
    ranges = tuple(_range(name, [point[name] for _, point in chosen]) for name in chosen[0][1])
    ranges = tuple(each for each in ranges if each.count > 1)
    if not ranges:
        return None
    last = chosen[-1][0]
    return Outcomes(
        ranges,
        tuple(job for job, _ in chosen),
        tuple(point for _, point in chosen),
        objectives or {last.metric: "max" if last.higher_is_better else "min"},
        tuple(scores_of(job, objectives) for job, _ in chosen),
    )


def importances(outcomes: Outcomes) -> dict[str, float]:
    """The share of each setting in what makes jobs good, the largest first (PED-ANOVA, Watanabe et al. 2023,
    arXiv:2304.10255); {} where they have none.

    Raises ModuleNotFoundError without Optuna.
    """
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
    from optuna.trial import TrialState

    if not outcomes.have_importances:
        return {}
    trials = [
        trial_of(outcomes.ranges, point, TrialState.COMPLETE, scores)
        for point, scores in zip(outcomes.points, outcomes.scores, strict=True)
    ]
    best = max(0.1, 10 / len(trials))  # the share that is good: ten jobs, or a tenth
    study = study_of(trials, len(outcomes.objectives))
    with warnings.catch_warnings(action="ignore"):  # that all are equal, where it finds them so
        return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=best))


def _range(name: str, texts: Sequence[str]) -> Range:
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        numbers = [math.nan]
    low, high = min(numbers), max(numbers)
    if not all(map(math.isfinite, numbers)):
        return Choice(name, tuple(sorted(set(texts))))
    whole = all(re.fullmatch(r"[+-]?\d+", text) for text in texts)
    log = low > 0 and high / low >= _SPAN and sorted(numbers)[len(numbers) // 4] <= _SMALL * high
    return Choice(name, (texts[0],)) if low == high else Numbers(name, low, high, log, whole)
