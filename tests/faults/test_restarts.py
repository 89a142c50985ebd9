"""Restarts, exit codes and orphans, many times over: under plain torchrun, and under ``launch``."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import FAULTY, WITH_WORKERS, Job, Start, launch, start, torchrun

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]

ENDLESS = [*FAULTY, "train.steps=1000000", "checkpoint.every=1000000", "train.eval_every=1000000"]
TORN = """
import os
from pathlib import Path
from faulty import Faulty

class Torn(Faulty):
    def loss(self, model, batch, progress):
        if os.environ["RANK"] == "1" and progress.step == 9:
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text('{"mess')
            os._exit(1)
        return super().loss(model, batch, progress)
"""
KEEPS_KEYS = """
import os
from torch.distributed import rendezvous
store, _, _ = next(rendezvous("env://"))
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], store.check(["left"]), flush=True)
store.set("left", "by a dead rank")
raise SystemExit(1)
"""


@pytest.mark.parametrize(
    ("fault", "code", "restarts"),
    [
        ("raise", 1, 1),
        ("user_error", 2, 0),
        ("nan_loss", 4, 0),
        ("terminate", 75, 0),
        ("sleep", 76, 1),
        ("kill", 137, 1),
    ],
)
def test_what_launch_answers_and_what_it_restarts(
    tmp_path: Path, fault: str, code: int, restarts: int
) -> None:
    faults = [f"task.fault={fault}", "task.rank=1", "task.step=9", "task.once=false", "hang_timeout=5"]
    ended, said = launch(tmp_path, ["--nproc-per-node=2", "--max-restarts=1"], [*FAULTY, *faults]).wait()
    assert ended == code, said
    assert said.count(": restart 1 of 1") == restarts
    last = said.splitlines()[-1]
    assert "ChildFailedError" not in said
    assert not re.search(r"^[WE]\d{4} ", said, re.MULTILINE), "torchrun's own log"
    if code == 2:
        assert last.endswith("data/7.png: is no picture.")
    else:
        assert last.startswith("ddptrain launch: rank ")
        assert last.endswith(f"; {restarts} of 1 restarts used; exit code {code}")
    if code == 1:
        assert "(ZeroDivisionError: this recipe was told to fail)" in last


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_every_signal_that_stops_a_job_stops_it_with_a_checkpoint(tmp_path: Path, by: signal.Signals) -> None:
    job = launch(tmp_path, ["--nproc-per-node=2"], [*ENDLESS, "data.pace=0.01"])
    job.wait_for("step 10/")
    job.launcher.send_signal(by)
    code, said = job.wait()
    assert code == 75, said
    assert "stopped at step " in said


def test_an_exception_that_was_written_down_by_half_is_restarted_too(tmp_path: Path) -> None:
    """torchrun by itself ends with a JSONDecodeError of its own."""
    (tmp_path / "torn.py").write_text(TORN)
    options = ["--nproc-per-node=2", "--max-restarts=1"]
    code, said = launch(tmp_path, options, [*FAULTY, "task._target_=torn.Torn"]).wait()
    assert code == 1, said
    assert said.splitlines()[-1].endswith("rank 1 on " + os.uname().nodename + " ended with exit code 1;"
                                          " 1 of 1 restarts used; exit code 1")  # fmt: skip


@pytest.mark.parametrize("launcher", [torchrun, launch])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_restart_works(tmp_path: Path, launcher: Start, ranks: int) -> None:
    """20 kills, each of a random rank at a random moment of the training, at most five in a job."""
    draw = random.Random(ranks)
    for job_of_five in range(4):
        folder = tmp_path / str(job_of_five)
        folder.mkdir()
        job = launcher(folder, [f"--nproc-per-node={ranks}", "--max-restarts=5"], ENDLESS)
        for attempt in range(1, 7):
            _wait_for_attempt(job, attempt)
            time.sleep(draw.random())
            if attempt < 6:
                os.kill(draw.choice(job.ranks()), signal.SIGKILL)
        job.launcher.kill()
        assert not job.left_after(5.0)


def _wait_for_attempt(job: Job, attempt: int) -> None:
    """Until this attempt, the first being 1, has trained a few steps."""
    deadline = time.monotonic() + 120
    while True:
        lines = re.findall(r"^(plan|step )", job.log.read_text(), re.MULTILINE)
        begun = [i for i, line in enumerate(lines) if line == "plan"]
        if len(begun) >= attempt and "step " in lines[begun[attempt - 1] :]:
            assert len(begun) == attempt
            return
        assert time.monotonic() < deadline, job.log.read_text()
        assert job.launcher.poll() is None, job.log.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize("launcher", [torchrun, launch])
def test_nothing_outlives_an_agent_killed_at_any_moment(tmp_path: Path, launcher: Start) -> None:
    draw = random.Random(5)
    for trial in range(20):
        folder = tmp_path / str(trial)
        folder.mkdir()
        job = launcher(folder, ["--nproc-per-node=2"], WITH_WORKERS)
        time.sleep(draw.uniform(1, 20))
        os.kill(job.launcher.pid, signal.SIGKILL)
        job.launcher.wait()
        assert not job.left_after(10.0), f"{trial}: how soon an orphan ends is the machine's affair"


def test_two_nodes_go_on_after_a_killed_rank_and_end_together(tmp_path: Path) -> None:
    """Two agents on this machine stand for two nodes."""
    nodes = []
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d",
               "--rdzv-endpoint=127.0.0.1:29437", "--rdzv-id=two", "--rdzv-conf=last_call_timeout=2",
               ]  # fmt: skip
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shared = f"run.dir={tmp_path}/r"
        nodes.append(
            launch(tmp_path / name, meeting, [*FAULTY, shared, "train.steps=2000", "data.pace=0.01"])
        )
    deadline = time.monotonic() + 120
    while not any("step 10/" in node.log.read_text() for node in nodes):
        assert time.monotonic() < deadline, [node.log.read_text() for node in nodes]
        time.sleep(0.1)
    os.kill(nodes[1].ranks()[0], signal.SIGKILL)
    while not any("resumed " in node.log.read_text() for node in nodes):
        assert time.monotonic() < deadline, [node.log.read_text() for node in nodes]
        time.sleep(0.1)
    nodes[0].launcher.send_signal(signal.SIGTERM)
    assert [node.wait()[0] for node in nodes] == [75, 75]


def test_torch_still_keeps_its_store_over_restarts(tmp_path: Path) -> None:
    """When this fails, torch is mended: then `_store_of_this_attempt` in comm.py can go."""
    (tmp_path / "keeps.py").write_text(KEEPS_KEYS)
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1", "keeps.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.stdout.splitlines() == ["attempt 0 False", "attempt 1 True"], ended.stderr


def test_torchruns_parser_still_tells_which_options_take_a_value(tmp_path: Path) -> None:
    """`launch` reads it from argparse's own list of actions."""
    job = start(tmp_path, ["ddptrain", "launch", "--standalone", "--nproc_per_node", "1"], [*FAULTY])
    assert job.wait()[0] == 0
