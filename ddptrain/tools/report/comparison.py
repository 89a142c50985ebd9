"""What differs between runs, which is the better one, where their time went: for terminal and page."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ddptrain.observe.clock import clock
from ddptrain.text import plain
from ddptrain.tools.report.run_files import CurvePoint, RunFiles, as_mapping, number

NOTHING = "–"  # noqa: RUF001
PARTS = (
    *("data", "copy", "forward", "backward", "all_reduce", "optimizer", "replay", "logging"),
    *("evaluating", "drawing", "saving"),
)
"""Of the time, in the order of a step: `ddptrain.api.timing.PHASES`, which imports torch."""
_LOWER = re.compile(
    r"loss|perplexity|error|bits_per|distance|(?<![a-z])(mae|r?mse|mape)(?![a-z])", re.IGNORECASE
)
_HIGHER = re.compile(
    r"((balanced_|pixel_)?accuracy|(mask_)?(map|ap|ar)\d*|top[\dk]*|precision|recall|f1(score|micro|macro)?|exact|match|bleu|m?iou)"
    r"(?![a-z])",
    re.IGNORECASE,
)
"""At the beginning of a name, as whole words: no ``mape``."""


class SettingDifference(NamedTuple):
    """One setting in all runs; None in those that have none of that name. A row of a table, too."""

    key: str
    values: tuple[str | None, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


class Score(NamedTuple):
    """A metric of one run."""

    last: CurvePoint | None
    best: CurvePoint | None
    """None where the metric has no known direction."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric in all runs."""

    name: str
    split: str
    higher_is_better: bool | None
    scores: tuple[Score, ...]
    """By run."""

    @property
    def title(self) -> str:
        return self.name if self.split == "valid" else f"{self.name} ({self.split})"

    @property
    def winners(self) -> list[int]:
        """The runs with the best value, where there are others to beat."""
        values = [None if score.best is None else score.best.value for score in self.scores]
        known = [value for value in values if value is not None]
        if len(set(known)) < 2:
            return []
        best = max(known) if self.higher_is_better else min(known)
        return [i for i, value in enumerate(values) if value == best]


def compare_settings(settings: Sequence[Mapping[str, str]]) -> list[SettingDifference]:
    """Every setting in all runs, those that differ first."""
    keys = dict.fromkeys(key for each in settings for key in each)
    differences = [SettingDifference(key, tuple(each.get(key) for each in settings)) for key in keys]
    return sorted(differences, key=lambda difference: not difference.differs)


def metrics(runs: Sequence[RunFiles]) -> list[Metric]:
    """The metrics of validation, the one that counts first, and the training's loss."""
    counts = main_metric(runs)
    every = dict.fromkeys(key for run in runs for key in run.curves)
    names = [key for key in every if key[1] == "valid"] + [key for key in every if key == ("loss", "train")]
    ranked = sorted(names, key=lambda key: key != (counts, "valid"))
    scored = []
    for name, split in ranked:
        higher = direction(name, runs)
        scores = tuple(_score(run, name, split, higher) for run in runs)
        scored.append(Metric(name, split, higher, scores))
    return scored


def main_metric(runs: Sequence[RunFiles]) -> str:
    """The metric by which the runs pick their best weights; '' where none of them has got that far."""
    for run in runs:
        for name in run.section("best"):
            if name != "step":
                return plain(name)
    return ""


def ranking(runs: Sequence[RunFiles]) -> list[int]:
    """The runs by the metric that counts, the best first; those without it last."""
    scored = metrics(runs)
    if not scored or scored[0].higher_is_better is None:
        return list(range(len(runs)))
    sign = -1.0 if scored[0].higher_is_better else 1.0

    def place(i: int) -> tuple[bool, float]:
        best = scored[0].scores[i].best
        value = None if best is None else best.value
        return value is None, 0.0 if value is None else sign * value

    return sorted(range(len(runs)), key=place)


def metric_rows(every: Sequence[Metric]) -> list[tuple[str, list[str]]]:
    """Of a single run: each metric's last value, its best, and the step of that."""
    rows = []
    for metric in every:
        last, best = metric.scores[0]
        step = NOTHING if best is None else f"{best.step:,.0f}"
        rows.append((metric.title, [format_point(last), format_point(best), step]))
    return rows


def parts_of(splits: Sequence[Mapping[str, float]]) -> list[str]:
    """The parts of the time that any of these has, in the order of a step."""
    measured = dict.fromkeys(name for split in splits for name in split)
    return [*(name for name in PARTS if name in measured), *(name for name in measured if name not in PARTS)]


def time_split(run: RunFiles) -> dict[str, float]:
    """Seconds by part that took any, and what is left of the whole; empty where the run does not tell."""
    parts = {plain(name): number(value) for name, value in run.section("time").items()}
    known = {name: value for name, value in parts.items() if value is not None and value > 0}
    ordered = {name: known[name] for name in (*PARTS, *known) if name in known}
    left = (run.number("seconds") or 0.0) - sum(ordered.values())
    return ordered | ({"other": left} if ordered and left > 0 else {})


def devices(run: RunFiles) -> dict[str, dict[str, str]]:
    """What is known of each of the run's GPUs and hosts, by its label: means and peaks of the whole run."""
    by_label: dict[str, dict[str, str]] = {}
    for label, gauges in run.section("devices").items():
        if isinstance(gauges, Mapping) and label not in ("least_used", "most_used"):
            cells = by_label.setdefault(plain(label), {})
            for name, value in gauges.items():
                if not isinstance(value, Mapping):
                    cells[plain(name)] = format_value(value)
                elif name != "now":
                    cells |= {plain(f"{kind} ({name})"): format_value(each) for kind, each in value.items()}
    return by_label


def _gpu_use(run: RunFiles) -> str:
    """Which GPU was used least and which most, where there are several."""
    words = []
    for key in ("least_used", "most_used"):
        gpu = as_mapping(run.section("devices").get(key))
        share = number(gpu.get("utilisation"))
        if share is not None:
            words.append(f"the GPU of rank {gpu.get('rank')} ({share:.0f} %)")
    return f"least used: {words[0]}, most used: {words[1]}" if len(set(words)) == 2 else ""


def overview(runs: Sequence[RunFiles]) -> tuple[list[str], list[list[str]]]:
    """What is said of the runs first: titles, and the facts of each. What is known of none is left out."""
    facts = [facts_of(run) for run in runs]
    titles = [title for title in facts[0] if any(each[title] != NOTHING for each in facts)]
    return titles, [[each[title] for title in titles] for each in facts]


def facts_of(run: RunFiles) -> dict[str, str]:
    """What is said of a run first, by title."""
    steps, seconds, speed = run.number("steps"), run.number("seconds"), run.number("samples_per_s")
    memory, peak, split = run.number("peak_memory_mib"), run.number("mfu"), time_split(run)
    device, ranks = run.environment.get("device", NOTHING), run.environment.get("world_size", "1")
    return {
        "recipe": run.config.get("recipe", NOTHING),
        "state": run.state,
        "steps": f"{run.step:,.0f}" + (f" of {steps:,.0f}" if steps is not None else ""),
        "time": NOTHING if seconds is None else clock(max(0, seconds)),
        "samples/s": format_value(speed),
        "device": device if ranks == "1" else f"{ranks} x {device}",
        "peak memory": NOTHING if memory is None else f"{memory:,.0f} MiB",
        "waiting for data": f"{split['data'] / sum(split.values()):.0%}" if split.get("data") else NOTHING,
        "of the device's peak": NOTHING if peak is None else f"{peak:.1%}",
    }


def verdict_sentences(runs: Sequence[RunFiles]) -> dict[str, list[str]]:
    """The sentences on what limits a run, and which GPU did least, each with the runs of which it is true."""
    sentences: dict[str, list[str]] = {}
    for run in runs:
        for text in (run.summary.get("verdict"), _gpu_use(run)):
            if text:
                sentences.setdefault(format_value(text, 500), []).append(run.name)
    return sentences


def short_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = max((len(folder.parts) for folder in folders), default=0)
    for count in range(1, parts + 1):
        names = ["/".join(folder.parts[-count:]) for folder in folders]
        if len(set(names)) == len(folders):
            return names
    return [str(folder) for folder in folders]


def distinguishing_settings(runs: Sequence[RunFiles], most: int = 3) -> list[str]:
    """By what settings each run differs from the others, in a few words."""
    differing = [row for row in compare_settings([run.config for run in runs]) if row.differs][:most]
    return [
        "  ".join(f"{row.key}={_cut(row.values[i] or NOTHING, 30)}" for row in differing)
        for i in range(len(runs))
    ]


def format_value(value: Any, most: int = 80) -> str:
    """A value in a table: five digits of a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NOTHING if value is None else _cut(plain(value), most)
    finite = number(value)
    if finite is None:
        return "not finite"
    return f"{finite:,.0f}" if abs(finite) >= 10_000 else f"{finite:.5g}"


def format_point(point: CurvePoint | None) -> str:
    return NOTHING if point is None else "not finite" if point.value is None else format_value(point.value)


def direction(name: str, runs: Sequence[RunFiles]) -> bool | None:
    """Whether higher is better; None where that is not known."""
    for run in runs:
        higher = run.summary.get("higher_is_better")
        if name in run.section("best") and isinstance(higher, bool):
            return higher
    return False if _LOWER.search(name) else True if _HIGHER.match(name) else None


def _score(run: RunFiles, name: str, split: str, higher: bool | None) -> Score:
    """Of equal values the best is the one that the run has kept as its best, else the last."""
    points = run.curves.get((name, split), [])
    values = [point.value for point in points if point.value is not None]
    best = None
    if values and higher is not None:
        value, kept = (max if higher else min)(values), run.section("best")
        equal = [point for point in points if point.value == value]
        best = next((point for point in equal if name in kept and point.step == kept.get("step")), equal[-1])
    return Score(points[-1] if points else None, best)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
