"""summary.json: what came out, and how fast."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

from ddptrain.api.observer import End, Evaluated, Log, Observer, Saved, Start, Times


@final
class Summary(Observer):
    """Written when the process ends, whatever ended it.

    advise: what limits the run, in a sentence. devices: what they did, for JSON.
    """

    def __init__(
        self,
        path: Path,
        advise: Callable[[Times], str],
        devices: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        self._path = path
        self._advise = advise
        self._devices = devices

    def start(self, event: Start) -> None:
        pass

    def log(self, event: Log) -> None:
        pass

    def evaluated(self, event: Evaluated) -> None:
        pass

    def saved(self, event: Saved) -> None:
        pass

    def end(self, event: End) -> None:
        result, times, timing = event.result, event.times, event.times.timing
        summary = {
            "outcome": result.outcome,
            "step": event.step,
            "steps": event.steps,
            "metrics": dict(result.metrics),
            "best": dict(result.best),
            "higher_is_better": result.higher_is_better,
            "samples_per_s": timing.samples_per_s,
            "seconds": times.seconds,
            "peak_memory_mib": times.peak_memory_mib,
            "time": dict(timing.seconds),
            "time_of_ranks": [dict(rank.seconds) for rank in times.ranks],
            "flops_per_sample": timing.flops,
            "mfu": timing.mfu,
            "devices": dict(self._devices()),
            "verdict": self._advise(times) if timing.samples else None,
        }
        aside = self._path.with_suffix(".part")
        aside.write_text(json.dumps(summary, indent=2) + "\n")
        os.replace(aside, self._path)
