"""Observers, controllers and strategies of one's own: the code of docs/, run from an empty folder."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
DIGITS = ["--config-dir=mine", "recipe=cnn_digits", "device=cpu", "model.width=8", "log.every=5"]


def written(folder: Path, page: str) -> list[str]:
    """The files that a page shows, below ``folder``."""
    found = re.findall(r"^`([\w/]+\.\w+)`:\n\n```\w+\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    for name, text in found:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return [name for name, _ in found]


def run(cwd: Path, *words: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    launcher = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks else []
    return subprocess.run(
        [sys.executable, *launcher, "-m", "ddptrain", *words],
        cwd=cwd, capture_output=True, text=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def evaluations(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == "valid"]


def test_an_observer(tmp_path: Path) -> None:
    assert len(written(tmp_path, "observers.md")) == 2
    words = [*DIGITS, "observers=[jsonl,sqlite]", "train.steps=12", "train.eval_every=4", "run.dir=run"]
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "run/evaluations.db") as db:
        rows = dict(db.execute("select step, value from evaluations where metric = 'accuracy'").fetchall())
    assert rows == {line["step"]: line["accuracy"] for line in evaluations(tmp_path / "run")}
    assert list(rows) == [4, 8, 12]
    done = run(tmp_path, *words, "observers.sqlite.fiel=x")
    assert done.returncode == 2
    assert "observers.sqlite.fiel" in done.stderr


@pytest.mark.long
def test_a_controller_stops_two_ranks_together_and_counts_on_after_a_resume(tmp_path: Path) -> None:
    """With a rate of nothing the metric never improves: the first evaluation is the best."""
    written(tmp_path, "controllers.md")
    words = [*DIGITS, "controllers=[early_stop]", "optim.lr=1e-30", "train.steps=40", "train.eval_every=4"]
    words += ["checkpoint.every=2", "observers=[console,jsonl]"]
    done = run(tmp_path, *words, "run.dir=whole", ranks=2)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in evaluations(tmp_path / "whole")] == [4, 8, 12, 16]
    assert done.stderr.count("no improvement at step 16") == 1
    assert json.loads((tmp_path / "whole/summary.json").read_text())["outcome"] == "stopped early"
    first = run(tmp_path, *words, "train.time_limit=0.001", "run.dir=parts", ranks=2)
    for limit in range(2, 22):  # on a busy machine two seconds end in each start's first evaluation
        if first.returncode == 0:
            break
        assert "and saved; start this again" in first.stderr, first.stderr
        first = run(tmp_path, *words, f"train.time_limit={limit}", "run.dir=parts", ranks=2)
    assert [line["step"] for line in evaluations(tmp_path / "parts")] == [4, 8, 12, 16]
    again = run(tmp_path, *words, "run.dir=whole", ranks=2)
    assert again.returncode == 0
    assert [line["step"] for line in evaluations(tmp_path / "whole")] == [4, 8, 12, 16]


@pytest.mark.long
def test_a_strategy(tmp_path: Path) -> None:
    written(tmp_path, "strategies.md")
    words = [
        *DIGITS,
        "strategy=all_reduce",
        "train.steps=9",
        "checkpoint.every=3",
        "observers=[console,jsonl]",
    ]
    weights = {}
    for ranks in (2, 3):
        done = run(tmp_path, *words, f"run.dir=run{ranks}", ranks=ranks)
        assert done.returncode == 0, done.stderr
        assert f"one all-reduce over {ranks} ranks" in done.stderr
        weights[ranks] = [line["loss"] for line in evaluations(tmp_path / f"run{ranks}")]
    assert weights[2] == pytest.approx(weights[3], rel=1e-4)
    own = [word for word in words if not word.startswith(("train.", "checkpoint.", "log.", "observers"))]
    for proof in (["resume", "ranks=2", "kills=1"], ["world", "ranks=3", "train.steps=9"]):
        done = run(tmp_path, "prove", *proof, *own)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "HOLDS" in done.stdout or "EXPECTED" in done.stdout


@pytest.mark.long
def test_a_run_with_ones_own_doors_is_evaluated_without_them(tmp_path: Path) -> None:
    for page in ("observers.md", "controllers.md", "strategies.md"):
        written(tmp_path, page)
    words = [*DIGITS, "strategy=all_reduce", "observers=[jsonl,sqlite]", "controllers=[early_stop]"]
    done = run(tmp_path, *words, "train.steps=4", "run.dir=run")
    assert done.returncode == 0, done.stderr
    done = run(tmp_path, "evaluate", "run=run")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 4
