"""The CUDA paths, run on GPUs that are not there (`python tests/fake_gpu`). Launches, waits, copies, streams
and collectives are torch's own; speed, cuDNN, Triton and CUDA graphs are not to be had."""

import os
import re
import subprocess
import sys
from pathlib import Path

import libraries
import pytest
from shell import RANK_VARIABLES

HERE = Path(__file__).parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
OTHERS = 40
"""Most launches a step that are not the task's loss or its backward pass: data, augmentation, health check,
optimizer, average, meter."""
pytestmark = pytest.mark.skipif(libraries.why_not() != "", reason=libraries.why_not() or "it can be built")


def on_gpus(gpus: int, *words: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """``python <words>`` on so many fake GPUs."""
    hidden = {*RANK_VARIABLES, "CUDA_VISIBLE_DEVICES"}
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [sys.executable, *map(str, words)], env={**inherited, **libraries.environment(gpus), **settings},
        cwd=HERE.parents[1], capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def test_the_tests_of_a_gpu() -> None:
    done = on_gpus(1, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu")
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 15


def test_a_planted_bug_is_found() -> None:
    done = on_gpus(2, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "planted.py")
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 29


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_recipe_trains(tmp_path: Path, ranks: int) -> None:
    start = TORCHRUN if ranks == 2 else []
    done = on_gpus(2, *start, HERE / "cases.py", tmp_path, "quick")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if re.match("ok|refused", line)]
    assert len(lines) >= 8
    for line in lines:
        others = float(line.rpartition(", ")[2].rstrip("]"))
        parts = "strict" in line or "accumulation" in line  # several batches a step, or sums in a fixed order
        assert line.startswith("ok"), line
        assert parts or others <= OTHERS, line


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_long_training_takes_no_more_memory(tmp_path: Path, ranks: int) -> None:
    start = TORCHRUN if ranks == 2 else []
    done = on_gpus(ranks, *start, HERE / "cases.py", tmp_path, "long")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("if rank == 1: dist.all_reduce(x)", "another rank does not come"),
        ("dist.all_reduce(x[: 3 - rank])", "all_reduce of"),
        ("dist.all_reduce(x) if rank else dist.broadcast(x, 0)", "but rank"),
    ],
)
def test_a_collective_that_ranks_do_not_share(tmp_path: Path, mistake: str, said: str) -> None:
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
        "print('here', x.sum().item())\n"
        "dist.destroy_process_group()\n"
    )
    done = on_gpus(2, *TORCHRUN, script, FAKE_NCCL_TIMEOUT="8", FAKE_GPU_WATCH="0")
    assert done.returncode != 0
    assert said in done.stderr + done.stdout
