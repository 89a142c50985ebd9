"""MLflow (a real server), W&B (offline) and Trackio hold what metrics.jsonl says: each point once, whatever
happens to the training or to the server. Needs the extra trackers: pytest -m trackers."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from faulty_proxy import FaultyProxy, Mode
from read_back import of_metrics_file, of_mlflow, of_trackio, of_wandb

for needed in ("mlflow.server", "wandb", "trackio"):
    pytest.importorskip(needed)
pytestmark = pytest.mark.trackers
ROOT = Path(__file__).parents[2]
WORDS = [
    "recipe=cnn_digits",
    "device=cpu",
    "train.eval_every=40",
    "log.every=10",
    "checkpoint.every=50",
    "checkpoint.keep=40",
]
STEPS = 1500


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a real MLflow server with SQLite behind it."""
    home = tmp_path_factory.mktemp("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{home}/mlflow.db",
         "--artifacts-destination", str(home / "artifacts"), "--port", str(port), "--workers", "1"],
        stdout=(home / "log.txt").open("w"), stderr=subprocess.STDOUT, start_new_session=True, cwd=home,
    )  # fmt: skip
    try:
        for _ in range(600):
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield port
    finally:
        os.killpg(started.pid, signal.SIGKILL)


class Training:
    """Command lines in a folder, with a tracker's environment."""

    def __init__(self, folder: Path, uri: str, project: str) -> None:
        self.folder, self.uri, self.project = folder, uri, project
        self.environment = {
            **os.environ, "MLFLOW_TRACKING_URI": uri, "WANDB_MODE": "offline",
            "TRACKIO_DIR": str(folder / "trackio"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip

    def start(self, run: str, *words: str, to: str = "mlflow") -> subprocess.Popen[str]:
        observers = [f"observers=[console,jsonl,plots{f',{to}' if to else ''}]"]
        observers += [f"observers.{to}.project={self.project}"] if to else []
        command = [sys.executable, "-m", "ddptrain", *words, *WORDS, *observers, f"run.dir={run}"]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def train(self, run: str, *words: str, to: str = "mlflow") -> str:
        """Returns what it has said."""
        said, _ = (process := self.start(run, *words, to=to)).communicate(timeout=200)
        assert process.returncode == 0, said
        return said

    def report(self, run: str, to: str, *more: str) -> str:
        words = ["report", f"run={run}", f"to={to}", *more]
        return subprocess.run(
            [sys.executable, "-m", "ddptrain", *words], cwd=self.folder, env=self.environment, check=True,
            capture_output=True, text=True, timeout=120,
        ).stdout  # fmt: skip


def check_mlflow(training: Training, server: int, run: str) -> None:
    points, found = of_mlflow(f"http://127.0.0.1:{server}", training.project, run)
    assert points == of_metrics_file(training.folder / run)
    assert found.info.status == "FINISHED"
    assert found.data.params["recipe"] == "cnn_digits"
    assert found.data.params["optim.lr"] == "0.003"
    assert "recipe=cnn_digits" in found.data.tags["ddptrain.command"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    return dict(torch.load(newest / "state.pt", weights_only=True)["model"])


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_undisturbed(tmp_path: Path, server: int) -> None:
    """The plots are there byte by byte, and the checkpoint that was asked for."""
    from mlflow.tracking import MlflowClient

    training = Training(tmp_path, f"http://127.0.0.1:{server}", "undisturbed")
    said = training.train("run", f"train.steps={STEPS}", "observers.mlflow.checkpoints=best")
    assert "mlflow     has all of run run in undisturbed" in said
    check_mlflow(training, server, "run")
    client = MlflowClient(training.uri)
    _, found = of_mlflow(training.uri, "undisturbed", "run")
    got = Path(client.download_artifacts(found.info.run_id, "", str(tmp_path)))
    plots = sorted(path.name for path in (tmp_path / "run/plots").iterdir())
    assert plots == sorted(path.name for path in (got / "plots").iterdir())
    for name in plots:
        assert (got / "plots" / name).read_bytes() == (tmp_path / "run/plots" / name).read_bytes()
    saved = tmp_path / "run/checkpoints/best/state.pt"
    assert (got / "checkpoints/best/state.pt").read_bytes() == saved.read_bytes()
    assert (got / "config.yaml").read_bytes() == (tmp_path / "run/config.yaml").read_bytes()
    training.train("without", f"train.steps={STEPS}", to="")
    assert_same_weights(tmp_path / "run", tmp_path / "without")
    for run in ("run", "without"):  # to another place, and of a run that had no tracker
        training.report(run, "mlflow", "project=elsewhere")
        points, _ = of_mlflow(training.uri, "elsewhere", run)
        assert points == of_metrics_file(tmp_path / run)


@pytest.mark.parametrize("to", ["mlflow", "wandb", "trackio"])
def test_killed_and_resumed_it_is_one_run_without_a_doubled_point(
    tmp_path: Path, server: int, to: str
) -> None:
    training = Training(tmp_path, f"http://127.0.0.1:{server}", f"killed-{to}")
    for saved in (250, 700):
        process = training.start("run", f"train.steps={STEPS}", to=to)
        while not list((tmp_path / "run/checkpoints").glob(f"step-{saved}")):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        time.sleep(0.3)  # so that there are points to take back
        process.kill()
        process.wait()
    training.train("run", f"train.steps={STEPS}", to=to)
    expected = of_metrics_file(tmp_path / "run")
    if to == "mlflow":
        check_mlflow(training, server, "run")
    elif to == "wandb":
        points, ids = of_wandb(tmp_path / "run")
        assert points == expected
        assert len(ids) == 1
    else:
        points, names = of_trackio(tmp_path / "trackio", training.project, "run")
        assert points == expected
        assert len(names) == 1


@pytest.mark.parametrize("mode", ["down", "answers 500", "hangs"])
@pytest.mark.parametrize("when", ["at first", "to the end"])
def test_a_server_on_a_bad_day_harms_nothing(tmp_path: Path, server: int, mode: Mode, when: str) -> None:
    proxy = FaultyProxy(server)
    project = f"{mode}-{when}".replace(" ", "-")
    training = Training(tmp_path, f"http://user:very-secret@127.0.0.1:{proxy.port}", project)
    proxy.mode = mode
    process = training.start("run", f"train.steps={STEPS}")
    if when == "at first":
        for _ in range(1500):  # the process that sends is the last to get a core
            if proxy.refused:
                break
            time.sleep(0.1)
        time.sleep(3)
        assert proxy.refused
        proxy.mode = "well"
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    if when == "to the end":
        assert "this sends it: python -m ddptrain report run=run to=mlflow" in said
        proxy.mode = "well"
        assert training.report("run", "mlflow") == f"mlflow: project {project}, run run\n"
        training.report("run", "mlflow")  # nothing is left to send
    else:
        assert "mlflow     has all of run run" in said
    check_mlflow(training, server, "run")
    training.train("without", f"train.steps={STEPS}", to="")
    assert_same_weights(tmp_path / "run", tmp_path / "without")
    assert "very-secret" not in said
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"very-secret" not in path.read_bytes(), path


def test_two_ranks_are_one_run(tmp_path: Path, server: int) -> None:
    training = Training(tmp_path, f"http://127.0.0.1:{server}", "two-ranks")
    said, _ = (
        process := training.start("run", "launch", "--nproc-per-node=2", "train.steps=80")
    ).communicate(timeout=200)
    assert process.returncode == 0, said
    check_mlflow(training, server, "run")


def test_a_sweep_is_a_parent_with_its_jobs_as_children(tmp_path: Path, server: int) -> None:
    from mlflow.tracking import MlflowClient

    training = Training(tmp_path, f"http://127.0.0.1:{server}", "swept")
    words = [
        "--multirun",
        "recipe=cnn_digits",
        "device=cpu",
        "optim.lr=0.001,0.002",
        "seed=1,2",
        "sweep.dir=sweep",
    ]
    words += [
        "train.steps=40",
        "observers=[jsonl,mlflow]",
        "observers.mlflow.project=swept",
        "sweep.dir=sweep",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "ddptrain", *words], cwd=tmp_path, env=training.environment,
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    client = MlflowClient(training.uri)
    experiment = client.get_experiment_by_name("swept")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert [run.info.run_name for run in parents] == ["sweep"]
    assert len(children) == 4
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parents[0].info.run_id}
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert len({(run.data.params["optim.lr"], run.data.params["seed"]) for run in children}) == 4
