"""``sweep.on=local``: jobs as processes of this machine, each on slots of its own."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, final

from ddptrain.distributed.launcher.process import AGENT, environment_of_no_rank
from ddptrain.observe.lock import unwritable
from ddptrain.tools.sweep.ledger import Job
from ddptrain.tools.sweep.machines import OUTPUT, Attempt, Machines
from ddptrain.tools.sweep.slots import Slots, lost_of


@final
class LocalAttempt(Attempt):
    """Started by the main thread only, for it ends with the thread that started it."""

    def __init__(self, job: Job, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        super().__init__(job, folder)
        try:
            self._output = (folder / OUTPUT).open("a+b")  # read at the end, should the folder be gone or not
        except OSError as error:
            raise unwritable(folder, error, "sweep.dir") from error
        self._began = time.monotonic()
        self._from = self._output.tell()
        self._process = subprocess.Popen(
            words,
            env={**environment_of_no_rank(), **variables, AGENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C at the terminal reaches it through the sweep alone
        )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def output(self) -> tuple[BinaryIO, int]:
        return self._output, self._from

    def returncode(self) -> int | None:
        code = self._process.poll()
        if code is not None:
            self._signal(signal.SIGKILL)  # what it may have left in its group
        return code

    def ask_to_stop(self, grace: float) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)  # its ranks have the kernel end them with it

    def leave(self) -> None:
        self.kill()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@final
class LocalMachine(Machines):
    """This machine: its GPUs, or shares of its cores."""

    name = "local"
    tick = 0.1

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._usable = list(slots.names)
        self._free = list(slots.names) if slots.are_gpus else []
        self.on_cpu, self.parallel, self.ranks = slots.on_cpu, slots.parallel, slots.per_job

    def describe(self) -> str:
        return self._slots.describe()

    def take(self) -> tuple[str, ...]:
        return tuple(self._emptiest() for _ in range(self.ranks)) if self._slots.are_gpus else ()

    def start(self, job: Job, words: Sequence[str], folder: Path, gpus: Sequence[str]) -> Attempt:
        return LocalAttempt(job, words, folder, self._slots.environment(gpus))

    def release(self, gpus: Sequence[str], failed: bool) -> Sequence[str]:
        lost = lost_of(gpus) if failed and not self.on_cpu else []
        self._usable = [gpu for gpu in self._usable if gpu not in lost]
        self.parallel = min(self.parallel, len(self._usable) // self.ranks)
        free = [gpu for gpu in (*self._free, *gpus) if gpu not in lost]
        self._free = sorted(free, key=self._slots.names.index)
        return lost

    def _emptiest(self) -> str:
        gpu = max(self._free, key=self._free.count)  # the first of those
        self._free.remove(gpu)
        return gpu
