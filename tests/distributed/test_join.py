"""Ranks that start late, or never."""

import os
import subprocess
import sys
from pathlib import Path

from shell import RANK_VARIABLES

LATE = """
import datetime, os, sys, time
from ddptrain.distributed import comm
from ddptrain.verbs.main import main
comm._SAY_WHO_IS_MISSING = datetime.timedelta(seconds=0.5)
time.sleep(4 * (os.environ["RANK"] != "0"))
sys.exit(main(sys.argv[1:]))
"""


def test_the_first_rank_says_for_whom_it_waits(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    words = "recipe=cnn_digits device=cpu model.width=4 train.steps=2 run.dir=run"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"),
            *("late.py", *words.split()),
        ],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in RANK_VARIABLES},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("waiting ")]
    assert said[0] in (
        f"waiting    for {ranks} to start; a rank that was refused says why where it runs"
        for ranks in ("ranks 1, 2", "rank 1", "rank 2")
    )
    assert len(said) <= 3
