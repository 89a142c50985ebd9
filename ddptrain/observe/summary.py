"""summary.json: what came out, and how fast."""

import json
import os
from pathlib import Path
from typing import final

from ddptrain.observe.observer import End, Evaluated, Log, Observer, Saved, Start


@final
class Summary(Observer):
    """Written when the process ends, whatever ended it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._evaluating = 0.0

    def start(self, event: Start) -> None:
        pass

    def log(self, event: Log) -> None:
        pass

    def evaluated(self, event: Evaluated) -> None:
        self._evaluating += event.seconds

    def saved(self, event: Saved) -> None:
        pass

    def end(self, event: End) -> None:
        summary = {
            "outcome": event.outcome,
            "step": event.step,
            "steps": event.steps,
            "metrics": dict(event.metrics),
            "best": dict(event.best),
            "higher_is_better": event.higher_is_better,
            **event.speed,
            "evaluating_seconds": self._evaluating,
        }
        aside = self._path.with_suffix(".part")
        aside.write_text(json.dumps(summary, indent=2) + "\n")
        os.replace(aside, self._path)
