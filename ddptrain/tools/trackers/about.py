"""What a tracker is told of a run, and what is kept of it in the run's folder: ``trackers/``."""

import fcntl
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.keys import flat_values
from ddptrain.observe.lock import lock_file
from ddptrain.observe.plain_files import is_plain_file, plain_files
from ddptrain.observe.summary_file import current_summary
from ddptrain.text import json_object, parse_yaml, replace_file

_HOME = "trackers"
_OF_A_SWEEP = "ledger.jsonl"
"""In the folder above a job's."""
_DOCUMENTS = ("config.yaml", "command.txt", "environment.json", "changes.jsonl", "summary.json")


@dataclass(frozen=True, slots=True)
class About:
    """A run as a tracker sees it. id: the same in every tracker and after every restart."""

    id: str
    name: str
    folder: Path
    project: str
    checkpoints: str
    sweep: "About | None"
    """The parent, of a sweep's job."""

    @property
    def config(self) -> dict[str, Any]:
        """By dotted key."""
        path = self.folder / "config.yaml"
        return flat_values(parse_yaml(path.read_text())) if is_plain_file(path) else {}

    @property
    def command(self) -> str:
        path = self.folder / "command.txt"
        return path.read_text("utf-8").strip() if is_plain_file(path) else ""

    @property
    def outcome(self) -> str:
        """Of the run's last process; '' if that has not ended by itself."""
        summary, times = (json_object(self.folder / name) for name in ("summary.json", "times.json"))
        return str(current_summary(summary, times).get("outcome", ""))

    @property
    def home(self) -> Path:
        return self.folder / _HOME

    def documents(self) -> list[Path]:
        """The files that describe the run, as far as they are there. Links are not followed."""
        return [path for name in _DOCUMENTS if is_plain_file(path := self.folder / name)]

    def plots(self) -> list[Path]:
        """The newest pictures and texts, but for links."""
        return [path for path in plain_files(self.folder / "plots", "*.*") if path.suffix in (".png", ".txt")]

    def checkpoint(self) -> Path | None:
        """The one that is to be sent; none that is, or holds, a link."""
        saved = self.folder / "checkpoints"
        steps = [path for path in saved.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
        last = max(steps, key=lambda path: int(path.name.removeprefix("step-")), default=None)
        best = saved / "best" if (saved / "best").is_dir() else None
        chosen = {"best": best, "last": last}.get(self.checkpoints)
        if chosen is None or any(path.is_symlink() for path in (saved, chosen, *chosen.rglob("*"))):
            return None
        return chosen


def about(folder: Path, to: str, project: str | None = None) -> About:
    """Of a run's folder. project: another than the run's own options say."""
    options = json_object(folder / _HOME / f"{to}.json")
    recipe = str(parse_yaml((folder / "config.yaml").read_text()).get("recipe", "ddptrain"))
    above = folder.resolve().parent
    project = project or options.get("project") or recipe
    sweep = None
    if (above / _OF_A_SWEEP).exists():
        sweep = About(_id_of(above), above.name, above, project, "none", None)
    return About(
        _id_of(folder), folder.resolve().name, folder, project, options.get("checkpoints", "none"), sweep
    )


def write_options(folder: Path, to: str, options: Mapping[str, Any]) -> None:
    """Keep a tracker's options with the run."""
    _write(folder / _HOME / f"{to}.json", options)


def sent_so_far(run: About, to: str) -> dict[str, int]:
    """The last step that was sent to the run's project, by split."""
    return dict(json_object(run.home / f"{to}.sent.json").get(run.project, {}))


def write_sent(run: About, to: str, sent: Mapping[str, int]) -> None:
    """By the one process that sends this run to this tracker."""
    path = run.home / f"{to}.sent.json"
    _write(path, {**json_object(path), run.project: sent})


def _id_of(folder: Path) -> str:
    """Made once. Several jobs of a sweep may ask for their sweep's at the same time."""
    path = folder / _HOME / "run.json"
    path.parent.mkdir(exist_ok=True)
    with (path.parent / "run.lock").open("a") as lock:  # what a link leads to stays as it is
        lock_file(lock, fcntl.LOCK_EX)
        if "id" not in json_object(path):
            _write(path, {"id": uuid.uuid4().hex[:16]})
    return str(json_object(path)["id"])


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    replace_file(path, json.dumps(values) + "\n")
