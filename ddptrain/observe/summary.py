"""summary.json: results, speed and resources."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from ddptrain.api.observer import End, Evaluated, Log, Observer, RunInfo, Saved, Start
from ddptrain.api.timing import PHASES, Timing
from ddptrain.observe.advice import advise
from ddptrain.text import finite, json_object, replace_file

_PAUSE_S = 1.0
"""Between two notes of what has been spent: a killed process may lose as much, and what its steps have taken
since the last log line."""


@final
class Summary(Observer):
    """Writes it when the process ends, whatever ended it. What the run has spent, in this process and those
    before, is noted in times.json meanwhile, for a process that is killed and followed by another one."""

    def __init__(self) -> None:
        self._began = self._noted = time.perf_counter()
        self._run = RunInfo()
        self._before: dict[str, Any] = {}
        """What the processes before have spent, as in times.json."""
        self._timing = Timing()
        """The last that is known."""

    def start(self, event: Start) -> None:
        self._run = event.run
        self._before = json_object(event.run.folder / "times.json")
        self._note()

    def log(self, event: Log) -> None:
        self._timing = event.lap.end
        if time.perf_counter() - self._noted > _PAUSE_S:
            self._note()

    def evaluated(self, event: Evaluated) -> None:
        self._note()

    def saved(self, event: Saved) -> None:
        self._note()

    def end(self, event: End) -> None:
        result, times = event.result, event.times
        spent = self._totals(times.timing, times.seconds, times.peak_memory_mib)
        whole = times.timing._replace(seconds=spent["time"], samples=spent["samples"])
        summary = {
            "outcome": result.outcome,
            "step": event.step,
            "steps": event.steps,
            "metrics": dict(result.metrics),
            "best": dict(result.best),
            "higher_is_better": result.higher_is_better,
            "processes": spent["processes"],
            "samples_per_s": whole.samples_per_s,
            "seconds": spent["seconds"],
            "peak_memory_mib": spent["peak_memory_mib"],
            "time": spent["time"],
            "time_of_ranks": [dict(rank.seconds) for rank in times.ranks],
            "flops_per_sample": whole.flops,
            "mfu": whole.mfu,
            "devices": dict(self._run.devices.summary()),
            "verdict": advise(self._run, times) if times.timing.samples else None,
        }
        _write(self._run.folder / "times.json", spent)
        _write(self._run.folder / "summary.json", summary)

    def _note(self) -> None:
        self._noted = time.perf_counter()
        with suppress(OSError):  # of a disk that is full for a moment; the end tells it
            _write(
                self._run.folder / "times.json", self._totals(self._timing, self._noted - self._began, 0.0)
            )

    def _totals(self, timing: Timing, seconds: float, peak_memory_mib: float) -> dict[str, Any]:
        """By all processes of the run."""
        before = self._before
        return {
            "processes": before.get("processes", 0) + 1,
            "seconds": before.get("seconds", 0.0) + seconds,
            "samples": before.get("samples", 0) + timing.samples,
            "peak_memory_mib": max(before.get("peak_memory_mib", 0.0), peak_memory_mib),
            "time": {name: before.get("time", {}).get(name, 0.0) + timing.seconds[name] for name in PHASES},
        }


def _write(path: Path, facts: dict[str, Any]) -> None:
    replace_file(path, json.dumps(finite(facts), indent=2) + "\n")
