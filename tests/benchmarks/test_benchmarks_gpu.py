"""The hour on a GPU, on one that is not there: what it notes, what it takes up again and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FAKE = [sys.executable, str(ROOT / "tests" / "fake_gpu")]


def hour(
    out: Path, *words: str, gpu: bool = False
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """What it said, and its results so far."""
    line = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), f"--out={out}", *words]
    none = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*FAKE, *line] if gpu else line,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **none},
    )
    file = out / "results.json"
    return done, json.loads(file.read_text())["parts"] if file.exists() else {}


def test_a_machine_without_a_gpu_is_a_failure_that_is_noted(tmp_path: Path) -> None:
    done, parts = hour(tmp_path, "--small", "--only=dp")
    assert done.returncode == 1, done.stderr
    assert parts["machine"]["verdict"] == "failed"
    assert "torch.cuda.is_available() is false" in parts["machine"]["said"]
    assert parts["dp"]["said"] == "needs 2 GPUs, and there are 0"
    assert "| Two GPUs" not in (tmp_path / "report.md").read_text(), "it was not asked for"
    done, again = hour(tmp_path, "--small", "--only=dp")
    assert again["machine"]["date"] == parts["machine"]["date"], "what is done is not done again"


def test_results_of_another_kind_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"small": true, "parts": {}}')
    done, _ = hour(tmp_path)
    assert done.returncode == 1
    assert "was begun with small=True" in done.stderr


def test_a_part_is_ended_at_its_limit_with_all_it_has_started(tmp_path: Path) -> None:
    done, parts = hour(tmp_path, "--small", "--only=machine", "--patience=0.004")
    assert done.returncode == 1, done.stderr
    assert parts["machine"]["said"] == "ended by its limit of 1 s"
    assert 1 < parts["machine"]["seconds"] < 60
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if str(tmp_path) in where(pid)]


def where(process: Path) -> str:
    try:
        return os.readlink(process / "cwd")
    except OSError:  # it has ended, or is another user's
        return ""


def test_what_the_budget_has_no_time_for_is_left_to_the_next_start(tmp_path: Path) -> None:
    _, parts = hour(tmp_path, "--only=cnn", "--budget=0")
    assert parts["cnn"]["verdict"] == "not started"
    assert parts["machine"]["said"] == "the budget ends in 0 s; it takes some 60"
    _, parts = hour(tmp_path, "--only=machine")
    assert parts["machine"]["verdict"] == "failed", "there is no GPU, but it was asked"


@pytest.mark.parametrize("words", ["--only=cnm", "--again=cnm"])
def test_a_misspelt_part_is_refused(tmp_path: Path, words: str) -> None:
    done, _ = hour(tmp_path, words)
    assert done.returncode == 2
    assert "cnm is none of machine, doctor" in done.stderr


@pytest.mark.long
def test_parts_on_a_simulated_gpu(tmp_path: Path) -> None:
    done, parts = hour(
        tmp_path, "--small", "--only=cnn,graphs-text,dp", f"--write={page(tmp_path)}", gpu=True
    )
    if done.stderr.startswith("the fake GPU needs"):
        pytest.skip(done.stderr.strip())
    verdicts = {name: part["verdict"] for name, part in parts.items()}
    expected = {
        "machine": "passed",
        "cnn": "passed",
        "graphs-text": "not on this device",
        "dp": "not started",
    }
    assert verdicts == expected, parts
    assert "compiles" in parts["machine"]["figures"]["lacks"]
    assert parts["cnn"]["commands"][0].startswith("python -m ddptrain recipe=cnn_cifar10")
    assert parts["cnn"]["figures"]["speed"]["samples_per_s"] > 0
    report = (tmp_path / "report.md").read_text()
    assert "**A simulated device: no time here says anything.**" in report
    assert "| A CNN on drawn shapes | passed |" in report
    assert (tmp_path / "time.png").stat().st_size > 1000
    assert "--write: these results say nothing of a GPU" in done.stderr
    assert "unwritten" in (tmp_path / "page.md").read_text()


def page(folder: Path) -> Path:
    file = folder / "page.md"
    file.write_text("<!-- gpu:begin -->\nunwritten\n<!-- gpu:end -->\n")
    return file
