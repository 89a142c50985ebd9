"""Makes a job's folder one that goes on from another job's checkpoint."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddptrain.observe.lock import unwritable
from ddptrain.text import json_object

_CHECKPOINTS = "checkpoints"
_STATE = ("metrics.jsonl", "tensorboard", _CHECKPOINTS)
"""What a run goes on from; the last one makes it one that goes on."""
_ASIDE = ".shared"


def manifests(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Of the checkpoints in a job's folder, by step, the oldest first."""
    found = {}
    for path in folder.glob(f"{_CHECKPOINTS}/step-*/manifest.json"):
        step = path.parent.name.removeprefix("step-")
        if step.isdecimal() and (manifest := json_object(path)):
            found[int(step)] = manifest
    return {step: found[step] for step in sorted(found)}


def best_step(folder: Path) -> int:
    """Of a job's best checkpoint; from an earlier one no other job may go on. 0 where there is none."""
    return int(json_object(folder / _CHECKPOINTS / "best/manifest.json").get("step", 0))


def branch(trunk: Path, step: int, folder: Path) -> None:
    """Copy the state at a step of one job, which is not running, into the folder of another, which has none.

    Files of checkpoints, which are only ever replaced, become links where the disk has them. All is copied
    aside and renamed: a kill at any moment leaves a job that goes on from there, or one that has not begun.
    Raises UserError where the disk refuses.
    """
    aside = folder / _ASIDE
    try:
        shutil.rmtree(aside, ignore_errors=True)
        (aside / _CHECKPOINTS).mkdir(parents=True)
        for name in (f"step-{step}", "best"):
            if (source := trunk / _CHECKPOINTS / name).is_dir():
                shutil.copytree(source, aside / _CHECKPOINTS / name, copy_function=_linked)
        if (metrics := trunk / "metrics.jsonl").is_file():
            shutil.copyfile(metrics, aside / "metrics.jsonl")
        if (events := trunk / "tensorboard").is_dir():
            shutil.copytree(events, aside / "tensorboard")
        for name in _STATE:
            if (aside / name).exists():
                shutil.rmtree(folder / name, ignore_errors=True)  # of an attempt that saved nothing
                (aside / name).replace(folder / name)
        aside.rmdir()
    except OSError as error:
        raise unwritable(folder, error, "sweep.dir") from error


def clear(folder: Path) -> None:
    """Remove what a kill has left of a copy."""
    shutil.rmtree(folder / _ASIDE, ignore_errors=True)


def _linked(source: str, target: str) -> None:
    with suppress(OSError):  # a disk without hard links
        os.link(source, target)
        return
    shutil.copyfile(source, target)
