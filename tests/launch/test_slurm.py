"""launch/slurm.sbatch under a real SLURM with two virtual nodes: one run, requeued after 75 and only then."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from debian import CannotRun
from running import FAULTY, assert_same_outcome
from slurm import Cluster, Submitted, loopback_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
TWO_NODES = ["--nodes=2"]
DIGITS = ["recipe=cnn_digits", "device=cpu", "observers=[console,jsonl,plots]"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        with loopback_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
            yield cluster
    except CannotRun as why:
        pytest.skip(f"no SLURM to test with: {why}")


def faulty(
    cluster: Cluster, cwd: Path, *words: str, options: Sequence[str] = (), **variables: str
) -> Submitted:
    """The recipe of `faulty.py` on one rank a node."""
    arguments = [f"--config-dir={FAULTY}", "recipe=faulty", "device=cpu", *words]
    return cluster.submit(cwd, [*TWO_NODES, *options], arguments, NPROC_PER_NODE="1", **variables)


def test_two_nodes_of_two_ranks_train_one_run(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path, TWO_NODES, [*DIGITS, "train.epochs=2"], NPROC_PER_NODE="2")
    assert job.wait() == ("COMPLETED", 0), job.text
    [run] = tmp_path.glob("runs/*")
    assert run.name == f"slurm-{job.number}"
    environment = json.loads((run / "environment.json").read_text())
    assert (environment["world_size"], environment["nodes"]) == (4, 2)
    assert json.loads((run / "summary.json").read_text())["outcome"] == "done"


def test_a_requeued_job_ends_with_the_bits_of_one_that_was_not_stopped(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Rank 0 takes its time to end, as one that lets go of a GPU does: the other node is done before."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, time\nif os.environ.get('RANK') == '0': atexit.register(time.sleep, 4)\n"
    )
    words = ["train.steps=300", "data.pace=0.02", "train.eval_every=100", "checkpoint.every=50"]
    job = faulty(cluster, tmp_path, *words, "run.dir=stopped", PYTHONPATH=str(tmp_path))
    job.wait_for("step 60/300")
    cluster.call("scancel", "--full", "--signal=USR1", str(job.number))  # to the batch shell too
    assert job.wait() == ("COMPLETED", 0), job.text
    assert "stop       asked for by SIGUSR1" in job.text
    assert "slurm.sbatch: exit code 75" in job.text
    assert "resumed    stopped/checkpoints/step-" in job.text
    assert job.told()["Restarts"] == "1"

    undisturbed = faulty(cluster, tmp_path, *words, "run.dir=undisturbed")
    assert undisturbed.wait() == ("COMPLETED", 0), undisturbed.text
    assert undisturbed.told()["Restarts"] == "0"
    assert_same_outcome(tmp_path / "stopped", tmp_path / "undisturbed")


def test_the_time_limit_asks_for_a_stop_and_the_job_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM looks twice a minute whether less than the script's two minutes and one more are left."""
    words = ["train.steps=100000", "data.pace=0.05", "log.every=20"]
    job = faulty(cluster, tmp_path, *words, options=["--time=4"])
    job.wait_for("slurm.sbatch: exit code 75")
    job.wait_for("resumed    ")
    assert job.told()["Restarts"] == "1"
    cluster.call("scancel", str(job.number))
    assert job.wait()[0] == "CANCELLED"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["train.stesp=300"], 2, "Did you mean train.steps?"),
        (["task.fault=user_error", "task.rank=1", "task.step=9"], 2, "data/7.png: is no picture."),
        (["task.fault=raise", "task.rank=1", "task.step=9"], 1, "this recipe was told to fail"),
        (["task.fault=kill", "task.rank=0", "task.step=9"], 137, "was killed by SIGKILL"),
    ],
)  # fmt: skip
def test_what_going_on_can_not_mend_is_not_requeued(
    cluster: Cluster, tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    job = faulty(cluster, tmp_path, *words)
    assert job.wait() == ("FAILED", code), job.text
    assert said in job.text
    assert job.told()["Restarts"] == "0"


def test_a_cancelled_job_saves_and_stays_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    """Its ranks end with 75 too."""
    job = faulty(cluster, tmp_path, "train.steps=100000", "data.pace=0.02", "run.dir=run")
    job.wait_for("step 20/")
    cluster.call("scancel", str(job.number))
    assert job.wait()[0] == "CANCELLED"
    assert "and saved; start this again" in job.text
    assert job.told()["Restarts"] == "0"
