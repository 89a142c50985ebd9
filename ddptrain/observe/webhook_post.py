"""``python -m ddptrain.observe.webhook_post``: tells a webhook of a run's end, whatever ends it.

Its stdin: a line of JSON for the run, and one when that ends by itself; then, or when the run's process is
gone, it posts. What went wrong is printed. Imports no torch.
"""

import json
import os
import select
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddptrain.observe.clock import clock
from ddptrain.text import finite

_PAUSES_S = (0.0, 2.0, 8.0)
"""Before each try."""
_ANSWER_S = 10.0
_LOG_LINES = 10
_LOOKS_EVERY_S = 1.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another address would get the message as a request without content."""

    def redirect_request(self, *_: Any) -> None:
        return None


def message(run: Mapping[str, Any], end: Mapping[str, Any] | None) -> dict[str, Any]:
    """The JSON. end: None where the process ended without a word."""
    folder = Path(run["run"])
    ended = {"outcome": "gone", "step": None, "metrics": {}, "best": {}, "seconds": None} | dict(end or {})
    what = f"{run['recipe']} on {run['host']} ({folder})"
    if end is None:
        text = f"{what} ended without a word: killed, hung, or another rank failed; its terminal says which"
    else:
        text = f"{what}: {end['outcome']} at step {end['step']} of {run['steps']}"
        text += f" after {clock(end['seconds'])}"
        metrics = {name: value for name, value in end["metrics"].items() if "/" not in name}
        if metrics:
            text += ": " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    try:
        lines = (folder / "log.txt").read_text("utf-8", "replace").splitlines()[-_LOG_LINES:]
    except OSError:
        lines = []
    return {"text": text, **run, **ended, "log": lines}


def post(url: str, content: Mapping[str, Any]) -> str:
    """Returns what went wrong at last, without the address, or ''."""
    request = urllib.request.Request(
        url,
        json.dumps(finite(content)).encode(),
        {"Content-Type": "application/json", "User-Agent": "ddptrain"},
    )
    opener, error = urllib.request.build_opener(_NoRedirect), ""
    for pause in _PAUSES_S:
        time.sleep(pause)
        try:
            with opener.open(request, timeout=_ANSWER_S):
                return ""
        except urllib.error.HTTPError as problem:
            error = f"{urlsplit(url).hostname} answers {problem.code} {problem.reason}"
            if problem.code < 500 and problem.code != 429:  # the same next time
                return error
        except (OSError, HTTPException) as problem:
            error = f"{urlsplit(url).hostname}: {getattr(problem, 'reason', type(problem).__name__)}"
    return error


def ended(lines: FileIO, rank: int) -> dict[str, Any] | None:
    """Wait for a run's end, and return what it says of it. None: its process, of the id ``rank``, is gone
    without a word. The pipe may stay open then: what the process has forked holds it, too."""
    while os.getppid() == rank:
        if select.select([lines], [], [], _LOOKS_EVERY_S)[0]:
            line = lines.readline()
            return dict(json.loads(line)) if line else None
    return None


def main() -> None:
    lines = FileIO(0)  # what a buffer reads ahead would be hidden from select
    begun = json.loads(lines.readline())
    end = ended(lines, begun["pid"])
    if end is None or end["outcome"] != "stopped":
        print(post(begun["url"], message(begun["run"], end)), end="")


if __name__ == "__main__":
    main()
