"""A job of a sweep as a process."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddptrain.config.schema import Config
from ddptrain.config.strategy import is_ddp
from ddptrain.errors import ExitCode
from ddptrain.launcher.process import AGENT
from ddptrain.observe.lock import unwritable
from ddptrain.sweep.ledger import Job
from ddptrain.sweep.slots import Slots
from ddptrain.text import parse_json

OUTPUT = "output.txt"
"""In the job's folder: what it prints, attempt after attempt."""
_LAST_BYTES = 4096
_AGENT_SAYS = "ddptrain launch: "


def command(job: Job, folder: Path, slots: Slots, config: Config) -> list[str]:
    """The line that runs a job: ``launch`` for several ranks, for one a plain process, which is up sooner. A
    job that is given a GPU asks for it: should it be lost meanwhile, device=auto would train on the CPU.
    """
    launches = slots.per_job > 1 or is_ddp(config.strategy)  # there one rank has a process group too
    launch = ["launch", f"--nproc-per-node={slots.per_job}"] if launches else []
    own = [*([] if slots.on_cpu else ["device=cuda"]), f"run.dir={_quoted(folder / job.folder)}"]
    return [sys.executable, "-m", "ddptrain", *launch, *job.words, *own]


class JobProcess:
    """One attempt at a job; started by the main thread only, for it ends with the thread that started it."""

    def __init__(
        self,
        job: Job,
        words: Sequence[str],
        folder: Path,
        slots: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        """folder: the job's."""
        self.job = job
        self.slots = tuple(slots)
        self.stopped_for = ""
        """Why it was asked to stop: timeout, stopped."""
        self._kill_at: float | None = None
        self._by_signal = 0
        self._folder = folder
        try:
            folder.mkdir(exist_ok=True)
            self._output = (folder / OUTPUT).open("a+b")  # read at the end, should the folder be gone or not
        except OSError as error:
            raise unwritable(folder, error, "sweep.dir") from error
        self.began = time.monotonic()
        # without what a scheduler says to torchrun: a job is on this node alone
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        self._from = self._output.tell()
        self._process = subprocess.Popen(
            words,
            env={**inherited, **environment, AGENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C at the terminal reaches it through the sweep alone
        )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def ended(self) -> int | None:
        """The exit code, once it has ended; 128 + n where signal n has ended it."""
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self.kill()
        code = self._process.poll()
        if code is not None:
            self._signal(signal.SIGKILL)  # what it may have left in its group
        self._by_signal = -code if code is not None and code < 0 else 0
        return 128 + self._by_signal if self._by_signal else code

    def stop(self, why: str, grace: float) -> None:
        """Ask it to save and stop; after so many seconds it is killed."""
        if not self.stopped_for:
            self.stopped_for, self._kill_at = why, time.monotonic() + grace
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)  # its ranks have the kernel end them with it

    def outcome(self, code: int, pruned: bool) -> tuple[str, str, dict[str, Any]]:
        """Once it has ended: its status, why, and, of one that is done, the figures it left."""
        with self._output as output:
            end = output.seek(0, os.SEEK_END)
            output.seek(max(self._from, end - _LAST_BYTES))
            lines = output.read().decode(errors="replace").splitlines()
        summary: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            read = parse_json((self._folder / "summary.json").read_text())
            summary = read if isinstance(read, dict) else {}
        if code == 0 and summary.get("outcome") in ("done", "stopped early"):
            return "done", "", _figures(summary)
        if pruned and code == ExitCode.STOPPED:
            return "pruned", "", {}
        if self.stopped_for:
            return self.stopped_for, "", {}
        if code == ExitCode.STOPPED:
            return "stopped", "", {}
        return "failed", self._last_words(code, lines) if code else "it ended without a summary", {}

    def _last_words(self, code: int, lines: Sequence[str]) -> str:
        """The last message of a failed attempt: its own, which rank a signal ended, or the exception."""
        if self._by_signal:
            memory = " (out of memory?)" if self._by_signal == signal.SIGKILL else ""
            return f"killed by {signal.Signals(self._by_signal).name}{memory}"
        own = [line.removeprefix("ddptrain: ") for line in lines if line.startswith("ddptrain: ")]
        agent = [line.removeprefix(_AGENT_SAYS) for line in lines if line.startswith(_AGENT_SAYS)]
        others = [line.strip() for line in lines if line.strip() and not line.startswith(_AGENT_SAYS)]
        return (own or (agent if code > 128 else others) or others or [""])[-1]

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    best = summary.get("best", {})
    metric = next((name for name in best if name != "step"), None)
    if metric is None:
        return {}
    facts = {name: summary[name] for name in ("higher_is_better", "step", "steps")}
    return {"metric": metric, "value": best[metric], **facts}


def _quoted(path: Path) -> str:
    """A path as the value of an override, whatever characters it has."""
    if re.fullmatch(r"[\w./-]+", str(path)):
        return str(path)
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), str(path))
    return f"'{escaped}'"
