"""Sweeps on a real SLURM and a real Ray of two nodes on this machine: as on one, whatever becomes of the
controller."""

import contextlib
import getpass
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from debian import CannotRun
from ray_nodes import loopback_ray
from slurm import loopback_cluster
from sweeps import events, points, start, statuses, swept_words

from ddptrain.tools.sweep.ledger import read_ledger

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
FAILING, HANGING = (2, 6, 9), (4,)


@dataclass(frozen=True)
class Nodes:
    on: str
    variables: dict[str, str]


@pytest.fixture(scope="module", params=["slurm", "ray"])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    try:
        if request.param == "slurm":
            with loopback_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
                needed = ("SLURM_CONF", "LD_LIBRARY_PATH", "PATH")
                yield Nodes("slurm", {name: cluster.variables[name] for name in needed})
        else:
            with loopback_ray() as variables:
                yield Nodes("ray", variables)
    except CannotRun as why:
        pytest.skip(f"no {request.param} to test with: {why}")


def words_of(nodes: Nodes, *words: str) -> list[str]:
    return [*swept_words(*words), f"sweep.on={nodes.on}"]


def values(cwd: Path) -> dict[str, float]:
    names, ended = points(cwd), events(cwd, "ended")
    return {names[event["job"]]: event["value"] for event in ended if event["status"] == "done"}


def attempts_that_ran(cwd: Path) -> dict[int, list[dict[str, Any]]]:
    """What each job's nodes have written, attempt by attempt."""
    attempts: dict[int, list[dict[str, Any]]] = {}
    for path in sorted((cwd / "sweep").glob("*/attempts/*.json")):
        attempts.setdefault(int(path.parent.parent.name), []).append(json.loads(path.read_text()))
    return attempts


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """What the good points come to in a local sweep."""
    cwd = tmp_path_factory.mktemp("local")
    good = ",".join(str(point) for point in range(12) if point not in (*FAILING, *HANGING))
    assert start(cwd, [*swept_words(f"task.point={good}"), "sweep.gpus=[0,1]"]).wait() == 0
    return values(cwd)


@pytest.mark.parametrize("turn", range(10))
def test_twelve_jobs_whose_controller_is_killed(
    nodes: Nodes, turn: int, tmp_path: Path, local: dict[str, float]
) -> None:
    words = words_of(
        nodes, "task.point=range(12)", f"task.failing={list(FAILING)}", f"task.hanging={list(HANGING)}",
        "task.pace=0.04", "sweep.timeout=40", "checkpoint.grace=2",
    )  # fmt: skip
    dice = random.Random(turn)
    for _ in range(2):
        killed = start(tmp_path, words, nodes.variables)
        time.sleep(dice.uniform(2, 25))
        assert killed.process.poll() is None, killed.text
        killed.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait()
        time.sleep(dice.uniform(0, 5))
    last = start(tmp_path, words, nodes.variables)
    assert last.wait(600) == 1, last.text

    expected = {
        number: "failed" if number in FAILING else "timeout" if number in HANGING else "done"
        for number in range(12)
    }
    assert statuses(tmp_path) == expected, last.text
    done = [event["job"] for event in events(tmp_path, "ended") if event["status"] == "done"]
    assert len(done) == len(set(done)) == 8
    assert values(tmp_path) == local
    every = attempts_that_ran(tmp_path)
    assert every.keys() == expected.keys()
    for number, attempts in every.items():
        ran = sorted((facts["began"], facts["ended"]) for facts in attempts if "began" in facts)
        assert all(one[1] <= other[0] for one, other in pairwise(ran)), "two at a time"
        if expected[number] == "done":  # it ran on without its sweep, and was found
            assert len(ran) == 1


def test_what_ends_while_nobody_looks_is_counted(nodes: Nodes, tmp_path: Path) -> None:
    words = words_of(nodes, "task.point=0,1,2", "task.failing=[2]", "task.pace=0.05")
    first = start(tmp_path, words, nodes.variables)
    first.wait_for("on ", times=1)
    while len(attempts_that_ran(tmp_path)) < 2:
        time.sleep(0.2)
    first.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    assert {job.status for job in read_ledger(tmp_path / "sweep", live=False)} <= {"queued", "running"}
    until = time.monotonic() + 120
    while sum("code" in facts[-1] for facts in attempts_that_ran(tmp_path).values()) < 3:
        assert time.monotonic() < until
        time.sleep(0.5)
    second = start(tmp_path, words, nodes.variables)
    assert second.wait() == 1, second.text
    assert statuses(tmp_path) == {0: "done", 1: "done", 2: "failed"}
    assert len(events(tmp_path, "started")) == 3
    (why,) = [event["why"] for event in events(tmp_path, "ended") if event["job"] == 2]
    assert why == "ZeroDivisionError: this point was told to fail"


def test_a_stop_reaches_the_nodes_and_the_sweep_goes_on(nodes: Nodes, tmp_path: Path) -> None:
    words = words_of(nodes, "task.point=range(6)", "task.pace=0.2")
    first = start(tmp_path, words, nodes.variables)
    while not list((tmp_path / "sweep").glob("*/checkpoints/step-*")):
        assert first.process.poll() is None, first.text
        time.sleep(0.2)
    first.kill(first.process.pid, signal.SIGTERM)
    assert first.wait(90) == 75, first.text
    assert set(statuses(tmp_path).values()) == {"stopped"}
    second = start(tmp_path, [*words[:-2], "task.pace=0.2", words[-1]], nodes.variables)
    assert second.wait() == 0, second.text
    assert set(statuses(tmp_path).values()) == {"done"}
    assert any("resumed    " in path.read_text() for path in tmp_path.glob("sweep/*/output.txt"))


def test_pruning_reaches_rank_0_on_another_node(nodes: Nodes, tmp_path: Path) -> None:
    words = words_of(nodes, "task.point=range(6)", "task.best=2", "sweep.prune=asha", "sweep.gpus_per_job=2")
    job = start(tmp_path, words, nodes.variables)
    assert job.wait(400) == 0, job.text
    by_number = statuses(tmp_path)
    assert by_number[2] == "done"
    assert set(by_number.values()) == {"done", "pruned"}
    for event in events(tmp_path, "ended"):
        assert event["code"] == (0 if event["status"] == "done" else 75)


def test_an_attempt_that_is_lost_goes_on_elsewhere(nodes: Nodes, tmp_path: Path) -> None:
    """Its node's process is killed, without a word; the scheduler then knows nothing of it."""
    words = words_of(nodes, "task.point=0", "task.pace=0.5", "checkpoint.every=2")
    job = start(tmp_path, words, nodes.variables)
    while not list((tmp_path / "sweep/000").glob("checkpoints/step-*")):
        assert job.process.poll() is None, job.text
        time.sleep(0.2)
    (pid,) = node_jobs(tmp_path)
    os.kill(pid, signal.SIGKILL)
    assert job.wait() == 0, job.text
    assert [event["status"] for event in events(tmp_path, "ended")] == ["stopped", "done"]
    assert events(tmp_path, "ended")[0]["why"].startswith("interrupted (")
    assert "resumed    " in (tmp_path / "sweep/000/output.txt").read_text()


def test_a_job_goes_on_after_its_time_limit_and_not_after_scancel(nodes: Nodes, tmp_path: Path) -> None:
    """SLURM's limits are whole minutes; it asks two of them before."""
    if nodes.on != "slurm":
        pytest.skip("Ray has no time limits")
    words = words_of(
        nodes, "task.point=0", "task.pace=0.5", "train.epochs=200", "checkpoint.every=5", "sweep.time=3"
    )
    job = start(tmp_path, words, nodes.variables)
    while len(events(tmp_path, "began") if (tmp_path / "sweep/ledger.jsonl").exists() else []) < 2:
        assert job.process.poll() is None, job.text
        time.sleep(0.5)
    (ended,) = events(tmp_path, "ended")
    assert (ended["status"], ended["code"]) == ("stopped", 75)
    assert ended["why"].startswith("interrupted (")
    job.wait_for("interrupted")
    while "resumed    " not in (tmp_path / "sweep/000/output.txt").read_text():
        time.sleep(0.2)
    subprocess.run(
        ["scancel", "--user", getpass.getuser()], env={**os.environ, **nodes.variables}, check=True
    )
    assert job.wait(100) == 75, job.text
    assert statuses(tmp_path) == {0: "stopped"}
    assert len(events(tmp_path, "started")) == 2


def node_jobs(cwd: Path) -> list[int]:
    """Processes that run an attempt of this folder's sweep."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                b"ddptrain.tools.sweep.node_job" in (path / "cmdline").read_bytes()
                and (path / "cwd").readlink() == cwd
            ):
                pids.append(int(path.name))
    return pids
