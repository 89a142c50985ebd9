"""``bench``: real trainings in turns, and what it says of them."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from running import FAULTY

FAST = ["recipe=faulty", f"--config-dir={FAULTY}", "device=cpu", "rounds=3", "steps=5"]


def bench(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ddptrain", "bench", *words]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=240)


def test_an_override_that_helps_is_found_and_its_line_can_be_copied(tmp_path: Path) -> None:
    done = bench(tmp_path, *FAST, "data.pace=0.03", "try=data.pace=0;data.nonsense=1")
    assert done.returncode == 0, done.stderr
    assert "waiting for data" in done.stderr
    assert "data.nonsense=1  can't be had: data.nonsense: there is no such key." in done.stderr
    ratios = {name: float(ratio) for name, ratio in re.findall(r"(data\.pace=\S+)  x([\d.]+)", done.stderr)}
    assert ratios["data.pace=0"] < 0.5
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert rows == ["override", "as", "data.pace=0"]
    [last] = [line for line in done.stdout.splitlines() if "times as fast: python -m ddptrain" in line]
    words = shlex.split(last.partition("python -m ddptrain ")[2])
    assert words[-1] == "data.pace=0"
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_two_ranks_and_nothing_to_gain(tmp_path: Path) -> None:
    done = bench(tmp_path, *FAST, "ranks=2", "data.pace=0.03", "try=data.pace=0.06")
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"data\.pace=0\.06  x([\d.]+)", done.stderr)[0]) == pytest.approx(2, abs=0.3)
    assert "nothing tried is faster than it is: python -m ddptrain" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rounds=1"], "rounds=1: must be 3 or more."),
        (["steps=x"], "steps=x: must be a whole number"),
        (["stops=3"], "stops: bench takes no such word. Did you mean steps?"),
        (["run.dir=here"], "run.dir=here: bench decides that itself; leave it out."),
        (["optim.lrr=1"], "optim.lrr: there is no such key."),
        (["--multirun"], "bench: starts the trainings that it compares"),
    ],
)
def test_wrong_words_are_one_message(tmp_path: Path, words: list[str], said: str) -> None:
    done = bench(tmp_path, "recipe=cnn_digits", *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"ddptrain: {said}")
    assert not done.stdout


def test_a_training_that_does_not_start_is_told(tmp_path: Path) -> None:
    done = bench(tmp_path, "recipe=cnn_cifar10", "data.root=nowhere/at/all", "device=cuda:99", "try=")
    assert done.returncode == 1
    assert "bench: FAILED: device=cuda:99" in done.stdout
