"""``run.mirror``: starts the process that sends a run's folder to a bucket, and tells what it says."""

import json
import logging
import subprocess
import threading
import time
from pathlib import Path
from typing import final

from ddptrain.api.observer import End, Observer, Start
from ddptrain.data.stream.store import shown
from ddptrain.observe.child import start_module
from ddptrain.observe.lock import lost
from ddptrain.observe.mirror.layout import opened

log = logging.getLogger("ddptrain")

_LAST_S, _SHORT_S = 45.0, 10.0
"""Limits at the end for what is still to be sent: below that of a slow observer; and where the store has
failed before, or the run was asked to stop and will go on, below ``checkpoint.grace``."""


@final
class Mirror(Observer):
    """Sends checkpoints, config, metrics and log to ``url``, by a process of its own: no step waits for it.
    Raises UserError where that is no address."""

    slow = True

    def __init__(self, url: str) -> None:
        self._url = opened(url, "run.mirror", 0.0).url
        self._sending: _Sending | None = None

    def start(self, event: Start) -> None:
        self._sending = _Sending(event.run.folder, self._url)

    def end(self, event: End) -> None:
        assert self._sending is not None
        self._sending.end(stopped=event.result.outcome == "stopped")


@final
class _Sending:
    """The process that sends a folder, and a thread that reads what it says."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url
        self._newest, self._error = "", ""
        self._process = start_module(
            "ddptrain.observe.mirror.send", [str(folder.absolute()), url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            process_group=0,
        )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, name="mirror", daemon=True)
        self._listener.start()

    def end(self, stopped: bool) -> None:
        """Wait until all is sent, but not for ever. stopped: the run will go on."""
        if lost(self._folder) is not None:  # what is there now is not this run's
            self._process.kill()
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        began = time.monotonic()
        while self._listener.is_alive():
            if time.monotonic() - began > (_SHORT_S if self._error or stopped else _LAST_S):
                break
            self._listener.join(0.2)
        where = shown(self._url)
        if self._listener.is_alive():
            log.warning("mirror     the upload to %s goes on in the background, for up to ten minutes", where)
        elif self._error or self._process.wait(timeout=5):
            log.warning(
                "mirror     the upload to %s is not complete; its newest checkpoint: %s",
                where,
                self._newest or "none",
            )
        else:
            log.info("mirror     %s has all of the run", where)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            facts = json.loads(line)
            if error := facts.get("error"):
                log.warning("mirror     %s The training goes on", error)
            elif self._error:
                log.info("mirror     %s is up to date again", shown(self._url))
            self._error, self._newest = facts.get("error", ""), facts.get("sent") or self._newest
        assert self._process.stdin is not None
        if not self._error and not self._process.stdin.closed:
            self._error = "ended"
            log.warning(
                "mirror     the process that sends has ended: nothing more is sent. The training goes on"
            )
