"""Trackio (huggingface.co/docs/trackio): a local database, or a Space where TRACKIO_SPACE_ID names one."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import final

import trackio

from ddptrain.tools.trackers.about import About
from ddptrain.tools.trackers.service import Line, Service, values_of


@final
class ToTrackio(Service):
    def __init__(self, about: About) -> None:
        super().__init__(about)
        name = f"{about.name}-{about.id}"
        self._run = trackio.init(
            project=about.project,
            name=name,
            group=about.sweep and f"{about.sweep.name}-{about.sweep.id}",
            config={**{key: str(value) for key, value in about.config.items()}, "command": about.command},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.known = None if os.environ.get("TRACKIO_SPACE_ID") else _steps(about.project, name)

    def log(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self._run.log(values_of(line), step=line["step"])

    def send_plots(self, plots: Sequence[Path]) -> None:
        pictures = {f"plots/{path.stem}": trackio.Image(str(path)) for path in plots if path.suffix == ".png"}
        if pictures:
            self._run.log(pictures)

    def send_files(self, files: Sequence[Path], checkpoint: Path | None) -> None:
        for path in files:
            trackio.save(str(path), project=self.about.project)
        if checkpoint is not None:
            artifact = trackio.Artifact(f"checkpoint-{self.about.id}", type="model")
            artifact.add_dir(str(checkpoint))
            self._run.log_artifact(artifact)

    def close(self, outcome: str) -> None:
        self._run.finish()


def _steps(project: str, name: str) -> dict[str, int]:
    """The last step of a run in the local database, by split."""
    steps: dict[str, int] = {}
    for row in trackio.SQLiteStorage.get_logs(project, name):
        for split in ("train", "valid"):
            if f"{split}/epoch" in row:
                steps[split] = max(steps.get(split, 0), int(row["step"]))
    return steps
