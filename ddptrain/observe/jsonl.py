"""metrics.jsonl: one JSON object per line, read by plots, reports and tests.

It holds only what follows from config and seed: a repeated run, or one that was killed and resumed, writes
the same bytes. Speed goes to TensorBoard and summary.json.
"""

import json
import math
import os
from collections.abc import Mapping
from typing import final

from ddptrain.api.observer import End, Evaluated, Log, Observer, Start
from ddptrain.observe.metrics_file import read_lines


@final
class Jsonl(Observer):
    """Appends to metrics.jsonl; on a resume first removes lines after the resumed step."""

    def start(self, event: Start) -> None:
        self._path = event.run.folder / "metrics.jsonl"
        kept = [
            line
            for line in read_lines(self._path)
            if line["step"] <= event.step
            and not (event.evaluates and line["step"] == event.step and line["split"] == "valid")
        ]
        aside = self._path.with_suffix(".part")
        aside.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(aside, self._path)
        self._file = self._path.open("a")

    def log(self, event: Log) -> None:
        self._write(event, "train", event.values)

    def evaluated(self, event: Evaluated) -> None:
        self._write(event, "valid", event.metrics)

    def end(self, event: End) -> None:
        self._file.close()

    def _write(self, event: Log | Evaluated, split: str, values: Mapping[str, float]) -> None:
        line = {"step": event.step, "epoch": event.epoch, "samples": event.samples, "split": split}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({**line, **finite}) + "\n")
        self._file.flush()
