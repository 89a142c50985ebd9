"""What a run's folder tells, for reports. Imports no torch, and trusts nothing.

The folder may be a stranger's, or of a run that is still going on or was killed: a file may be missing, cut
short or hold anything. What can't be read is left out, and said so.
"""

import json
import math
import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ddptrain.observe.changes import CHANGES
from ddptrain.observe.lock import LOCK, is_locked
from ddptrain.observe.metrics_file import POSITION
from ddptrain.observe.plain_files import is_plain_file
from ddptrain.observe.summary_file import current_summary
from ddptrain.text import parse_json, parse_yaml, plain

_MARKS = ("command.txt", "metrics.jsonl", "summary.json")  # A folder with one of these is a run's
_MOST_KEYS = 2000  # Of a config: YAML's aliases make a short text endless
_BRIEFLY = reprlib.Repr()
_BRIEFLY.maxlist = _BRIEFLY.maxdict = _BRIEFLY.maxtuple = 20
_BRIEFLY.maxlevel = 3
_BRIEFLY.maxstring = _BRIEFLY.maxother = 200


class CurvePoint(NamedTuple):
    """One logged value."""

    step: float
    epoch: float | None
    value: float | None
    """None: it was no finite number."""


@dataclass(slots=True)
class RunFiles:
    """A run as its folder tells of it."""

    folder: Path
    name: str
    """Short, and different from the names of the runs beside it."""
    config: dict[str, str] = field(default_factory=dict)
    """By dotted key; without the sections that say where it ran."""
    config_text: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    command: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """summary.json; of a run whose last process has not written it, what is known instead."""
    curves: dict[tuple[str, str], list[CurvePoint]] = field(default_factory=dict)
    """By name and split, by rising step."""
    details: dict[str, CurvePoint] = field(default_factory=dict)
    """The last value of each name with a slash: of one class, say."""
    is_going_on: bool = False
    is_copy: bool = False
    """No process has trained in this folder, so no lock tells whether it goes on elsewhere."""
    notes: list[str] = field(default_factory=list)
    """What could not be read."""

    @property
    def step(self) -> float:
        """The last step known of."""
        logged = max((points[-1].step for points in self.curves.values()), default=0.0)
        return max(logged, self.number("step") or 0.0)

    @property
    def state(self) -> str:
        """What became of it."""
        if self.is_going_on:
            return "still going on"
        unknown = "no end known: this is a copy" if self.is_copy else "killed, or crashed"
        return plain(self.summary.get("outcome") or unknown)

    def number(self, name: str) -> float | None:
        """A number of summary.json, if it is there and finite."""
        return number(self.summary.get(name))

    def section(self, name: str) -> Mapping[str, Any]:
        """An object of summary.json; empty if it is not there."""
        return as_mapping(self.summary.get(name))


def is_run(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in _MARKS)  # false where it may not be read, too


def read_run(folder: Path, name: str) -> RunFiles:
    """All that a report shows but the pictures."""
    run = RunFiles(folder, plain(name))
    run.is_copy = not (folder / LOCK).is_file()
    run.is_going_on = not run.is_copy and is_locked(folder)
    run.config_text = _text(run, "config.yaml")
    config = _parsed(run, "config.yaml", run.config_text, parse_yaml)
    run.config = flat({key: value for key, value in config.items() if key not in ("run", "sweep")})
    run.environment = flat(_parsed(run, "environment.json", _text(run, "environment.json"), parse_json))
    run.command = _text(run, "command.txt").strip()
    summary, times = (
        _parsed(run, file, _text(run, file), parse_json) for file in ("summary.json", "times.json")
    )
    run.summary = current_summary(summary, times)
    _read_metrics(run)
    _read_changes(run)
    return run


def flat(tree: Mapping[Any, Any]) -> dict[str, str]:
    """Nested settings as texts by dotted key."""
    texts: dict[str, str] = {}
    left = [(str(key), value) for key, value in reversed(list(tree.items()))]
    while left and len(texts) < _MOST_KEYS and len(left) < _MOST_KEYS:
        name, value = left.pop()
        if isinstance(value, Mapping) and value and name.count(".") < 20:
            left += [(f"{name}.{key}", inner) for key, inner in reversed(list(value.items()))]
        else:
            texts[plain(name)[:200]] = _briefly(value)
    return texts


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def as_mapping(value: object) -> Mapping[str, Any]:
    """The value, or an empty mapping for anything else."""
    return value if isinstance(value, Mapping) else {}


def _briefly(value: object) -> str:
    if isinstance(value, list | tuple | Mapping):
        return plain(_BRIEFLY.repr(value))
    return json.dumps(value) if value is None or isinstance(value, bool) else plain(value)


def _text(run: RunFiles, name: str) -> str:
    """A file's text as it may be shown; '' where there is none."""
    content = _content(run, name)
    if content is None:
        # the run's state says what the last two would
        run.notes += [f"{name} is missing"] if name not in ("summary.json", "times.json") else []
    return plain((content or b"").replace(b"\r\n", b"\n").decode("utf-8", errors="replace"))


def _content(run: RunFiles, name: str) -> bytes | None:
    """None where there is no such file, or a link; b"" with a note where it can't be read."""
    path = run.folder / name
    try:
        return path.read_bytes() if is_plain_file(path) else None
    except OSError as error:
        run.notes.append(f"{name} can't be read ({error.strerror})")
        return b""


def _parsed(run: RunFiles, name: str, text: str, parse: Callable[[str], Any]) -> Mapping[Any, Any]:
    if not text:
        return {}
    try:
        tree = parse(text)
    except ValueError:
        tree = None
    if not isinstance(tree, Mapping):
        run.notes.append(f"{name} can't be read: it is damaged")
        return {}
    return tree


def _read_metrics(run: RunFiles) -> None:
    """The curves, and the last of what belongs to single classes. The last line for a step counts."""
    points_by_step: dict[tuple[str, str], dict[float, CurvePoint]] = {}
    damaged = 0
    lines = (_content(run, "metrics.jsonl") or b"").split(b"\n")
    for i, text in enumerate(lines, 1):
        line = _json_object(text)
        step = number(line.get("step"))
        if step is None:
            damaged += i < len(lines) and bool(text.strip())  # the last may be half written
            continue
        split, epoch = plain(line.get("split", "")), number(line.get("epoch"))
        for name, value in line.items():
            if name in POSITION or not _is_logged(value):
                continue
            point = CurvePoint(step, epoch, number(value))
            if "/" in name:
                run.details[plain(name)] = point
            else:
                points_by_step.setdefault((plain(name), split), {})[step] = point
    if damaged:
        run.notes.append(f"metrics.jsonl: {damaged} damaged lines are left out")
    run.curves = {key: [points[step] for step in sorted(points)] for key, points in points_by_step.items()}
    if not run.curves:
        _take_final_metrics(run)


def _read_changes(run: RunFiles) -> None:
    """A note for each key that the run has had another value of before."""
    lines = (_content(run, CHANGES) or b"").split(b"\n")[:_MOST_KEYS]
    for line in map(_json_object, lines):
        for key, values in as_mapping(line.get("changed")).items():
            if isinstance(values, list) and len(values) == 2:
                old, new = map(_briefly, values)
                run.notes.append(f"{plain(key)}: {new} since step {plain(line.get('step'))}, {old} before")


def _json_object(text: bytes) -> Mapping[str, Any]:
    """Empty where the text is damaged."""
    try:
        return as_mapping(parse_json(text))
    except ValueError:
        return {}


def _is_logged(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _take_final_metrics(run: RunFiles) -> None:
    """From summary.json, where metrics.jsonl has none."""
    step = run.number("step") or 0.0
    for name, value in run.section("metrics").items():
        if "/" not in str(name) and _is_logged(value):
            run.curves[plain(name), "valid"] = [CurvePoint(step, None, number(value))]
