"""What compiling cost is told, and kept for the next run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy import Classify, Fit, Vectors, plain, weights

from ddptrain.api.world import World
from ddptrain.engine.compiled import check_graphs, compile_loss, is_compiled
from ddptrain.engine.plan import Plan
from ddptrain.errors import UserError
from ddptrain.run.setup import make_strategy
from ddptrain.testing import run_ranks

GPU = World(device=torch.device("cuda", 0))


def log_of(folder: Path, *words: str) -> str:
    """Of a run on one thread, with the compiler's cache in the folder."""
    # torch's compiler, once another test has imported it, names a folder of its own to all child processes
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-m", "ddptrain", *words, "device=cpu"],
        cwd=folder,
        env={**environment, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def compiled(folder: Path, name: str) -> tuple[str, float]:
    """The log of a run, and the seconds that it says it has compiled for."""
    words = ["recipe=cnn_digits", "compile=default", "train.steps=8", "train.eval_every=4"]
    log = log_of(folder, *words, "observers=[console,jsonl,plots]", f"run.dir={name}")
    return log, float(re.findall(r"compiled .*; ([0-9.]+) s so far", log)[-1])


@pytest.mark.long
def test_the_next_run_takes_the_graphs_from_the_folder(tmp_path: Path) -> None:
    first, seconds = compiled(tmp_path, "first")
    assert re.search(
        r"compiled +2 graphs for training and evaluation; .* kept in .*cache/ddptrain/compiled", first
    )
    assert "grad_mode" in first, "torch says why it has compiled again"
    assert any((tmp_path / "cache/ddptrain/compiled").rglob("*"))
    _, again = compiled(tmp_path, "second")
    assert again < seconds / 2


PARTS = (("default", 4), ("default", 8), ("off", 12))
"""How a run is compiled up to which step."""


@pytest.mark.long
def test_equal_blocks_under_fsdp_are_one_graph(tmp_path: Path) -> None:
    """Each block is compiled by itself; the numbers are those of an eager run, which reads the checkpoint."""
    lines = [f"{number} squared is {number**2}\n" for number in range(50_000)]
    (tmp_path / "squares.txt").write_text("".join(lines))  # the default text takes 12 s an evaluation
    words = (
        "launch --nproc-per-node=2 recipe=transformer_text data=text data.source.path=squares.txt"
        " data.window=128 data.valid_piece=128 data.valid_context=128 data.order=shuffled"
        " strategy=fsdp model.layers=4 model.width=64"
        " task.sample_tokens=0 train.batch_size=8 train.eval_every=4 checkpoint.every=4 log.every=1"
        " precision=fp32 sched=constant observers=[console,jsonl]"
    )
    losses, logs = {}, {}
    for folder, name, steps in (("eager", "off", 12), *(("run", *part) for part in PARTS)):
        own = [f"compile={name}", f"train.steps={steps}", f"run.dir={folder}"]
        logs[steps] = log_of(tmp_path, *words.split(), *own)
        rows = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        losses[folder] = [row["loss"] for row in rows if row["split"] == "train"]
    assert losses["run"] == pytest.approx(losses["eager"], rel=1e-4)
    [graphs] = re.findall(r"compiled +(\d) graphs for training and evaluation", logs[4])
    assert int(graphs) < 4, "fewer than blocks, with and without gradients"
    assert "resumed" in logs[8]
    assert "resumed" in logs[12]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_and_several_backward_passes_a_step_are_refused(mode: str) -> None:
    with pytest.raises(UserError, match=rf"compile={mode}: .* 2 a step.*compile=default.*train.micro_batch"):
        check_graphs(mode, GPU, 2)
    check_graphs(mode, GPU, 1)
    check_graphs(mode, World(), 2)
    check_graphs("default", GPU, 2)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_a_compiled_loss_trains_the_same(tmp_path: Path, size: int) -> None:
    """In micro-batches, by one rank or by two."""
    from torch._dynamo.utils import counters

    fit = Fit(Plan(steps=12, train_size=100, batch_size=32, micro_batch=8, eval_every=5), ema=0.9)

    def rank(world: World) -> tuple[float, int]:
        found = []
        for name in ("eager", "compiled"):
            task = Classify(plain)
            if name == "compiled":
                compile_loss(task)
            state, _ = fit.train(task, Vectors(100), world, tmp_path / f"{name}{world.rank}")
            assert is_compiled(task, state.model) == (name == "compiled")
            found.append(weights(state))
        return float((found[1] - found[0]).norm() / found[0].norm()), counters["stats"]["unique_graphs"]

    for difference, graphs in run_ranks(rank, size, timeout=250):
        assert difference < 1e-5
        assert graphs == size, "one region, which DDP parts into model and loss; none for another step"


@pytest.mark.long
@pytest.mark.parametrize(("cell", "mode"), [("lstm", "default"), ("lstm", "step"), ("gru", "step")])
def test_recurrent_layers_are_left_eager(tmp_path: Path, cell: str, mode: str) -> None:
    """torch can't compile them; what is around them is compiled."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    words = (
        f"recipe=lstm_text model.cell={cell} model.width=32 model.ngram_rows=512 task.sample_tokens=0"
        f" data=text data.source.path={text} train.batch_size=4 train.steps=4 log.every=1 precision=bf16"
        " observers=[console,jsonl]"
    )
    losses = {}
    for name in ("off", mode):
        log = log_of(tmp_path, *words.split(), f"compile={name}", f"run.dir={name}")
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [line["loss"] for line in lines if line["split"] == "train"]
    assert re.search(r"compiled +\d graphs", log)
    assert losses[mode] == pytest.approx(losses["off"], rel=1e-3)


def test_dp_and_compiling_are_refused() -> None:
    with pytest.raises(UserError, match="compile=off"):
        make_strategy({"_target_": "ddptrain.strategies.dp.DataParallel"}, GPU, compiled=True)
