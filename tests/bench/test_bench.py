"""``bench``: real trainings in turns, and what it says of them."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import FAULTY

pytestmark = pytest.mark.serial
FAST = ["recipe=faulty", f"--config-dir={FAULTY}", "device=cpu", "rounds=3", "steps=5"]


def bench(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ddptrain", "bench", *words]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=240)


def test_an_override_that_helps_is_found_and_its_line_can_be_copied(tmp_path: Path) -> None:
    done = bench(tmp_path, *FAST, "data.pace=0.06", "try=data.pace=0;data.nonsense=1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"as it is +[\d.]+ ms a step on cpu: data [5-9]\d%", done.stderr)
    assert "data.nonsense=1  can't be had: data.nonsense: there is no such key." in done.stderr
    ratios = {name: float(ratio) for name, ratio in re.findall(r"(data\.pace=\S+)  x([\d.]+)", done.stderr)}
    assert ratios["data.pace=0"] < 0.5
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert rows == ["override", "as", "data.pace=0"]
    assert re.search(r"noise +against itself x1\.|noise +against itself x0\.", done.stderr)
    [last] = [line for line in done.stdout.splitlines() if "times as fast: python -m ddptrain" in line]
    words = shlex.split(last.partition("python -m ddptrain ")[2])
    assert words[-1] == "data.pace=0"
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_what_thaws_later_is_trained_in_all_steps(tmp_path: Path) -> None:
    """Of a run that is frozen for a fifth: the other steps are most of it."""
    done = bench(tmp_path, *FAST, "freeze=[0.*,4.*]", "thaw=0.2", "try=freeze=[]")
    assert done.returncode == 0, done.stderr
    assert "what thaw= trains later is trained in all steps of this bench" in done.stderr
    assert "freeze=[]  x" in done.stderr
    [last] = [line for line in done.stdout.splitlines() if ": python -m ddptrain" in line]
    assert "thaw=0.2" in last


@pytest.mark.long
def test_two_ranks_and_nothing_to_gain(tmp_path: Path) -> None:
    done = bench(tmp_path, *FAST, "ranks=2", "data.pace=0.03", "try=data.pace=0.06")
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"data\.pace=0\.06  x([\d.]+)", done.stderr)[0]) == pytest.approx(2, abs=0.3)
    assert "nothing tried is faster than it is: python -m ddptrain" in done.stdout


def test_between_laps_each_rank_waits_to_be_told(tmp_path: Path) -> None:
    """And not in a collective with the one that is: on a GPU that would take its share of it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as turns:
        turns.bind(str(tmp_path / "turns"))
        turns.listen()
        turns.settimeout(60)
        words = [
            "recipe=faulty",
            f"--config-dir={FAULTY}",
            "device=cpu",
            "log.every=5",
            "observers=[console,jsonl,plots]",
        ]
        words.append(
            f"+controllers.pacing={{_target_:ddptrain.tools.bench.pacing.Pacing,address:'{tmp_path}/turns'}}"
        )
        line = [sys.executable, "-m", "ddptrain", "launch", "--nproc-per-node=2", *words, "train.steps=15"]
        with subprocess.Popen(line, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
            try:
                ranks = [turns.accept()[0] for _ in range(2)]
                for _ in range(3):
                    said = [json.loads(rank.recv(65536)) for rank in ranks]
                    assert sorted(lap["rank"] for lap in said) == [0, 1]
                    for rank in ranks:
                        rank.sendall(b"g")
                assert process.wait(60) == 0
            finally:
                process.kill()


def test_a_training_that_does_not_start_is_told(tmp_path: Path) -> None:
    done = bench(tmp_path, "recipe=cnn_digits", "device=cuda:99", "try=")
    assert done.returncode == 2
    assert "bench: FAILED: device=cuda:99" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_bench_that_is_ended_early(tmp_path: Path, number: int) -> None:
    """While its trainings are still starting."""
    line = [sys.executable, "-m", "ddptrain", "bench", *FAST, "try="]
    mark = {**os.environ, "DDPTRAIN_TEST_BENCH": str(tmp_path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(line, cwd=tmp_path, env=mark, stderr=subprocess.DEVNULL) as process:
        while not list(tmp_path.glob("ddptrain-bench-*/1/said.txt")):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(number)
    deadline = time.monotonic() + 60
    while left := [pid for pid in os.listdir("/proc") if pid.isdigit() and _belongs(pid, str(tmp_path))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert number == signal.SIGKILL or not list(tmp_path.glob("ddptrain-bench-*"))


def _belongs(pid: str, mark: str) -> bool:
    try:
        return f"DDPTRAIN_TEST_BENCH={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
