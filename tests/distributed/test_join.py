"""What ranks tell each other when they start: that they are there, and where."""

from pathlib import Path

import pytest
from shell import under_torchrun

from ddptrain.distributed.cpu import bound_to

LATE = """
import datetime, os, sys, time
from ddptrain.distributed import comm
from ddptrain.verbs.main import main
comm._SAY_WHO_IS_MISSING = datetime.timedelta(seconds=0.5)
time.sleep(4 * (os.environ["RANK"] != "0"))
sys.exit(main(sys.argv[1:]))
"""


BOUND = """
import os, sys
from ddptrain.verbs.main import main
own = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {own[0] if os.environ["RANK"] == "0" else own[1]})
sys.exit(main(sys.argv[1:]))
"""


def started(folder: Path, script: str) -> str:
    """The log of three ranks that train by this script."""
    (folder / "script.py").write_text(script)
    words = "recipe=cnn_digits device=cpu model.width=4 train.steps=2 run.dir=run"
    ended = under_torchrun(folder, 3, f"script.py {words}")
    assert ended.code == 0, ended.err
    return ended.err


@pytest.mark.long
def test_the_first_rank_says_for_whom_it_waits(tmp_path: Path) -> None:
    said = [line for line in started(tmp_path, LATE).splitlines() if line.startswith("waiting ")]
    assert said[0] in (
        f"waiting    for {ranks} to start; a rank that was refused says why where it runs"
        for ranks in ("ranks 1, 2", "rank 1", "rank 2")
    )
    assert len(said) <= 3


@pytest.mark.long
@pytest.mark.skipif(bound_to().bit_count() < 2, reason="takes two cores")
def test_ranks_know_who_shares_their_cores(tmp_path: Path) -> None:
    assert "cores      3 ranks of 1 thread; rank 0 is bound to 1 core\n" in started(tmp_path, BOUND)
