"""What compiling cost is told, and kept for the next run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddptrain.distributed.world import World
from ddptrain.engine.compiled import check_graphs
from ddptrain.errors import UserError

GPU = World(device=torch.device("cuda", 0))


def compiled(folder: Path, name: str) -> tuple[str, float]:
    """The log of a run, and the seconds that it says it has compiled for."""
    # torch's compiler, once another test has imported it, names a folder of its own to all child processes
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    words = ["recipe=cnn_digits", "device=cpu", "compile=default", "train.steps=8", "train.eval_every=4"]
    done = subprocess.run(
        [sys.executable, "-m", "ddptrain", *words, "log.tensorboard=false", f"run.dir={name}"],
        cwd=folder,
        env={**environment, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr, float(re.findall(r"compiled .*; ([0-9.]+) s so far", done.stderr)[-1])


@pytest.mark.long
def test_the_next_run_takes_the_graphs_from_the_folder(tmp_path: Path) -> None:
    first, seconds = compiled(tmp_path, "first")
    assert re.search(r"compiled +1 graph for training; .* kept in .*cache/ddptrain/compiled", first)
    assert "1 graph for evaluation, and batches of other sizes" in first
    assert "grad_mode" in first, "torch says why it has compiled again"
    assert any((tmp_path / "cache/ddptrain/compiled").rglob("*"))
    _, again = compiled(tmp_path, "second")
    assert again < seconds / 2


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_and_several_backward_passes_a_step_are_refused(mode: str) -> None:
    with pytest.raises(UserError, match=rf"compile={mode}: .* 2 a step.*compile=default.*train.micro_batch"):
        check_graphs(mode, GPU, 2)
    check_graphs(mode, GPU, 1)
    check_graphs(mode, World(), 2)
    check_graphs("default", GPU, 2)
