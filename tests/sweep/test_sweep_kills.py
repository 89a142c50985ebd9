"""Twelve jobs on four slots: three crash, one hangs, and the sweep itself is killed in the middle."""

import ast
import json
import random
import signal
import time
from pathlib import Path

import pytest
from sweeps import events, packed, points, start, statuses, swept_words

SLOTS, FAILING, HANGING = 4, (2, 6, 9), (4,)
WORDS = swept_words(
    "task.point=range(12)", f"task.failing={list(FAILING)}", f"task.hanging={list(HANGING)}",
    "task.pace=0.04", "sweep.timeout=30", "sweep.gpus=[0,1,2,3]",
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """What the points that end come to, by point."""
    cwd = tmp_path_factory.mktemp("undisturbed")
    good = ",".join(str(point) for point in range(12) if point not in (*FAILING, *HANGING))
    words = [word for word in WORDS if not word.startswith(("task.point=", "task.pace=", "sweep.timeout="))]
    assert start(cwd, [*words, f"task.point={good}"]).wait() == 0
    return values(cwd)


def values(cwd: Path) -> dict[str, float]:
    names, ended = points(cwd), events(cwd, "ended")
    return {names[event["job"]]: event["value"] for event in ended if event["status"] == "done"}


def one_round(cwd: Path, kill_after: float, undisturbed: dict[str, float]) -> None:
    began = [time.time()]
    first = start(cwd, WORDS)
    time.sleep(kill_after)
    assert first.process.poll() is None, first.text
    first.kill(first.process.pid, signal.SIGKILL)
    ended = [time.time()]
    until = time.monotonic() + 5
    while (left := first.pids()) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == [], "jobs outlive their sweep"

    began.append(time.time())
    second = start(cwd, WORDS)
    code = second.wait(150)
    ended.append(time.time())
    assert code == 1, second.text
    assert second.pids() == [], "jobs outlive their sweep"

    # every job ends once, in the right way, with the figures of an undisturbed sweep
    assert len(points(cwd)) == 12
    expected = {
        number: "failed" if number in FAILING else "timeout" if number in HANGING else "done"
        for number in range(12)
    }
    assert statuses(cwd) == expected
    done = [event["job"] for event in events(cwd, "ended") if event["status"] == "done"]
    assert len(done) == len(set(done)) == 8
    assert values(cwd) == undisturbed

    # and the slots are kept busy: 85 % of the ideal, start-up and the sweep's own end included
    ideal, taken = 0.0, 0.0
    for begin, end in zip(began, ended, strict=True):
        ideal += packed(attempts(cwd, begin, end), SLOTS)
        taken += end - begin
    print(f"killed after {kill_after:.1f} s: ideal {ideal:.1f} s, taken {taken:.1f} s, {ideal / taken:.3f}")
    assert ideal / taken >= 0.85


def attempts(cwd: Path, begin: float, end: float) -> list[float]:
    """How long each attempt of one sweep process ran, in the order of their starts."""
    running: dict[int, float] = {}
    lengths: dict[tuple[float, int], float] = {}
    for event in events(cwd):
        if not begin <= event["time"] <= end:
            continue
        if event["event"] == "started":
            running[event["job"]] = event["time"]
        if event["event"] == "ended":
            since = running.pop(event["job"])
            lengths[since, event["job"]] = event["time"] - since
    lengths |= {(since, job): end - since for job, since in running.items()}
    return [lengths[start] for start in sorted(lengths)]


@pytest.mark.faults
@pytest.mark.parametrize("turn", range(10))
def test_a_sweep_killed_at_any_moment_goes_on(
    turn: int, tmp_path: Path, undisturbed: dict[str, float]
) -> None:
    one_round(tmp_path, random.Random(turn).uniform(1, 14), undisturbed)


@pytest.mark.faults
def test_a_killed_sweep_leaves_nobody_and_goes_on(tmp_path: Path) -> None:
    """The short of it: two jobs on two slots, both in the middle."""
    words = swept_words("task.point=0,1", "task.pace=0.1", "sweep.gpus=[0,1]")
    first = start(tmp_path, words)
    while not all((tmp_path / f"sweep/00{n}/checkpoints/step-4").exists() for n in (0, 1)):
        assert first.process.poll() is None, first.text
        time.sleep(0.1)
    first.kill(first.process.pid, signal.SIGKILL)
    until = time.monotonic() + 5
    while (left := first.pids()) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == [], "jobs outlive their sweep"
    second = start(tmp_path, words)
    assert second.wait() == 0, second.text
    assert statuses(tmp_path) == {0: "done", 1: "done"}
    assert all("resumed    " in path.read_text() for path in tmp_path.glob("sweep/*/output.txt"))


@pytest.mark.long
def test_no_two_jobs_share_a_gpu(tmp_path: Path) -> None:
    """Two ranks a job, by UUIDs: each sees its own pair, in turn."""
    gpus = ["GPU-a1", "GPU-b2", "GPU-c3", "GPU-d4"]
    job = start(
        tmp_path,
        swept_words("task.point=range(3)", f"sweep.gpus=[{','.join(gpus)}]", "sweep.gpus_per_job=2"),
    )
    assert job.wait() == 0, job.text
    held: set[str] = set()
    took: dict[int, list[str]] = {}
    for event in events(tmp_path):
        if event["event"] == "started":
            took[event["job"]] = event["gpus"]
            assert len(event["gpus"]) == 2
            assert not held & set(event["gpus"])
            held |= set(event["gpus"])
        if event["event"] == "ended":
            held -= set(took[event["job"]])
    assert {tuple(sorted(pair)) for pair in took.values()} == {("GPU-a1", "GPU-b2"), ("GPU-c3", "GPU-d4")}
    for number in range(3):
        lines = [ast.literal_eval(path.read_text())[0] for path in (tmp_path / "seen").glob(f"{number}-*")]
        ranks = [line for line in lines if line["RANK"] is not None]
        assert sorted(line["RANK"] for line in ranks) == ["0", "1"]
        assert {line["CUDA_VISIBLE_DEVICES"] for line in lines} == {",".join(took[number])}
    written = [json.loads(path.read_text()) for path in tmp_path.glob("sweep/*/environment.json")]
    assert [environment["world_size"] for environment in written] == [2, 2, 2]


@pytest.mark.long
def test_jobs_that_share_a_gpu_are_spread_over_all(tmp_path: Path) -> None:
    """Five jobs, two on each of two GPUs at most, and none on one that is busier than the other."""
    words = swept_words("task.point=range(5)", "task.pace=0.05", "sweep.gpus=[0,1]", "sweep.jobs_per_gpu=2")
    job = start(tmp_path, words)
    assert job.wait() == 0, job.text
    held: dict[int, str] = {}
    most = 0
    for event in events(tmp_path):
        if event["event"] == "started":
            (held[event["job"]],) = event["gpus"]
        if event["event"] == "ended":
            del held[event["job"]]
        counts = [list(held.values()).count(gpu) for gpu in "01"]
        most = max(most, sum(counts))
        assert max(counts) <= 2
        if event["event"] == "started":
            assert counts["01".index(held[event["job"]])] - min(counts) <= 1
    assert most == 4
    for path in (tmp_path / "seen").iterdir():
        environment = ast.literal_eval(path.read_text())[0]
        assert environment["PYTORCH_ALLOC_CONF"] == "per_process_memory_fraction:0.4750"
