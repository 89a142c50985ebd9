"""``python -m ddptrain.observe.webhook_post``: tells a webhook of a run's end, whatever ends it.

Its stdin: a line of JSON for the run, and one when it ends by itself; then, or when the run's process is
gone, it posts. What went wrong is printed. Imports no torch.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddptrain.observe.clock import clock
from ddptrain.text import finite

_PAUSES_S = (0.0, 2.0, 8.0)
"""Before each try."""
_ANSWER_S = 10.0
_LOG_LINES = 10


def message(run: Mapping[str, Any], end: Mapping[str, Any] | None) -> dict[str, Any]:
    """The JSON. end: None where the process ended without a word."""
    folder = Path(run["run"])
    ended = {"outcome": "killed", "step": None, "metrics": {}, "best": {}, "seconds": None} | dict(end or {})
    what = f"{run['recipe']} on {run['host']} ({folder})"
    if end is None:
        text = f"{what} was killed, or ended because it hung: its terminal says which"
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
    error = ""
    for pause in _PAUSES_S:
        time.sleep(pause)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S):
                return ""
        except urllib.error.HTTPError as problem:
            error = f"{urlsplit(url).hostname} answers {problem.code} {problem.reason}"
            if problem.code < 500 and problem.code != 429:  # the same next time
                return error
        except OSError as problem:
            error = f"{urlsplit(url).hostname}: {getattr(problem, 'reason', problem)}"
    return error


def main() -> None:
    begun, *ended = [json.loads(line) for line in sys.stdin]
    end = ended[0] if ended else None
    if end is None or end["outcome"] != "stopped":
        print(post(begun["url"], message(begun["run"], end)), end="")


if __name__ == "__main__":
    main()
