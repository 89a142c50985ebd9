"""Ranks that end where their threads are late."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shell import under_torchrun

SCRIPT = """
import os
from pathlib import Path
from ddptrain.api.world import World
from ddptrain.distributed import comm
rank = int(os.environ["RANK"])
world = comm.open_group(World(rank, 2, rank, 2))
for _ in range(2):  # gloo's threads have begun
    comm.from_all_ranks(world, rank)
for task in Path("/proc/self/task").iterdir():
    if (task / "comm").read_text() == "pt_gloo_runloop\\n":
        os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
comm.from_all_ranks(world, rank)
comm.close_group()
"""


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="of Linux")
def test_a_late_thread_of_gloo_ends_no_rank(tmp_path: Path) -> None:
    """Its threads run only where nothing else wants to, on a machine that is busy: without the wait 3 of 8
    jobs were aborted after their work was done."""
    (tmp_path / "script.py").write_text(SCRIPT)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        for _ in range(8):
            ended = under_torchrun(tmp_path, 2, "script.py")
            assert ended.code == 0, ended.err
    finally:
        for other in others:
            other.kill()
            other.wait()
