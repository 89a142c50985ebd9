"""launch/local.sh: as many ranks as NPROC says, and launch's exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import FAULTY
from shell import RANK_VARIABLES

SCRIPT = Path(__file__).parents[2] / "launch/local.sh"


def local(cwd: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [SCRIPT, f"--config-dir={FAULTY}", "recipe=faulty", "device=cpu", "run.dir=run", *words],
        cwd=cwd, env={**inherited, "PATH": path, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.long
def test_nproc_says_how_many_ranks(tmp_path: Path) -> None:
    ended = local(tmp_path, "train.steps=5", NPROC="2")
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run/environment.json").read_text())["world_size"] == 2


def test_its_exit_code_is_that_of_launch(tmp_path: Path) -> None:
    ended = local(tmp_path, "train.stesp=5")
    assert ended.returncode == 2
    assert "Did you mean train.steps?" in ended.stderr
