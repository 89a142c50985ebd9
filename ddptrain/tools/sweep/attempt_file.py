"""What the sweep and a job's node tell each other, in the job's folder, which both see.

``attempts/<n>.json``: written by the node when the attempt begins (the node's name, the time, where in the
output it begins), and again with the exit code. Whoever writes it first has the attempt: one that the sweep
has given up does not begin any more. ``attempts/<n>.stop``: written by the sweep; why the job shall save and
stop, and within how many seconds.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddptrain.text import json_object, replace_file


class AttemptFile:
    """Of one attempt."""

    def __init__(self, folder: Path, number: int) -> None:
        """folder: the job's."""
        self._path = folder / "attempts" / f"{number}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def log(self) -> Path:
        """For what a scheduler has to say."""
        return self._path.with_suffix(".log")

    def claim(self, facts: Mapping[str, Any]) -> bool:
        """Write it, unless it is there. Whole or not at all, over NFS too."""
        aside = self._path.with_name(f".{self._path.name}.{os.uname().nodename}.{os.getpid()}")
        aside.write_text(json.dumps(facts))
        try:
            os.link(aside, self._path)
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        return True

    def rewrite(self, facts: Mapping[str, Any]) -> None:
        replace_file(self._path, json.dumps(facts))

    def read(self) -> dict[str, Any]:
        """Empty where it is not there yet."""
        return json_object(self._path)

    def expect_request(self) -> None:
        """Make an empty one, unless there is one: over NFS, a file that was missing is seen a minute late."""
        with suppress(FileExistsError):
            self._path.with_suffix(".stop").touch(exist_ok=False)

    def ask_to_stop(self, why: str, grace: float) -> None:
        replace_file(self._path.with_suffix(".stop"), json.dumps({"why": why, "grace": grace}))

    def stop_request(self) -> dict[str, Any]:
        """Why, and its grace; empty where it is not asked to stop."""
        return json_object(self._path.with_suffix(".stop"))
