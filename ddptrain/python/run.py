"""``ddptrain.Run``: what a run's folder holds. Imports no torch."""

import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ddptrain.errors import UserError
from ddptrain.observe.lock import is_locked
from ddptrain.observe.metrics_file import POSITION, read_lines
from ddptrain.observe.summary_file import current_summary
from ddptrain.python.curves import MetricRows
from ddptrain.text import parse_json, parse_yaml

if TYPE_CHECKING:
    from torch import nn

    from ddptrain.recipes.given import Objects


@final
class Run:
    """A run as its folder tells of it now; made again, it tells of a run that has gone on.

    objects, options: what `ddptrain.fit` has trained here, and its ``--trust``, ``--config-dir``, ``--env``.
    Raises UserError where the folder is no run's, or a file in it is damaged.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        objects: "Objects | None" = None,
        options: Sequence[str] = (),
    ) -> None:
        self.objects = objects
        self.options = options
        self.folder = Path(folder).absolute()
        """Absolute, so that it is found from any current folder."""
        if not (self.folder / "config.yaml").is_file():
            inside = sorted(path.parent for path in self.folder.glob("*/config.yaml"))
            hint = f" Did you mean {inside[-1]}?" if inside else ""
            raise UserError(f"{self.folder}: is no run's folder; it holds no config.yaml.{hint}")
        self.config: Mapping[str, Any] = self._read("config.yaml")
        """All of it, nested: ``run.config["optim"]["lr"]``."""
        command = self.folder / "command.txt"
        self.command: str = command.read_text("utf-8").strip() if command.exists() else ""
        """The line that repeats the run in a shell."""
        self.curves = MetricRows(read_lines(self.folder / "metrics.jsonl"))
        """What was logged and evaluated, by rising step."""
        self.checkpoints: Mapping[str, Path] = _checkpoints(self.folder / "checkpoints")
        """By the name that `ddptrain.load` takes: the steps', oldest first, then ``best``."""
        summary = current_summary(self._read("summary.json"), self._read("times.json"))
        self.outcome: str = "running" if is_locked(self.folder) else summary.get("outcome", "killed")
        """``done``, ``stopped early``, ``stopped`` (it has saved, and goes on when it is started again),
        ``diverged``, ``failed``, ``killed`` (it ended without a word) or ``running``."""
        logged = self.curves[-1]["step"] if self.curves else 0
        self.step: int = max(logged, summary.get("step", 0))
        """The last one known of."""
        self.metrics: Mapping[str, float] = _last_evaluation(self.curves) or summary.get("metrics", {})
        """Of the last evaluation; empty where there was none."""
        self.best: Mapping[str, float] = {}
        """Metrics and ``step`` of ``checkpoints/best``; empty where there is none."""
        if manifest := self._read("checkpoints/best/manifest.json"):
            self.best = {"step": manifest["step"], **manifest["metrics"]}

    @cached_property
    def model(self) -> "nn.Module":
        """The trained model: ``ddptrain.load(run).module``, made at the first use."""
        from ddptrain.python.loaded import loaded

        return loaded(self.folder, self.options, "", "cpu", self.objects)[0]

    def __repr__(self) -> str:
        values = "".join(f"  {name} {v:.4f}" for name, v in self.metrics.items() if "/" not in name)
        return f"<Run {self.folder}: {self.outcome} at step {self.step}{values}>"

    def _read(self, name: str) -> Any:
        """A file of plain values; empty where there is none."""
        path = self.folder / name
        if not path.exists():
            return {}
        try:
            content = (parse_yaml if path.suffix == ".yaml" else parse_json)(path.read_text())
        except ValueError as error:
            raise UserError(f"{path}: is damaged ({error}).") from error
        if not isinstance(content, dict):
            raise UserError(f"{path}: is damaged: it must hold keys with values.")
        return content


def _checkpoints(folder: Path) -> dict[str, Path]:
    """Complete ones; others may be a copy of the user's, or be replaced at this moment."""
    complete = [path.parent for path in folder.glob("*/manifest.json")]
    steps = [path for path in complete if re.fullmatch(r"step-\d+", path.name)]
    steps.sort(key=lambda path: int(path.name.removeprefix("step-")))
    return {path.name: path for path in [*steps, *(path for path in complete if path.name == "best")]}


def _last_evaluation(rows: MetricRows) -> dict[str, float]:
    last = next((row for row in reversed(rows) if row["split"] == "valid"), {})
    return {name: v for name, v in last.items() if name not in POSITION}
