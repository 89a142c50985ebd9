"""summary.json: results, speed and resources."""

import json
import os
from typing import final

from ddptrain.api.observer import End, Observer, Start
from ddptrain.observe.advice import advise


@final
class Summary(Observer):
    """Writes it when the process ends, whatever ended it."""

    def start(self, event: Start) -> None:
        self._run = event.run

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
            "devices": dict(self._run.devices.summary()),
            "verdict": advise(self._run, times) if timing.samples else None,
        }
        path = self._run.folder / "summary.json"
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(summary, indent=2) + "\n")
        os.replace(aside, path)
