"""What somebody can take away under a living run: its folder, its files, its data, its disk, its clock.

Either the run goes on, and what it leaves is what an undisturbed run leaves; or it ends with one message that
names what was lost, with its state kept.
"""

import ctypes
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from compare import assert_same
from PIL import Image
from running import Job, assert_same_outcome, faulty_words

from ddptrain.distributed.launcher.process import end_with
from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.observe.metrics_file import read_lines
from ddptrain.verbs.main import main

FORK = multiprocessing.get_context("fork")
WORDS = faulty_words("device=cpu", "log.every=1", "train.steps=60", "data.pace=0.02")
FILES = ["config.yaml", "command.txt", "environment.json", "metrics.jsonl", "log.txt", "times.json"]


DELETED = r"run.dir=run: (its lock file \(\.lock\) was deleted, so .*|was deleted), under the run that"
"""The first where the run has met the folder half deleted."""


def remove(folder: Path) -> None:
    """As `rm -r`, which is called again where the run has put back a file meanwhile."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


class Living:
    """A command line in a forked process, which saves the seconds of its imports. inside: called there
    first."""

    def __init__(self, cwd: Path, words: list[str], inside: Callable[[], object] = lambda: None) -> None:
        self.output = cwd / f"output-{random.SystemRandom().randrange(10**9)}.txt"
        self.output.touch()
        self._process = FORK.Process(target=_run, args=(cwd, words, self.output, inside))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 90) -> None:
        until = time.monotonic() + timeout
        while text not in self.text:
            assert self._process.is_alive(), f"ended without {text!r}:\n{self.text[-3000:]}"
            assert time.monotonic() < until, f"no {text!r}:\n{self.text[-3000:]}"
            time.sleep(0.01)

    def ends(self, code: int, timeout: float = 90) -> None:
        self._process.join(timeout)
        assert self._process.exitcode == code, f"{self._process.exitcode}:\n{self.text[-3000:]}"
        assert "Traceback" not in self.text, self.text[-3000:]

    def message(self) -> str:
        """The one with which it has ended."""
        self.ends(2)
        told = re.split(r"^ddptrain: ", self.text, flags=re.MULTILINE)
        assert len(told) == 2, self.text
        return told[1]

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _run(cwd: Path, words: list[str], output: Path, inside: Callable[[], object]) -> None:
    os.setsid()
    os.chdir(cwd)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    sys.argv = ["ddptrain", *words]
    os.environ |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    torch.set_num_threads(1)
    inside()
    end_with(main, words)


Start = Callable[..., Living]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    living = []

    def one(words: list[str], inside: Callable[[], object] = lambda: None) -> Living:
        living.append(Living(tmp_path, words, inside))
        return living[-1]

    yield one
    for process in living:
        process.end()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to."""
    home = tmp_path_factory.mktemp("whole")
    Living(home, [*WORDS, "data.pace=0"]).ends(0)
    return home / "run"


def assert_whole(run: Path, expected: Path) -> None:
    """All files that the undisturbed run has, and the same state and metrics."""
    assert_same_outcome(expected, run)
    mine, theirs = (
        {str(path.relative_to(of)) for path in of.rglob("*") if path.is_file()} for of in (run, expected)
    )
    assert theirs - mine <= {"checkpoints/best/manifest.json", "checkpoints/best/state.pt"}, theirs - mine
    summary = json.loads((run / "summary.json").read_text())
    assert 0 < summary["seconds"] < 100


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "checkpoints" else pytest.mark.faults)
        for name in (*FILES, "checkpoints", "plots")
    ],
)
def test_a_file_is_deleted(tmp_path: Path, start: Start, whole: Path, name: str) -> None:
    """The run goes on, and puts it back, or writes it anew."""
    job, run = start(WORDS), tmp_path / "run"
    job.wait_for("step 16/")
    if name in ("checkpoints", "plots"):
        shutil.rmtree(run / name)
    else:
        (run / name).unlink(missing_ok=name == "times.json")
    job.ends(0)
    assert_whole(run, whole)
    log = (run / "log.txt").read_text()
    assert "device     cpu" in log
    assert all(f" step {step}/60" in log for step in range(1, 61))
    if name in ("config.yaml", "checkpoints"):
        assert f"run/{name} was deleted under the run" in job.text


def test_tensorboards_folder_is_deleted(tmp_path: Path, start: Start, whole: Path) -> None:
    """The library can't write again what it has written: it is switched off, and that is said once."""
    job = start([*WORDS, "observers=[jsonl,tensorboard,console]"])
    job.wait_for("step 16/")
    remove(tmp_path / "run/tensorboard")
    job.ends(0)
    assert_same_outcome(whole, tmp_path / "run")
    assert job.text.count("TensorBoard is switched off: [Errno 2] No such file or directory") == 1, job.text


@pytest.mark.faults
@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt"])
def test_a_file_is_replaced(tmp_path: Path, start: Start, whole: Path, name: str) -> None:
    """As by an editor, or by `sed -i`: it is another file of that name."""
    job, file = start(WORDS), tmp_path / "run" / name
    job.wait_for("step 16/")
    (tmp_path / "new").write_text("")
    (tmp_path / "new").replace(file)
    job.ends(0)
    assert_whole(tmp_path / "run", whole)
    assert all(f" step {step}/60" in (tmp_path / "run/log.txt").read_text() for step in range(1, 61))


def kept_in(tmp_path: Path, said: str) -> Path:
    """The checkpoint that the message names: whole, and in none of the run's folder."""
    found = re.search(r"The state at step (\d+) is kept in (\S+)/step-\d+\. ", said)
    assert found is not None, said
    [kept] = tmp_path.glob("run.lost-*")
    assert Path(found[2]) == kept
    state = read(kept / f"step-{found[1]}")
    assert state.manifest["step"] == int(found[1])
    assert f"run.dir=... run.resume={kept}/step-{found[1]}" in said
    return kept / f"step-{found[1]}"


@pytest.mark.parametrize("background", ["true", pytest.param("false", marks=pytest.mark.faults)])
def test_the_folder_is_deleted(tmp_path: Path, start: Start, whole: Path, background: str) -> None:
    words = [*WORDS, f"checkpoint.background={background}"]
    job = start(words)
    job.wait_for("step 16/")
    remove(tmp_path / "run")
    said = job.message()
    assert re.match(DELETED, said), said
    assert not (tmp_path / "run").exists()
    kept = kept_in(tmp_path, said)
    again = start([*words, "run.dir=again", f"run.resume={kept}", "data.pace=0"])
    again.ends(0)
    first = int(kept.name.removeprefix("step-"))
    state, expected = (read(of / "checkpoints/step-60") for of in (tmp_path / "again", whole))
    assert state.manifest["metrics"] == expected.manifest["metrics"]
    assert_same(unpack(expected), unpack(state))
    lines = [line for line in read_lines(whole / "metrics.jsonl") if line["step"] > first]
    mine = read_lines(tmp_path / "again/metrics.jsonl")
    assert [line for line in mine if line["step"] > first] == lines


@pytest.mark.faults
def test_the_folder_is_renamed(tmp_path: Path, start: Start, whole: Path) -> None:
    job = start(WORDS)
    job.wait_for("step 16/")
    (tmp_path / "run").rename(tmp_path / "moved")
    said = job.message()
    assert said.startswith(f"run.dir=run: is {tmp_path}/moved now, under the run")
    assert f"Go on there: run.dir={tmp_path}/moved" in said
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob("run.lost-*"))
    again = start([*WORDS, f"run.dir={tmp_path}/moved"])
    again.ends(0)
    assert "resumed " in again.text
    assert_whole(tmp_path / "moved", whole)


def test_the_folder_is_emptied(tmp_path: Path, start: Start) -> None:
    """Its lock file first: as long as that is there, a file that is deleted is put back."""
    job = start(WORDS)
    job.wait_for("step 16/")
    for path in sorted((tmp_path / "run").iterdir(), key=lambda path: path.name != ".lock"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    said = job.message()
    assert said.startswith("run.dir=run: its lock file (.lock) was deleted, so that another process may")
    kept_in(tmp_path, said)
    assert not list((tmp_path / "run").iterdir())


def test_the_lock_file_is_deleted(tmp_path: Path, start: Start, whole: Path) -> None:
    """Another process could have taken the folder since, so the run ends; nothing is missing in it."""
    job, run = start(WORDS), tmp_path / "run"
    job.wait_for("step 16/")
    (run / ".lock").unlink()
    said = job.message()
    assert said.startswith("run.dir=run: its lock file (.lock) was deleted, so that another process may")
    kept_in(tmp_path, said)
    again = start(WORDS)
    again.ends(0)
    assert "resumed    run/checkpoints/step-" in again.text
    assert_whole(run, whole)


@pytest.mark.faults
def test_another_process_starts_in_it(tmp_path: Path, start: Start, whole: Path) -> None:
    """Before the folder is deleted: it is refused. Afterwards: it begins anew, and the first one ends."""
    words = [*WORDS, "observers=[console,jsonl,plots,tensorboard]"]
    first = start(words)
    first.wait_for("step 3/")
    os.kill(first.pid, signal.SIGSTOP)
    second = start([*WORDS, "optim.lr=0.5"])
    said = second.message()
    assert f" {first.pid} on " in said
    assert "is training in it" in said
    remove(tmp_path / "run")
    third = start(words)
    third.wait_for("step 3/")
    os.kill(first.pid, signal.SIGCONT)
    said = first.message()
    assert "was replaced, under the run" in said
    kept_in(tmp_path, said)
    third.ends(0)
    assert "resumed" not in third.text
    assert_whole(tmp_path / "run", whole)
    writers = {file.name.split(".")[-2] for file in (tmp_path / "run/tensorboard").iterdir()}
    assert writers == {str(third.pid)}, "the first one's events are not among the third's"


@pytest.mark.faults
def test_another_process_takes_a_folder_without_its_lock_file(
    tmp_path: Path, start: Start, whole: Path
) -> None:
    first = start(WORDS)
    first.wait_for("step 16/")
    os.kill(first.pid, signal.SIGSTOP)
    (tmp_path / "run/.lock").unlink()
    second = start(WORDS)
    second.wait_for("resumed    run/checkpoints/step-")
    second.wait_for("\nstep ")
    os.kill(first.pid, signal.SIGCONT)
    said = first.message()
    assert said.startswith("run.dir=run: its lock file (.lock) was deleted, so that another process may")
    kept_in(tmp_path, said)
    second.ends(0)
    assert_whole(tmp_path / "run", whole)


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)


def alone() -> None:
    """What is mounted from here on is seen by this process and its children only."""
    assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
    mount("--make-rprivate", "/")


@pytest.fixture
def mounts() -> None:
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    if os.geteuid() != 0 or done.returncode:
        pytest.skip("NOT SEEN: a full and a read-only disk; this user may not mount a file system")


def inside(job: Living, *words: str) -> None:
    """Run a command where the job sees what is mounted."""
    subprocess.run(["nsenter", f"--mount=/proc/{job.pid}/ns/mnt", *words], check=True, capture_output=True)


@pytest.mark.faults
def test_writing_is_forbidden(tmp_path: Path, start: Start, whole: Path, mounts: None) -> None:
    job = start(WORDS, alone)
    job.wait_for("step 16/")
    inside(job, "mount", "-t", "tmpfs", "-o", "ro", "none", str(tmp_path / "run/checkpoints"))
    said = job.message()
    assert re.search(r"run/checkpoints/step-\d+: can't be saved \(Read-only file system\)", said), said
    again = start(WORDS)
    again.ends(0)
    assert "resumed    run/checkpoints/step-" in again.text
    assert_whole(tmp_path / "run", whole)


@pytest.mark.faults
def test_the_disk_is_full(tmp_path: Path, start: Start, whole: Path, mounts: None) -> None:
    """Once for a moment between two checkpoints, which does no harm; then for good."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def small() -> None:
        alone()
        mount("-t", "tmpfs", "-o", "size=4m", "none", str(disk))

    def fill() -> None:
        inside(job, "sh", "-c", f"cat /dev/zero > {disk}/filler 2>/dev/null; true")

    job = start([*WORDS, "run.dir=disk/run", "data.pace=0.08"], small)  # saves at 14, 21, 35; the best at 39
    job.wait_for("step 15/")
    fill()
    job.wait_for("step 17/")
    inside(job, "rm", f"{disk}/filler")
    job.wait_for("step 36/")
    os.kill(job.pid, signal.SIGSTOP)
    fill()
    copy = tmp_path / "copy"
    inside(job, "cp", "-r", f"{disk}/run", str(copy))  # what would be there after a kill
    os.kill(job.pid, signal.SIGCONT)
    said = job.message()
    assert re.search(r"checkpoints/(best|step-\d+): can't be saved \(No space left on device\)", said), said
    again = start([*WORDS, f"run.dir={copy}"])
    again.ends(0)
    assert "resumed    " in again.text
    assert_whole(copy, whole)


CLOCK = """
import os, time
_real, _name, _strftime = time.time, os.environ["SHIFTED_BY"], time.strftime
def shifted():
    try:
        return _real() + float(open(_name).read() or 0)
    except OSError:
        return _real()
time.time = shifted
time.time_ns = lambda: int(shifted() * 1e9)
"""


@pytest.mark.faults
@pytest.mark.parametrize("hours", [1, -1])
def test_the_clock_jumps(tmp_path: Path, whole: Path, hours: int) -> None:
    """No seconds, speeds or limits follow from the time of day."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(CLOCK)
    by = {"PYTHONPATH": str(tmp_path / "site"), "SHIFTED_BY": str(tmp_path / "shift")}
    words = [*WORDS, "hang_timeout=60", "train.time_limit=600", "observers=[console,jsonl,plots,tensorboard]"]
    job = Job(words, tmp_path, 1, launcher="python", variables=by)
    try:
        began = time.monotonic()
        assert job.wait_for_step(16)
        (tmp_path / "shift").write_text(str(3600 * hours))
        assert job.wait() == 0, job.text
        took = time.monotonic() - began
    finally:
        job.end()
    assert "Traceback" not in job.text
    assert_same_outcome(whole, tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert 0 < summary["seconds"] < took
    assert all(0 <= seconds < took for seconds in summary["time"].values()), summary["time"]
    etas = re.findall(r"ETA (\S+)", job.text)
    assert len(etas) == 60
    assert all(len(eta) <= 5 for eta in etas), "minutes and seconds"


def pictures(root: Path, count: int) -> Path:
    for part in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (24, 24), (i % 256, 200 * label, 90)).save(root / part / name / f"{i}.png")
    return root


FOLDER = (
    "recipe=cnn_cifar10 data=imagefolder data.source.size=24 data.augment.crop=2 data.resident=false"
    " data.workers=2 model.width=4 device=cpu train.batch_size=8 train.steps=100000 train.eval_every=100000"
    " checkpoint.every=null log.every=1 observers=[console,jsonl] run.dir=run"
)


@pytest.mark.faults
def test_the_data_sets_folder_is_deleted(tmp_path: Path) -> None:
    root = pictures(tmp_path / "set", 12)
    job = Job([*FOLDER.split(), f"data.root={root}"], tmp_path, 1, launcher="python")
    try:
        assert job.wait_for_step(5)
        shutil.rmtree(root)
        assert job.wait() == 2, job.text
    finally:
        job.end()
    assert "Traceback" not in job.text
    assert len(re.findall("^ddptrain: ", job.text, re.MULTILINE)) == 1
    assert re.search(rf"^ddptrain: {root}/train/\w+/\d+\.png: .*No such file or directory", job.text, re.M)
    assert not job.left_after(5)


@pytest.mark.faults
def test_the_cache_is_deleted_while_workers_start(tmp_path: Path) -> None:
    """Before a worker has opened it; one that has keeps the file, whose name alone is gone."""
    root = pictures(tmp_path / "set", 12)
    words = [*FOLDER.split(), f"data.root={root}", "data.source.cache=cache"]
    job = Job(words, tmp_path, 1, launcher="python")
    try:
        job.wait_for("plan       steps")  # workers are started next
        shutil.rmtree(tmp_path / "cache")
        assert job.wait() == 2, job.text
    finally:
        job.end()
    assert "Traceback" not in job.text, job.text
    told = re.findall("^ddptrain: (.*)", job.text, re.MULTILINE)
    assert len(told) == 1
    assert "cache/imagefolder-24-" in told[0]
    assert not job.left_after(5)


def test_on_two_ranks_one_message(tmp_path: Path) -> None:
    job = Job([*WORDS, "train.steps=100000"], tmp_path, 2)
    try:
        assert job.wait_for_step(10)
        remove(tmp_path / "run")
        assert job.wait() == 2, job.text
    finally:
        job.end()
    assert "Traceback" not in job.text, job.text
    assert len(re.findall(DELETED, job.text)) == 1, job.text
    kept_in(tmp_path, job.text)
    assert not job.left_after(5)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(12))
def test_anything_at_any_moment(tmp_path: Path, start: Start, whole: Path, seed: int) -> None:
    """One of these at a random moment, and again; in the end the run is whole, or its state was kept."""
    dice, run = random.Random(seed), tmp_path / "run"
    for _ in range(4):
        job = start([*WORDS, f"checkpoint.background={dice.choice(['true', 'false'])}"])
        job.wait_for("plan       steps")
        time.sleep(dice.uniform(0, 1.5))
        what = dice.choice([*FILES, "checkpoints", "plots", ".lock", "", "rename"])
        if what == "rename":
            run.rename(tmp_path / "moved")
        elif (path := run / what).is_dir():
            remove(path)
        else:
            path.unlink(missing_ok=True)
        job._process.join(90)
        code = job._process.exitcode
        assert code in (0, 2), job.text
        assert "Traceback" not in job.text, job.text
        if code == 0:
            break
        said = job.message()
        if what == "rename":
            (tmp_path / "moved").rename(run)
        elif "is kept in" in said:
            kept = kept_in(tmp_path, said).parent
            if not (run / "checkpoints").exists():
                run.mkdir(exist_ok=True)
                kept.rename(run / "checkpoints")
            else:
                shutil.rmtree(kept)
    last = start([*WORDS, "data.pace=0"])
    last.ends(0)
    found, expected = (unpack(read(of / "checkpoints/step-60")) for of in (run, whole))
    assert_same(expected, found)
