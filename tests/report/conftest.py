"""Run folders as trainings leave them, without the trainings."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    return lambda *words, **facts: write_run(tmp_path, *words, **facts)


def write_run(home: Path, name: str, lr: float = 0.1, lines: int = 20, seed: int = 0, **summary: Any) -> Path:
    """A finished run: so many training lines, and an evaluation after each tenth of them."""
    folder = home / name
    (folder / "plots").mkdir(parents=True)
    (folder / ".lock").touch()
    settings = f"recipe: toy\noptim:\n  lr: {lr}\ntrain:\n  batch_size: 64\nrun:\n  dir: {name}\n"
    (folder / "config.yaml").write_text(settings)
    (folder / "command.txt").write_text(f"python -m ddptrain recipe=toy optim.lr={lr}\n")
    environment = {"libraries": {"torch": "2.15.0"}, "device": "cpu", "world_size": 1}
    (folder / "environment.json").write_text(json.dumps(environment))
    dice = random.Random(seed)
    written = []
    for i in range(1, lines + 1):
        place = {"step": 10 * i, "epoch": i / 8, "samples": 640 * i}
        loss = 2 * math.exp(-3 * i / lines) + 0.1 * dice.random()
        written.append({**place, "split": "train", "loss": loss, "lr": lr * (1 - i / lines)})
        if i % max(1, lines // 10) == 0:
            metrics = {"accuracy": 1 - loss / 4, "loss": loss + 0.1, "AP/owl": 0.25}
            written.append({**place, "split": "valid", **metrics})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    known = {
        "outcome": "done", "step": 10 * lines, "steps": 10 * lines, "seconds": 12.5, "samples_per_s": 4000.0,
        "best": {"accuracy": 0.9, "step": 10 * lines}, "higher_is_better": True, "peak_memory_mib": 900.0,
        "time": {"data": 4.0, "forward": 3.0, "backward": 5.0},
        "verdict": "waiting for data 32%: data.workers=4",
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps({**known, **summary}))
    return folder
