"""metrics.jsonl: one JSON object per line, read by plots, reports and tests.

What a full disk refuses is written when there is room again; a file that is deleted or replaced under the
run is put back.

It holds only what follows from config and seed: a repeated run, or one that was killed and resumed, writes
the same bytes. Speed goes to TensorBoard and summary.json.
"""

import io
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import final

from ddptrain.api.observer import End, Evaluated, Log, Observer, Start
from ddptrain.observe.lock import was_taken
from ddptrain.observe.metrics_file import read_lines
from ddptrain.text import finite, replace_file

log = logging.getLogger("ddptrain")


@final
class Jsonl(Observer):
    """Appends to metrics.jsonl; on a resume first removes lines after the resumed step."""

    def __init__(self) -> None:
        self._file: _File | None = None

    def start(self, event: Start) -> None:
        path = event.run.folder / "metrics.jsonl"
        kept = [
            line
            for line in read_lines(path)
            if line["step"] <= event.step
            and not (event.evaluates and line["step"] == event.step and line["split"] == "valid")
        ]
        if event.step and not path.exists() and (event.run.folder / "checkpoints").is_dir():
            log.warning("%s was deleted: it will lack the steps up to %d", path, event.step)
        self._file = _File(path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def log(self, event: Log) -> None:
        self._write(event, "train", event.values)

    def evaluated(self, event: Evaluated) -> None:
        self._write(event, "valid", event.metrics)

    def end(self, event: End) -> None:
        assert self._file is not None
        self._file.close()

    def _write(self, event: Log | Evaluated, split: str, values: Mapping[str, float]) -> None:
        assert self._file is not None
        line = {"step": event.step, "epoch": event.epoch, "samples": event.samples, "split": split}
        self._file.write(json.dumps(finite({**line, **values})).encode() + b"\n")


@final
class _File:
    """Made anew, of these lines; further ones are appended."""

    def __init__(self, path: Path, lines: bytes) -> None:
        self._path = path
        self._file = _rewritten(path, lines)
        self._waiting = b""
        """What the disk has refused so far."""

    def write(self, line: bytes) -> None:
        """What is refused is tried again with the next line; a disk that stays full refuses the next save."""
        self._waiting += line
        with suppress(OSError):
            self._flush()
            if was_taken(self._path, self._file.fileno()):
                taken = self._file
                taken.seek(0)
                self._file = _rewritten(self._path, taken.read())
                taken.close()

    def close(self) -> None:
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        while self._waiting:  # by parts, where the disk takes a part
            self._waiting = self._waiting[self._file.write(self._waiting) :]


def _rewritten(path: Path, lines: bytes) -> io.FileIO:
    replace_file(path, lines)
    return path.open("a+b", buffering=0)
