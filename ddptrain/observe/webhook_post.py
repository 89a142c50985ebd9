"""``python -m ddptrain.observe.webhook_post``: tells a webhook of a run's end, whatever ends it.

Its stdin: a line of JSON for the run, and one when that ends by itself; then, or when the run's process is
gone, it posts. What went wrong is printed. Imports no torch.
"""

import json
import os
import re
import select
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddptrain.observe.clock import clock
from ddptrain.text import SAVED, finite

_PAUSES_S = (0.0, 2.0, 8.0)
"""Before each try."""
_ANSWER_S = 10.0
_LOG_LINES = 10
_DATED = re.compile(r"\d{4}-\d{2}-\d{2} ")
_LOOKS_EVERY_S = 1.0
_LAST_WORDS_S = 90.0
"""Above what slow observers may need before them (`ddptrain.observe.dispatch`)."""
FINISHED = ("done", "stopped early", "stopped")
"""Outcomes that are no failure, so that there is no error to report."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another address would get the message as a request without content."""

    def redirect_request(self, *_: Any) -> None:
        return None


def message(run: Mapping[str, Any], end: Mapping[str, Any] | None) -> dict[str, Any]:
    """The JSON. end: None where the process ended without a word."""
    folder = Path(run["run"])
    lines = _log(folder)
    why = "" if end is not None and end["outcome"] in FINISHED else _last_words(lines)
    ended = {"outcome": "gone", "step": None, "metrics": {}, "best": {}, "seconds": None} | dict(end or {})
    what = f"{run['recipe']} on {run['host']} ({folder})"
    if end is None:
        text = f"{what} ended" + (
            "" if why else " without a last message: it was killed, or ended because another rank did"
        )
    else:
        text = f"{what}: {end['outcome']} at step {end['step']} of {run['steps']}"
        text += f" after {clock(end['seconds'])}"
        metrics = {name: value for name, value in end["metrics"].items() if "/" not in name}
        if metrics:
            text += ": " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    if why:
        text += f": {why}"
    return {"text": text, **run, **ended, "why": why, "log": lines[-_LOG_LINES:]}


def _log(folder: Path) -> list[str]:
    try:
        return (folder / "log.txt").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def _last_words(log: Sequence[str]) -> str:
    """What the run's process has left in its log when the watchdog ended it; else ''. The first line of a
    message has a date and ``ended``, the others have neither."""
    for i in reversed(range(len(log))):
        if _DATED.match(log[i]):
            _, _, said = log[i].partition(" ended      ")
            return "\n".join([said, *log[i + 1 :]]) if said else ""
    return ""


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


def _await_last_words(folder: Path, rank: int) -> None:
    """Of a run that has failed, until its process is gone."""
    until = time.monotonic() + _LAST_WORDS_S
    while os.getppid() == rank and not _last_words(_log(folder)) and time.monotonic() < until:
        time.sleep(0.1)


def main() -> None:
    lines = FileIO(0)  # what a buffer reads ahead would be hidden from select
    begun = json.loads(lines.readline())
    folder, end = Path(begun["run"]["run"]), ended(lines, begun["pid"])
    if end is not None and end["outcome"] not in FINISHED:
        _await_last_words(folder, begun["pid"])
    # one that was ended while it drew figures, after a stop, left only its last words
    stopped = end["outcome"] == "stopped" if end else _last_words(_log(folder)).startswith(SAVED)
    if not stopped:
        print(post(begun["url"], message(begun["run"], end)), end="")


if __name__ == "__main__":
    main()
