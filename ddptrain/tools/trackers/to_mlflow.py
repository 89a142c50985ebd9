"""MLflow (mlflow.org). The server is named by MLFLOW_TRACKING_URI."""

import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

# in this process only: a server that does not answer is asked again by the sender, not within a call
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from ddptrain.observe.lock import lock_file
from ddptrain.tools.trackers.about import About
from ddptrain.tools.trackers.service import Line, Service, values_of

_ID = "ddptrain.run"
"""The tag by which a run is found again."""
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 6000
"""In a request: MLflow's limits (https://mlflow.org/docs/latest/rest-api.html)."""
_STATUS = {"done": "FINISHED", "stopped early": "FINISHED", "stopped": "KILLED", "": "KILLED"}


@final
class ToMlflow(Service):
    def __init__(self, about: About) -> None:
        super().__init__(about)
        self._client = MlflowClient()
        self._experiment = self._experiment_of(about.project)
        parent = {}
        if about.sweep is not None:
            parent = {"mlflow.parentRunId": self._parent(about.sweep)}
        self._run = self._find_or_create_run(about, parent)
        self._client.update_run(self._run, status="RUNNING")
        self._send_config()
        steps = {}
        for split in ("train", "valid"):
            history = self._client.get_metric_history(self._run, f"{split}/epoch")
            if history:
                steps[split] = max(metric.step for metric in history)
        self.known = steps

    def log(self, lines: Sequence[Line]) -> None:
        now = int(time.time() * 1000)
        for batch in _batches(lines):
            metrics = [
                Metric(_allowed(name), value, now, line["step"])
                for line in batch
                for name, value in values_of(line).items()
            ]
            # a line of more than a request takes: last its beginning, whose epoch says that the line is there
            for first in reversed(range(0, len(metrics), _MOST_METRICS)):
                self._client.log_batch(self._run, metrics[first : first + _MOST_METRICS])

    def send_plots(self, plots: Sequence[Path]) -> None:
        for path in plots:
            self._client.log_artifact(self._run, str(path), "plots")

    def send_files(self, files: Sequence[Path], checkpoint: Path | None) -> None:
        for path in files:
            self._client.log_artifact(self._run, str(path))
        if checkpoint is not None:
            self._client.log_artifacts(self._run, str(checkpoint), f"checkpoints/{checkpoint.name}")

    def close(self, outcome: str) -> None:
        if self.about.sweep is not None:
            self._client.set_terminated(self._parent(self.about.sweep), "FINISHED")
        self._client.set_terminated(self._run, _STATUS.get(outcome, "FAILED"))

    def _experiment_of(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        if known is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another job of the sweep was first
                known = self._client.get_experiment_by_name(name)
                if known is None:
                    raise
        return str(known.experiment_id)

    def _parent(self, sweep: About) -> str:
        """Its jobs' processes ask at the same time."""
        with (sweep.home / "run.json").open() as lock:
            lock_file(lock, fcntl.LOCK_EX)
            return self._find_or_create_run(sweep, {})

    def _find_or_create_run(self, about: About, tags: Mapping[str, str]) -> str:
        runs = self._client.search_runs([self._experiment], f"tags.`{_ID}` = '{about.id}'", max_results=1)
        if runs:
            return str(runs[0].info.run_id)
        tags = {**tags, _ID: about.id, "ddptrain.command": about.command}
        run = self._client.create_run(self._experiment, tags=tags, run_name=about.name)
        return str(run.info.run_id)

    def _send_config(self) -> None:
        """A param can't be changed, so a resume with another value adds none; config.yaml has it."""
        known = self._client.get_run(self._run).data.params
        params = [
            Param(_allowed(key), str(value)[:_LONGEST_PARAM])
            for key, value in self.about.config.items()
            if _allowed(key) not in known
        ]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + _MOST_PARAMS])


def _batches(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """Whole lines, as many as a request takes: a request is stored whole or not at all."""
    batch: list[Line] = []
    size = 0
    for line in lines:
        if batch and size + len(line) > _MOST_METRICS:
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += len(line)
    if batch:
        yield batch


def _allowed(name: str) -> str:
    """A name as MLflow takes it: letters, digits and a few signs."""
    return re.sub(r"[^/\w.\- :]", "_", name)
