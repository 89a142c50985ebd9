"""What the benchmarks answer to words they can't take, and to --help."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def start(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(BENCHMARKS / script), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=600)  # a hang; 25 s alone


@pytest.mark.long
@pytest.mark.parametrize("script", ["throughput.py", "guards.py", "startup.py", "ports.py", "lstm.py"])
def test_no_rounds_are_refused(script: str) -> None:
    done = start(script, "--rounds", "0")
    assert done.returncode == 2
    assert "--rounds: 0: must be 1 or more" in done.stderr
    assert not done.stdout


def test_everything_tells_what_it_does_and_starts_nothing() -> None:
    done = start("everything.py", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Every CPU table of docs/performance.md")


@pytest.mark.long
def test_strict_and_fast_take_turns() -> None:
    done = start(*["strict.py", "--rounds", "1", "--recipes", "cnn_cifar10"])
    assert done.returncode == 0, done.stderr
    for ranks in ("1 rank", "2 gloo ranks"):
        assert f"| a network of two convolutions, {ranks} | " in done.stdout


@pytest.mark.long
def test_runs_with_saves_and_without_take_turns() -> None:
    done = start(*["beside.py", "--cases", "saves", "--rounds", "1", "--blocks", "2", "--seconds", "0"])
    assert done.returncode == 0, done.stderr
    assert "| saves: in the background | " in done.stdout


@pytest.mark.timeout(600)  # beside other tests a trainer of two threads waits for the cores
@pytest.mark.parametrize(
    "words",
    [
        pytest.param("guards.py --rounds 1", marks=pytest.mark.long),
        pytest.param("lstm.py --rounds 1 --steps 2", marks=pytest.mark.long),
        pytest.param("detection.py --rounds 1 --steps 2", marks=pytest.mark.long),
    ],
)
def test_what_is_compared_trains_the_same(words: str) -> None:
    """Each ends with an error where its two sides take other steps or come to other losses."""
    done = start(*words.split())
    assert done.returncode == 0, done.stderr
    assert "1 round" in done.stdout
