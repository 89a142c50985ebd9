"""A job on GPUs goes wrong, over NCCL: it ends as over gloo, though no collective of NCCL's ever raises."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import Job, faulty_words, stopped_steps

pytestmark = pytest.mark.faults
RANKS = [2, 4]
PACE = ["device=cuda", "data.pace=0.02"]
ENDLESS = [*PACE, "train.steps=100000", "train.eval_every=100000", "log.every=2"]


@pytest.fixture(params=RANKS)
def ranks(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture
def gpus(ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs a command with a GPU for each rank."""
    monkeypatch.setenv("FAKE_GPU_WATCH", "0")  # this recipe's batches are copied in the step
    found = [sys.executable, str(Path(__file__).parent), f"--gpus={ranks}"]
    tried = subprocess.run([*found, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(tried.stderr)
    return found


@pytest.mark.parametrize("launcher", ["launch", "torchrun"])
def test_a_killed_rank(tmp_path: Path, gpus: list[str], ranks: int, launcher: str) -> None:
    job = Job(faulty_words(*ENDLESS), tmp_path, ranks, launcher=launcher, under=gpus)
    job.wait_for("step 2/")
    time.sleep(2.0)  # a rank hears of the others every second
    killed = ranks - 1
    pid = job.rank_pids()[killed]
    job.kill(pid)
    code = job.wait(120)
    said = rf"^ddptrain: rank (\d): another rank is gone: rank {killed} \(pid {pid} on \S+\)\.$"
    assert sorted(map(int, re.findall(said, job.text, re.MULTILINE))) == list(range(killed)), job.text[-3000:]
    assert "checkpoint.grace" not in job.text, "nobody has waited for the end of a collective"
    assert code == (137 if launcher == "launch" else 1)


DIES_IN_A_SAVE = """
import os, signal, sys, time
from ddptrain.engine import meter
from faulty import Faulty

class Dying(Faulty):
    def build(self):
        if os.environ["RANK"] == "1":
            meter.add_up = self._add_up
        return super().build()

    def _add_up(self, world, tensor, original=meter.add_up):
        if sys._getframe(1).f_code.co_name == "gather":
            time.sleep(1)  # the others do not wait before they write
            os.kill(os.getpid(), signal.SIGKILL)
        return original(world, tensor)
"""
"""A rank dies between two collectives of a save; the host goes on before the device has done the last one."""


def test_a_rank_killed_in_a_save(tmp_path: Path, gpus: list[str], ranks: int) -> None:
    """Rank 0 may end what it writes; but not wait for ever for what it would write."""
    (tmp_path / "own.py").write_text(DIES_IN_A_SAVE)
    words = faulty_words(*ENDLESS, "task._target_=own.Dying")
    job = Job(words, tmp_path, ranks, launcher="torchrun", under=gpus)
    assert job.wait(120) == 1
    gone = re.findall(r"^ddptrain: rank (\d): another rank is gone: rank 1 ", job.text, re.MULTILINE)
    assert sorted(map(int, gone)) == [rank for rank in range(ranks) if rank != 1], job.text[-3000:]
    assert "checkpoint.grace" not in job.text


def test_a_wish_to_stop(tmp_path: Path, gpus: list[str], ranks: int) -> None:
    job = Job(faulty_words(*ENDLESS), tmp_path, ranks, under=gpus)
    job.wait_for("step 2/")
    job.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(120) == 75, job.text[-3000:]
    saved = max(int(path.name.removeprefix("step-")) for path in tmp_path.glob("run/checkpoints/step-*"))
    assert stopped_steps(job.text) == [saved]


HANGS = ["data.fault=stop", "data.fault=sleep", "task.fault=loop", "task.fault=sleep task.place=backward"]


@pytest.mark.parametrize("fault", HANGS)
def test_a_hang(tmp_path: Path, gpus: list[str], ranks: int, fault: str) -> None:
    """The last is in one of autograd's own threads, in which the backward pass of a GPU runs."""
    section = fault.partition(".")[0]
    where = [*fault.split(), f"{section}.rank=1", f"{section}.step=12", "hang_timeout=4"]
    job = Job(faulty_words(*PACE, *where), tmp_path, ranks, under=gpus)
    assert job.wait(150) == 76, job.text[-3000:]
    assert re.findall(r"^rank (\d) (?:holds it up|\(pid)", job.text, re.MULTILINE) == ["1"], job.text[-3000:]
    assert "faulty.py" in job.text or fault == "data.fault=stop", "its stack"
    assert len(re.findall(r"^rank \d waits for it at step \d+, ", job.text, re.MULTILINE)) == ranks - 1
    who = "rank 1 (?:did not begin it|can't be asked)"
    collective = rf"^NCCL waits in all_?reduce of \S+ (?:MB|bytes), number \d+ of group .*: {who}\.$"
    assert len(re.findall(collective, job.text, re.MULTILINE)) == 1, job.text[-3000:]


@pytest.mark.parametrize("place", ["forward", "backward", "evaluate"])
def test_out_of_memory_on_one_rank(tmp_path: Path, gpus: list[str], ranks: int, place: str) -> None:
    fault = ["task.fault=memory", "task.rank=1", "task.step=12", f"task.place={place}", "task.once=false"]
    job = Job(faulty_words(*PACE, *fault), tmp_path, ranks, restarts=2, under=gpus)
    assert job.wait(120) == 2, job.text[-3000:]
    (said,) = [line for line in job.text.splitlines() if line.startswith("ddptrain: ")]
    doing = "evaluating a batch" if place == "evaluate" else place
    assert said.startswith(f"ddptrain: rank 1 at step 12, {doing}: CUDA out of memory. Tried to allocate ")
    half = "train.eval_batch_size=8" if place == "evaluate" else f"train.micro_batch={24 // ranks // 2}"
    assert f"{half} (now " in said
    assert "Traceback" not in job.text
    assert job.text.count("ddptrain launch: ") == 1, "no restart"


def test_out_of_memory_on_all_ranks_is_told_by_one(
    tmp_path: Path, gpus: list[str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_GPU_MEMORY", "20000000")
    words = ["recipe=cnn_cifar10", "data=shapes", "data.resident=true", "device=cuda", "run.dir=run"]
    job = Job(words, tmp_path, ranks, restarts=2, under=gpus)
    assert job.wait(120) == 2, job.text[-3000:]
    (said,) = [line for line in job.text.splitlines() if line.startswith("ddptrain: ")]
    assert "CUDA out of memory. Tried to allocate " in said
    assert said.endswith("data.resident=false.")
    assert "Traceback" not in job.text
