"""Loader workers hear no signal that is for their rank, and end with it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import start

READER = """
import multiprocessing, os, signal, sys, time
import torch
from torch.utils.data import Dataset
from ddptrain.data.workers import read_by_workers

class Numbers(Dataset):
    def __getitems__(self, keys):
        time.sleep(0.05)
        return torch.tensor(keys)

if __name__ == "__main__":
    heard = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda number, _: heard.append(number))
    batches = read_by_workers(Numbers(), [[i] for i in range(40)], 2, torch.device("cpu"))
    read = [next(batches)]
    print("reading by", len(multiprocessing.active_children()), flush=True)
    if sys.argv[1] == "signals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            os.killpg(0, number)
        read += batches
        print(len(read), len(heard), flush=True)
    if sys.argv[1] == "crash":
        raise RuntimeError("left behind: a half-read iterator")
    if sys.argv[1] == "exit":
        sys.exit(2)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    path = tmp_path / "reader.py"
    path.write_text(READER)
    return path


def test_signals_to_the_process_group_leave_the_workers_reading(reader: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(reader), "signals"], capture_output=True, text=True, timeout=120,
        start_new_session=True,
    )  # fmt: skip
    assert ended.stdout == "reading by 2\n40 4\n", ended.stderr
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("how", "code"),
    [
        pytest.param("crash", 1, marks=pytest.mark.long),
        pytest.param("exit", 2, marks=pytest.mark.long),
        ("killed", -signal.SIGKILL),
    ],
)
def test_workers_end_with_their_rank_however_it_ends(reader: Path, how: str, code: int) -> None:
    """Left to DataLoader, a crash would wait for ever."""
    job = start(reader.parent, ["reader"], [how])
    job.wait_for("reading by 2")
    assert job.wait(30)[0] == code, job.log.read_text()
    assert not job.left_after(2.0)


LEAVING = """
import os, threading
from ddptrain.distributed.launcher.process import AGENT, leave

def after() -> None:
    threading.main_thread().join()  # it ends first where Python shuts down
    os._exit(6)

threading.Thread(target=after).start()
os.environ[AGENT] = str(os.getpid())
leave(75)
"""


def test_the_launcher_leaves_without_pythons_own_shutdown() -> None:
    """In which a thread of torchrun's may come back from the store, and then aborts the process."""
    assert subprocess.run([sys.executable, "-c", LEAVING]).returncode == 75
