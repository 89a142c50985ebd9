"""Sweeps as users start them, and what their ledgers say."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from running import Job

SWEPT = Path(__file__).parent / "swept"


def swept_words(*words: str) -> list[str]:
    """The recipe of `swept.py` in the sweep folder ``sweep``."""
    return ["--multirun", f"--config-dir={SWEPT}", "recipe=swept", "device=cpu", "sweep.dir=sweep", *words]


def start(cwd: Path, words: Sequence[str], variables: Mapping[str, str] | None = None) -> Job:
    return Job(words, cwd, ranks=1, launcher="python", variables=variables or {})


def events(cwd: Path, kind: str = "") -> list[dict[str, Any]]:
    """The ledger's lines, of one kind or all."""
    lines = [json.loads(line) for line in (cwd / "sweep/ledger.jsonl").read_text().splitlines()]
    return [line for line in lines if not kind or line["event"] == kind]


def statuses(cwd: Path) -> dict[int, str]:
    """How each job ended last, by number."""
    return {event["job"]: event["status"] for event in events(cwd, "ended")}


def points(cwd: Path) -> dict[int, str]:
    """The point of the grid that each job is, by number."""
    numbered = {}
    for event in events(cwd, "job"):
        (word,) = [word for word in event["words"] if word.startswith("task.point=")]
        numbered[event["job"]] = word.partition("=")[2]
    return numbered


def hide_optuna(folder: Path) -> dict[str, str]:
    """The variables with which a process finds no Optuna installed. folder: for the file that hides it."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "def without(name, path=None, target=None):\n"
        "    return None if name == 'optuna' else find(name, path, target)\n"
        "PathFinder.find_spec = without\n"
    )
    return {"PYTHONPATH": str(folder)}


def packed(seconds: Sequence[float], slots: int) -> float:
    """How long jobs of these lengths take on so many slots, each in its turn where one is free first."""
    free = [0.0] * slots
    for length in seconds:
        first = free.index(min(free))
        free[first] += length
    return max(free)
