"""How a job asks its sweep whether to go on: two files in its folder, so that it may run on another node.

The job appends a line to ``pruning-requests.jsonl`` after each evaluation, the sweep one to
``pruning-answers.jsonl`` for each, in the same order. A sweep that was away for a while finds all requests of
that time.
"""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddptrain.observe.lock import unwritable
from ddptrain.text import parse_json, quoted

REQUESTS = "pruning-requests.jsonl"
ANSWERS = "pruning-answers.jsonl"


class PruningRequests:
    """The sweep's side, for one job."""

    def __init__(self, folder: Path) -> None:
        """folder: the job's, which is made. Raises UserError where that can't be written."""
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in (REQUESTS, ANSWERS):  # opening a file that is known brings what is new, over NFS too
                (folder / name).touch()
        except OSError as error:
            raise unwritable(folder, error, "sweep.dir") from error
        self._answered = len(read_from(folder / ANSWERS, 0))

    def controller(self, waits: bool, metrics: Iterable[str]) -> str:
        """The override that makes the job ask. waits: for the answers. metrics: that it has to have."""
        target = "_target_:ddptrain.tools.sweep.pruning.Pruning"
        folder, names = quoted(str(self._folder)), ",".join(map(quoted, metrics))
        own = f"folder:{folder},waits:{str(waits).lower()},metrics:[{names}]"
        return f"+controllers.pruning={{{target},{own}}}"

    def unanswered(self) -> list[dict[str, Any]]:
        return read_from(self._folder / REQUESTS, self._answered)

    def answer(self, goes_on: bool) -> None:
        """The first one that is not answered."""
        with suppress(FileNotFoundError):  # the folder was deleted: the job sees that too, and ends
            append(self._folder / ANSWERS, {"goes_on": goes_on})
        self._answered += 1


def append(path: Path, line: Mapping[str, Any]) -> int:
    """Add a line to a file that has one writer, in place of one that a kill has cut short. Returns how many
    were there."""
    with path.open("a+b") as file:
        file.seek(0)
        text = file.read()
        if not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)
        os.write(file.fileno(), (json.dumps(line) + "\n").encode())  # at once: a reader sees whole lines
        return text.count(b"\n")


def read_from(path: Path, number: int) -> list[dict[str, Any]]:
    """The lines from one on; none where there is no file. The last one may be on its way."""
    try:
        lines = path.read_text().split("\n")
    except FileNotFoundError:
        return []
    return [parse_json(line) for line in lines[number:-1]]
