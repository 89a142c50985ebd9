"""Weights & Biases (wandb.ai): WANDB_API_KEY, WANDB_MODE=offline and its other variables decide where to."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import wandb

from ddptrain.tools.trackers.about import About
from ddptrain.tools.trackers.service import Line, Service, values_of


@final
class ToWandb(Service):
    def __init__(self, about: About) -> None:
        super().__init__(about)
        try:
            self._run = _begun(about)
        except Exception:
            wandb.teardown()  # or every later attempt finds the run "in use"
            raise
        steps = {}
        for split in ("train", "valid"):
            # an own axis: W&B drops what comes for a step that is over, as a validation's values do
            self._run.define_metric(f"{split}/*", step_metric=f"{split}/step")
            if (step := self._run.summary.get(f"{split}/step")) is not None:
                steps[split] = int(step)
        self.known = None if self._run.offline else steps

    def log(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self._run.log({**values_of(line), f"{line['split']}/step": line["step"]})

    def send_plots(self, plots: Sequence[Path]) -> None:
        pictures = {f"plots/{path.stem}": wandb.Image(str(path)) for path in plots if path.suffix == ".png"}
        if pictures:
            self._run.log(pictures)

    def send_files(self, files: Sequence[Path], checkpoint: Path | None) -> None:
        # as an artifact: `Run.save` makes links, and W&B writes its own config.yaml through them
        described = wandb.Artifact(f"run-{self.about.id}", type="run")
        for path in (*files, *(path for path in self.about.plots() if path.suffix == ".txt")):
            described.add_file(str(path))
        self._run.log_artifact(described)
        if checkpoint is not None:
            artifact = wandb.Artifact(f"checkpoint-{self.about.id}", type="model")
            artifact.add_dir(str(checkpoint))
            self._run.log_artifact(artifact, aliases=[checkpoint.name])

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome in ("done", "stopped early") else 1)


def _begun(about: About) -> wandb.Run:
    about.home.mkdir(exist_ok=True)
    return wandb.init(
        project=about.project,
        id=about.id,
        name=about.name,
        group=about.sweep and f"{about.sweep.name}-{about.sweep.id}",
        config={**about.config, "command": about.command},
        dir=str(about.home),
        resume="allow",
        settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, init_timeout=20),
    )
