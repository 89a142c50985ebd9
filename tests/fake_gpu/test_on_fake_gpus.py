"""The CUDA paths, run on GPUs that are not there (`python tests/fake_gpu`). Launches, waits, copies, streams
and collectives are torch's own, and CUDA graphs are captured and replayed; speed, cuDNN and Triton are not to
be had."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import libraries
import pytest
from running import FAULTY
from shell import RANK_VARIABLES

HERE = Path(__file__).parent
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
OTHERS = 42
"""Most launches a step that are not the task's loss or its backward pass: data, augmentation, health check,
optimizer, meter. The most is seen with fp16 and clipping together; six are clipping's norms, whose number is
torch's (two launches of a stack in 2.14.1)."""
AVERAGE = 4
"""More of them with averaged weights, which the detector's recipes have: three for each stretch of tensors,
of which torch takes some dozens at once, in place of one."""
MUON = 152
"""More of them with `muon_with_adamw`, the detector's: a copy into the padded tensor and one out of it for
each of its 63 filters, and 26 for their momentum, norms, two iterations and moves, counted in 2.14.1."""
MISTAKES = {
    "if rank == 1: dist.all_reduce(x)": "another rank does not come",
    "dist.all_reduce(x[: 3 - rank])": "all_reduce of",
    "dist.all_reduce(x) if rank else dist.broadcast(x, 0)": "but rank",
}
Done = subprocess.CompletedProcess[str]
pytestmark = [
    pytest.mark.skipif(libraries.why_not() != "", reason=libraries.why_not() or "it can be built"),
    pytest.mark.timeout(600),
]


def on_gpus(gpus: int, *words: str | Path, **settings: str) -> Done:
    """``python <words>`` on so many fake GPUs."""
    libraries.built()
    hidden = {*RANK_VARIABLES, "CUDA_VISIBLE_DEVICES"}
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [sys.executable, *map(str, words)], env={**inherited, **libraries.environment(gpus), **settings},
        cwd=HERE.parents[1], capture_output=True, text=True, errors="replace", timeout=1500,
    )  # fmt: skip


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, "Future[Done]"]]:
    """What is run by more than one test, once, when it is first asked for."""
    folder, cases = tmp_path_factory.mktemp("fake-gpu"), HERE / "cases.py"
    words = {
        "quick-2": (2, *TORCHRUN, cases, folder / "quick-2", "quick:2"),
        "captured-2": (2, *TORCHRUN, cases, folder / "captured-2", "captured quick:1"),
        "captured-1": (2, cases, folder / "captured-1", "captured quick:1"),
    }

    class Started(dict[str, "Future[Done]"]):
        def __missing__(self, name: str) -> "Future[Done]":
            (folder / name).mkdir()
            self[name] = pool.submit(on_gpus, *words[name])
            return self[name]

    with ThreadPoolExecutor(2) as pool:
        yield Started()
        pool.shutdown(cancel_futures=True)


def told(done: Done) -> str:
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("gpus", "passed", "words"),
    [
        # half of its precisions: the other jobs have them all
        (1, 15, ("tests/gpu", "-k", "not tf32 and not fp16")),
        # without a bug nothing is found, and each bug is
        (2, 30, (HERE / "planted.py",)),
    ],
    ids=["tests", "planted"],
)
def test_tests_on_a_gpu(gpus: int, passed: int, words: tuple[str | Path, ...]) -> None:
    said = told(on_gpus(gpus, *PYTEST, *words))
    assert int(re.findall(r"(\d+) passed", said)[0]) >= passed


@pytest.mark.long
def test_recipes_train_with_few_launches(jobs: dict[str, "Future[Done]"]) -> None:
    check_launches(told(jobs["quick-2"].result()), 2)


@pytest.mark.long
@pytest.mark.serial  # pinned blocks are counted, and beside other tests more copies are on their way at once
@pytest.mark.parametrize(("ranks", "cases"), [(1, 12), (2, 8)])
def test_every_recipe_trains_with_few_launches(ranks: int, cases: int, tmp_path: Path) -> None:
    launcher = TORCHRUN if ranks == 2 else []
    check_launches(told(on_gpus(2, *launcher, HERE / "cases.py", tmp_path, "quick")), cases)


def check_launches(said: str, cases: int) -> None:
    lines = re.findall(r"^(?:ok|refused) .*", said, re.MULTILINE)
    assert len(lines) == cases
    for line in lines:
        others = float(line.rpartition(", ")[2].rstrip("]"))
        # several batches, sums in a fixed order, or memory that torch fills before its use
        parts = any(word in line for word in ("strict", "accumulation", "deterministic"))
        assert line.startswith("ok"), line
        averages = " ema " in line or "yolo" in line
        assert parts or others <= OTHERS + AVERAGE * averages + MUON * ("yolo" in line), line


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_captured_step_has_the_bits_of_an_eager_one(jobs: dict[str, "Future[Done]"], ranks: int) -> None:
    check_captured(told(jobs[f"captured-{ranks}"].result()), 1)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "cases"), [(1, 12), (2, 8)])
def test_every_recipe_is_captured(ranks: int, cases: int, tmp_path: Path) -> None:
    """But for what can't be, which is refused before the first step."""
    launcher = TORCHRUN if ranks == 2 else []
    check_captured(told(on_gpus(2, *launcher, HERE / "cases.py", tmp_path, "captured quick")), cases)


def check_captured(said: str, cases: int) -> None:
    lines = re.findall(r"^(ok|refused) captured .* / (.*) / .*: ., (\d+) a replay", said, re.MULTILINE)
    assert len(lines) == cases, said
    for verdict, strategy, launches in lines:
        assert verdict == ("refused" if strategy in ("dp", "batchnorm") else "ok"), said
        # the graph; seed and offset for each of at most four micro-batches that draw
        assert verdict == "refused" or 1 <= int(launches) <= 9, said


@pytest.mark.long
def test_bugs_in_captured_steps_are_found() -> None:
    said = told(on_gpus(2, *PYTEST, HERE / "planted_in_graphs.py"))
    assert int(re.findall(r"(\d+) passed", said)[0]) >= 20


@pytest.mark.long
def test_captures_that_break_off() -> None:
    said = told(on_gpus(1, *PYTEST, HERE / "given_up.py"))
    assert int(re.findall(r"(\d+) passed", said)[0]) >= 5


@pytest.mark.long
def test_a_stop_in_the_last_step_before_the_thaw_comes_before_it(tmp_path: Path) -> None:
    """On a GPU a step's outcome, and with it the agreed stop, is known a step later."""
    words = [f"--config-dir={FAULTY}", "recipe=faulty", "freeze=[0.*,1.*]", "thaw=0.5", "train.steps=8"]
    words += ["task.fault=terminate", "task.step=3", "task.once=false", f"run.dir={tmp_path / 'run'}"]
    done = on_gpus(1, "-m", "ddptrain", *words, FAKE_GPU_WATCH="0")
    assert done.returncode == 75, done.stderr
    assert "stopped at step 4 and saved" in done.stderr
    assert "thawed" not in done.stderr
    done = on_gpus(1, "-m", "ddptrain", *words, FAKE_GPU_WATCH="0")  # the fault is in a step that is done
    assert done.returncode == 0, done.stderr
    assert "plan       steps 4 to 8" in done.stderr


@pytest.mark.long
def test_one_rank_under_ddp_is_captured_after_ddp_has_timed_itself(tmp_path: Path) -> None:
    """As it times itself it asks events, which CUDA refuses in a capture; seen on an H200."""
    words = ["recipe=cnn_cifar10", "data=shapes", "data.source.train=64", "data.source.valid=8", "seed=1"]
    words += ["device=cuda", "strategy=ddp", "compile=graph", "train.steps=20", "train.batch_size=8"]
    done = on_gpus(1, "-m", "ddptrain", "launch", "--nproc-per-node=1", *words, f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert "captured at step 13" in done.stderr


@pytest.mark.long
def test_models_in_parts(tmp_path: Path) -> None:
    """fsdp and hsdp with each precision, and what follows a training."""
    said = told(on_gpus(2, *TORCHRUN, HERE / "cases.py", tmp_path, "sharded"))
    assert len(re.findall(r"^ok sharded", said, re.MULTILINE)) == 6, said


@pytest.mark.long
@pytest.mark.serial  # for the same reason
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_long_training_takes_no_more_memory(ranks: int, tmp_path: Path) -> None:
    launcher = TORCHRUN if ranks == 2 else []
    assert "ok long" in told(on_gpus(ranks, *launcher, HERE / "cases.py", tmp_path, "long"))


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_collective_that_ranks_do_not_share(tmp_path: Path, mistake: str) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "rank = int(os.environ['RANK'])\n"
        "torch.cuda.set_device(rank)\n"
        "dist.init_process_group('nccl')\n"
        "x = torch.ones(3, device='cuda')\n"
        "dist.all_reduce(x)\n"
        "assert x.tolist() == [2, 2, 2]\n"
        f"{mistake}\n"
        "print(x.sum().item())\n"
        "dist.destroy_process_group()\n"
    )
    done = on_gpus(2, *TORCHRUN, script, FAKE_NCCL_TIMEOUT="8", FAKE_GPU_WATCH="0")
    assert done.returncode != 0
    assert MISTAKES[mistake] in done.stderr + done.stdout


@pytest.mark.long
def test_the_recipe_of_the_docs_on_two_gpus(tmp_path: Path) -> None:
    """Its evaluation returns a count on the CPU, where NCCL adds up nothing."""
    words = ["--config-dir=tests/packaging/my_recipe", "recipe=my_recipe", f"run.dir={tmp_path}/run"]
    told(on_gpus(2, *TORCHRUN, "-m", "ddptrain", *words, "train.steps=4"))
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert '"split": "valid"' in last
    assert '"error": ' in last


@pytest.mark.long
@pytest.mark.parametrize(("gpus", "steps"), [(1, 14), (2, 24)])
def test_where_there_is_no_room_for_a_graph_auto_goes_on_without(
    gpus: int, steps: int, tmp_path: Path
) -> None:
    """Between what eager steps need and what a graph takes beside it; below that, it is the usual message. A
    step is captured after the eighth, under DDP after the seventeenth."""
    words = [
        *(["launch", "--nproc-per-node=2"] if gpus > 1 else []),
        "recipe=cnn_digits", "model.width=64", f"train.batch_size={gpus * 512}", "train.eval_batch_size=16",
        "compile=auto", f"train.steps={steps}", "train.eval_every=1000", "checkpoint.every=1000",
        "observers=[console,jsonl]",
    ]  # fmt: skip
    seen: list[str] = []
    for mib in range(54, 68, 2):
        run = tmp_path / f"{mib}"
        memory = {"FAKE_GPU_MEMORY": f"{mib * 2**20}", "FAKE_GPU_WATCH": "0"}
        done = on_gpus(gpus, "-m", "ddptrain", *words, f"run.dir={run}", **memory)
        assert "Traceback" not in done.stderr, done.stderr
        if done.returncode == 0:
            seen.append("captured" if "graph      captured" in done.stderr else "eager")
            no_room = "there is no room for the memory that a graph keeps" in done.stderr
            assert no_room == (seen[-1] == "eager")
        else:  # also where a graph had no room, and then an eager step
            assert done.returncode == 2, done.stderr
            assert "out of memory" in done.stderr
            seen.append("too small")
    assert sorted(seen, key=["too small", "eager", "captured"].index) == seen
    assert {"eager", "captured"} <= set(seen)
