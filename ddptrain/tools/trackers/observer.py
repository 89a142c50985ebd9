"""The observer of a tracker: it only starts the process that sends, and ends it."""

import json
import logging
import subprocess
from pathlib import Path
from typing import Literal, final

from ddptrain.api.observer import End, Observer, Start
from ddptrain.errors import UserError
from ddptrain.observe.child import start_module
from ddptrain.observe.lock import lost
from ddptrain.tools.trackers.about import write_options
from ddptrain.tools.trackers.service import is_installed

log = logging.getLogger("ddptrain")

_LAST_S, _STOPPED_S = 45.0, 10.0
"""Limits at the end for what is still to be sent: below that of a slow observer, and, where the run was asked
to stop and will go on, below ``checkpoint.grace``."""


@final
class Tracker(Observer):
    """Sends what is in the run's folder: config, command, metrics.jsonl, plots, summary.

    By another process, so a tracker that is slow or does not answer costs the training nothing. The tracker's
    address and keys come from its own environment variables and are not written anywhere.

    to: the tracker. project: the experiment there; None: the recipe's name. checkpoints: which one is sent at
    the end.
    """

    slow = True
    reads_metrics_file = True

    def __init__(
        self,
        to: Literal["mlflow", "wandb", "trackio"],
        project: str | None = None,
        checkpoints: Literal["none", "best", "last"] = "none",
    ) -> None:
        if not is_installed(to):
            raise UserError(f"observers={to}: needs {to}: pip install 'ddptrain[{to}]'")
        self._to = to
        self._project = project
        self._checkpoints = checkpoints
        self._folder = Path()
        """The run's."""
        self._process: subprocess.Popen[str] | None = None

    def start(self, event: Start) -> None:
        self._folder = event.run.folder
        project = self._project or str(event.run.config["recipe"])
        write_options(self._folder, self._to, {"project": project, "checkpoints": self._checkpoints})
        self._process = start_module(
            "ddptrain.tools.trackers.send", [str(self._folder), self._to],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def end(self, event: End) -> None:
        assert self._process is not None
        if lost(self._folder) is not None:  # what is there now is not this run's
            self._process.kill()
            return
        limit = _STOPPED_S if event.result.outcome == "stopped" else _LAST_S
        try:
            said, _ = self._process.communicate(timeout=limit)  # closes its stdin, which ends it
            result = json.loads(said.splitlines()[-1])
        except (subprocess.TimeoutExpired, IndexError, ValueError):
            self._process.kill()
            result = {"error": "it does not answer"}
        if result["error"]:
            rest = f"python -m ddptrain report run={self._folder} to={self._to}"
            log.warning(
                "%-10s has not got everything (%s). To send the rest: %s", self._to, result["error"], rest
            )
        else:
            log.info("%-10s has all of run %s in %s", self._to, result["run"], result["project"])
