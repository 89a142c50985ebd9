"""What a tracker holds of a run, as ``{("train/loss", step): [values]}``, in the words of metrics.jsonl."""

import json
import os
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Points = dict[tuple[str, int], list[float]]

_BLOCK, _HEADER = 32768, 7
_READ_TRACKIO = """
import json, sys, trackio
project = sys.argv[1]
names = [run.name for run in trackio.Api().runs(project)]
print(json.dumps({name: trackio.SQLiteStorage.get_logs(project, name) for name in names}, default=str))
"""


def of_metrics_file(run: Path) -> Points:
    """What should be there: each point once."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        (f"{line['split']}/{name}", line["step"]): [value]
        for line in lines
        for name, value in line.items()
        if name not in ("split", "step") and value is not None
    }


def of_mlflow(uri: str, project: str, run: str) -> tuple[Points, Any]:
    """And the run itself; it has to be the only one of its name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(project)
    assert experiment is not None
    found = [one for one in client.search_runs([experiment.experiment_id]) if one.info.run_name == run]
    assert len(found) == 1, found
    points: Points = defaultdict(list)
    for key in found[0].data.metrics:
        for metric in client.get_metric_history(found[0].info.run_id, key):
            points[key, metric.step].append(metric.value)
    return dict(points), found[0]


def of_wandb(run: Path) -> tuple[Points, set[str]]:
    """Of all offline logs in the run's folder, and the ids under which they were written."""
    points: Points = defaultdict(list)
    ids = set()
    for log in sorted((run / "trackers").rglob("*.wandb")):
        for record in _records(log.read_bytes()):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            values = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
                for item in record.history.item
            }
            for split in ("train", "valid"):
                if f"{split}/step" in values:
                    for name, value in values.items():
                        if name.startswith(f"{split}/") and name != f"{split}/step":
                            points[name, values[f"{split}/step"]].append(value)
    return dict(points), ids


def of_trackio(home: Path, project: str, run: str) -> tuple[Points, list[str]]:
    """And the names of the project's runs. home: TRACKIO_DIR, which Trackio reads when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", _READ_TRACKIO, project], env={**os.environ, "TRACKIO_DIR": str(home)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    runs: dict[str, list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    (name,) = [name for name in runs if name.startswith(f"{run}-")]
    points: Points = defaultdict(list)
    for row in runs[name]:
        for key, value in row.items():
            if key.startswith(("train/", "valid/")):
                points[key, row["step"]].append(value)
    return dict(points), list(runs)


def _records(log: bytes) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format (github.com/google/leveldb, doc/log_format.md),
    after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole = _HEADER, b""
    while at + _HEADER <= len(log):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", log, at)
        if kind == 0:
            break
        whole += log[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""
