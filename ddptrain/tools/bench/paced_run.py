"""Trainings that take turns, so that other load on the machine slows all equally. Imports no torch."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.distributed.launcher.process import environment_of_no_rank
from ddptrain.errors import UserError
from ddptrain.text import quoted

_STARTS_WITHIN_S = 300.0  # Compiling takes a minute or two
_READ_AHEAD = 3  # Batches that a loader process has ready while nobody asks: two, and one in its hands
_TAIL_LINES = 12


class Unfit(Exception):
    """A training did not start, or did not go on. The message holds the end of what it said."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        """Its exit code, where it has ended."""


@dataclass(frozen=True, slots=True)
class LapTimes:
    """Some steps of one training."""

    steps: int
    seconds: Mapping[str, float]
    """By phase."""
    setup: Mapping[str, Any]
    peak_memory: int
    """Most bytes that a rank has had so far."""

    @property
    def ms_per_step(self) -> float:
        return 1e3 * sum(self.seconds.values()) / self.steps


class PacedRun:
    """One training in separate processes, which stands still between its laps.

    folder: for its files. steps: of the shortest lap.
    """

    def __init__(self, words: Sequence[str], ranks: int, folder: Path, steps: int) -> None:
        """Raises UserError where the folder's name is too long for a socket."""
        folder.mkdir()
        self._ranks, self._steps = ranks, steps
        self._output = folder / "said.txt"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(folder / "turns"))
        except OSError as error:
            raise UserError(
                f"{folder}: no place for a socket ({error}). Set TMPDIR to a shorter one."
            ) from error
        self._socket.listen(ranks)
        self._lines: list[socket.socket] = []
        """To each of its ranks."""
        self._stale = 0
        launch = ["launch", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        address = quoted(str(folder / "turns"))
        pacing = f"{{_target_:ddptrain.tools.bench.pacing.Pacing,address:{address}}}"
        own = [
            f"log.every={steps}",
            f"run.dir={quoted(str(folder / 'run'))}",
            "run.mirror=null",
            f"+controllers.pacing={pacing}",
        ]
        with self._output.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ddptrain", *launch, *words, *own],
                env=environment_of_no_rank(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def warm_up(self) -> LapTimes:
        """The first steps, which compile, tune and allocate. Raises Unfit where they don't come."""
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while len(self._lines) < self._ranks:
            if select.select([self._socket], [], [], 0.1)[0]:
                self._lines.append(self._socket.accept()[0])
            elif self._process.poll() is not None:
                raise Unfit(self._tail(), self._process.returncode)
            elif time.monotonic() > deadline:
                raise Unfit(f"does not start within {_STARTS_WITHIN_S:.0f} s")
        lap = self._finished_lap()
        self._stale = -(-_READ_AHEAD * (lap.setup["workers"] or 0) // self._steps)
        return lap

    def lap(self, times: int = 1) -> LapTimes:
        """So many times the shortest lap, after those that use up what its loaders have read ahead while it
        stood still."""
        laps = [self._go_on() for _ in range(self._stale + times)][self._stale :]
        last = laps[-1]
        seconds = {phase: sum(lap.seconds[phase] for lap in laps) for phase in last.seconds}
        return LapTimes(times * self._steps, seconds, last.setup, last.peak_memory)

    def _go_on(self) -> LapTimes:
        for line in self._lines:
            with suppress(OSError):  # it has ended, which is noticed below
                line.sendall(b"g")
        return self._finished_lap()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._socket.close()
        for line in self._lines:
            line.close()

    def _finished_lap(self) -> LapTimes:
        """The first rank's lap, once all have done it."""
        laps = {said["rank"]: said for said in map(self._read, self._lines)}
        peak = max(lap["peak_memory"] for lap in laps.values())
        return LapTimes(self._steps, laps[0]["seconds"], laps[0]["setup"], peak)

    def _read(self, line: socket.socket) -> Mapping[str, Any]:
        line.settimeout(_STARTS_WITHIN_S)
        read = b""
        with suppress(OSError):
            while not read.endswith(b"\n") and (part := line.recv(65536)):
                read += part
        if not read.endswith(b"\n"):
            raise Unfit(self._tail(), self._process.poll())
        said: Mapping[str, Any] = json.loads(read)
        return said

    def _tail(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)  # torchrun waits for its ranks
        lines = self._output.read_text(errors="replace").splitlines()
        own = [line for line in lines if line.startswith("ddptrain: ")]
        return own[-1].removeprefix("ddptrain: ") if own else "\n".join(lines[-_TAIL_LINES:])
