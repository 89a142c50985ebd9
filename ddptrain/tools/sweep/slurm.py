"""``sweep.on=slurm``: each attempt is a job of SLURM's, submitted by sbatch."""

import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

from ddptrain.config.schema import Config
from ddptrain.errors import UserError
from ddptrain.tools.sweep.remote import BusyError, Scheduler

_BEFORE_LIMIT_S = 120
"""When a job is asked to save and stop; SLURM looks once a minute."""
_CALL_S = 30.0
_BUSY = (
    *("QOSMaxSubmitJob", "AssocMaxSubmitJob", "AssocGrpSubmitJobs", "job submit limit"),
    *("emporarily", "imed out", "nable to contact", "onnect failure", "onnection refused"),
)
"""In what sbatch says: it has enough jobs for now, or does not answer."""
_COMPLETES_S = 10.0
"""For SLURM to note how a job has ended, after its last process."""
_ENDED = ("TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "CANCELLED", "OUT_OF_MEMORY")


@final
class Slurm(Scheduler):
    """Jobs are known by their names, which are unique: a sweep that was killed in the middle of an sbatch
    finds what came of it."""

    name = "slurm"

    def __init__(self, config: Config) -> None:
        """Raises UserError where there is no SLURM."""
        sweep = config.sweep
        ranks = int(sweep.gpus_per_job)
        options = {
            "--gpus-per-node": None if config.device == "cpu" else ranks,
            "--cpus-per-task": sweep.cores_per_job,
            "--partition": sweep.partition,
            "--account": sweep.account,
            "--time": sweep.time,
        }
        self.cores = sweep.cores_per_job
        self._options = [f"{name}={value}" for name, value in options.items() if value is not None]
        self._options += [
            "--nodes=1", "--ntasks=1", "--no-requeue", f"--signal=B:USR1@{_BEFORE_LIMIT_S}", *sweep.options
        ]  # fmt: skip
        _call("sbatch", "--version")

    def submit(self, name: str, words: Sequence[str], log: Path) -> None:
        command = f"exec {shlex.join(words)}"
        own = [f"--job-name={name}", f"--output={str(log).replace('%', '%%')}", f"--wrap={command}"]
        ended = _call("sbatch", *self._options, *own)
        if ended.returncode == 0:
            return
        said = " ".join(ended.stderr.split())
        if any(words in said for words in _BUSY):
            raise BusyError(said)
        raise UserError(f"sweep.on=slurm: {said} (sbatch {shlex.join(self._options)}).")

    def names(self) -> set[str] | None:
        ended = _call("squeue", "--noheader", "--all", "--format=%j", "--me")  # of hidden partitions, too
        return set(ended.stdout.split()) if ended.returncode == 0 else None

    def cancel(self, name: str) -> None:
        _call("scancel", f"--name={name}")

    def fate(self, name: str) -> str:
        until = time.monotonic() + _COMPLETES_S
        while True:
            states = _call(
                "squeue", "--noheader", "--all", "--states=all", "--format=%T", f"--name={name}"
            ).stdout.split()
            if not {"RUNNING", "COMPLETING"} & set(states) or time.monotonic() > until:
                return next((state for state in states if state in _ENDED), "")
            time.sleep(0.5)


def _call(*words: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=_CALL_S)
    except FileNotFoundError:
        raise UserError(
            f"sweep.on=slurm: there is no {words[0]} here. Start the sweep where SLURM's commands are, or use"
            " sweep.on=local."
        ) from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"{words[0]} timed out")
