"""Ranks that end where their threads are late."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shell import in_new_process, under_torchrun

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


OBSERVER = """
import io
from pathlib import Path
from ddptrain.api.observer import Observer
FILE = Path("module.txt").open("w")
DETACHED = io.TextIOWrapper(io.BytesIO())
DETACHED.detach()
class Writes(Observer):
    def start(self, event):
        self.cycle = self
        self.file = Path("observer.txt").open("w")
    def log(self, event):
        for file in (FILE, self.file):
            file.write(f"{event.step} ")
        print("printed", event.step)
"""


@pytest.mark.parametrize("start", ["", "launch --nproc-per-node=2"])
def test_what_an_observer_has_not_flushed_is_written(tmp_path: Path, start: str) -> None:
    (tmp_path / "noting.py").write_text(OBSERVER)
    words = "recipe=cnn_digits device=cpu train.steps=3 log.every=1 observers=[] +observers.one._target_="
    ended = in_new_process(tmp_path, f"{start} {words}noting.Writes", PYTHONUNBUFFERED="")
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    assert [line for line in ended.out.splitlines() if "printed" in line] == [
        f"printed {i}" for i in (1, 2, 3)
    ]
    assert (tmp_path / "observer.txt").read_text() == "1 2 3 "
    assert (tmp_path / "module.txt").read_text() == "1 2 3 "
