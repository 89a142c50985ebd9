"""One message to a web address when a run ends, whatever ends it. A process of its own sends it
(`webhook_post`), so that it comes even if the run's process is killed or ended as hanging."""

import json
import logging
import os
import socket
import subprocess
from collections.abc import Mapping
from typing import Any, final
from urllib.parse import urlsplit

from ddptrain.api.observer import End, Observer, Start
from ddptrain.distributed.world import world_from_environment
from ddptrain.errors import UserError
from ddptrain.observe.child import start_module
from ddptrain.observe.webhook_post import FINISHED

log = logging.getLogger("ddptrain")

_VARIABLE = "DDPTRAIN_WEBHOOK_URL"
_LAST_S = 45.0
"""Limit at the end for all tries: below that of a slow observer."""


@final
class Webhook(Observer):
    """Posts JSON when the run is done, diverges, fails, hangs or is killed; not when it is stopped, to go on
    later.

    Fields: ``text`` (a sentence, which Slack and Mattermost show), ``run``, ``recipe``, ``host``,
    ``outcome``, ``why``, ``step``, ``steps``, ``metrics``, ``best``, ``seconds``, and the last lines of the
    ``log``.

    The address is that of the environment variable DDPTRAIN_WEBHOOK_URL: it is a secret, which a config would
    keep in the run's folder.
    """

    slow = True

    def __init__(self) -> None:
        self._url = os.environ.get(_VARIABLE, "")
        if world_from_environment().is_first:
            _check(self._url)
        self._process: subprocess.Popen[str] | None = None

    def start(self, event: Start) -> None:
        self._process = start_module(
            "ddptrain.observe.webhook_post", [],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            process_group=0,
        )  # fmt: skip
        run = {
            "run": str(event.run.folder.resolve()),
            "recipe": event.run.config.get("recipe"),
            "host": socket.gethostname(),
            "steps": event.steps,
        }
        self._tell({"url": self._url, "pid": os.getpid(), "run": run})

    def end(self, event: End) -> None:
        assert self._process is not None
        result = event.result
        self._tell(
            {
                "outcome": result.outcome,
                "step": event.step,
                "metrics": dict(result.metrics),
                "best": dict(result.best),
                "seconds": round(event.times.seconds, 1),
            }
        )
        if result.outcome not in FINISHED:  # its message is in the log later, which the other process awaits
            return
        try:
            error, _ = self._process.communicate(timeout=_LAST_S)
            if not error and self._process.returncode:
                error = "the process that sends it failed"
        except subprocess.TimeoutExpired:
            self._process.kill()
            error = "it does not answer"
        if error:
            log.warning("webhook    was not told of the end: %s", error.strip())

    def _tell(self, facts: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(facts) + "\n")
        self._process.stdin.flush()


def _check(url: str) -> None:
    """Raise UserError for what is no web address."""
    if not url:
        raise UserError(f"observers=webhook: needs the environment variable {_VARIABLE}, an address.")
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        sound = sound and "@" not in parts.netloc and url.isascii() and url.isprintable() and " " not in url
    except ValueError:
        sound = False
    if not sound:
        raise UserError(
            f"{_VARIABLE}: must be an address with http:// or https://, without a user's name, and in ASCII."
        )
