"""What only a GPU can show: ``python -m pytest tests/gpu``, by itself. Skipped where there is none, and
together with other tests, which see none (tests/conftest.py)."""

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scenes import detector
from texts import language_model, write_text
from toy import Classify, Fit, auto, lr_schedule

from ddptrain.api.observer import End, Observer
from ddptrain.api.world import World
from ddptrain.config.schema import Config, Ema
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.shapes import Shapes
from ddptrain.data.prefetch import on_device
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.doctor import proof
from ddptrain.doctor.facts import Proof
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.loop import Engine, StepIterator
from ddptrain.engine.plan import Plan
from ddptrain.engine.precision import Precision
from ddptrain.engine.state import TrainState
from ddptrain.engine.step import TrainStep
from ddptrain.observe.dispatch import Observers
from ddptrain.observe.profile import profiled
from ddptrain.run.assemble import make_step
from ddptrain.run.setup import make_strategy

DEVICE = torch.device("cuda", 0)
PICTURES = 32 * 3 * 32 * 32
"""Bytes of a micro-batch."""
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, and pytest tests/gpu by itself"
)
on_a_real_one = pytest.mark.skipif(
    "FAKE_GPU_COUNT" in os.environ, reason="a fake GPU has no time of its own, and no profiler"
)


def cnn() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, stride=2), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 10),
    )  # fmt: skip


def fit(
    folder: Path,
    precision: str,
    resident: bool,
    steps: int = 30,
    observers: Sequence[Observer] = (),
    step_iterator: StepIterator = iter,
) -> TrainState:
    device = DEVICE
    world = World(device=device)
    data = ImageData(Shapes(train=500, valid=100), Augment(4, True, 8), workers=0 if resident else 2,
                     resident=resident)  # fmt: skip
    data.prepare(world, 0)
    plan = Plan(steps=steps, train_size=500, batch_size=64, micro_batch=32, log_every=10, clip_norm=1.0)
    config = Config(recipe="gpu", task={}, data={}, ema=Ema(0.9), sched=lr_schedule("constant"),
                    optim={"_target_": "torch.optim.AdamW", "lr": 1e-3})  # fmt: skip
    torch.manual_seed(0)
    model = cnn().to(device, memory_format=torch.channels_last)
    made = Precision(precision, device)
    strategy = make_strategy(auto(), world)
    step = make_step(config, Classify(cnn), model, strategy, made, plan, Watchdog(world))
    Engine(data, step, Checkpointer(folder, 2), Observers(observers)).fit(step_iterator=step_iterator)
    return step.state


@pytest.fixture
def steps_must_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    step = TrainStep.__call__

    def watched(self: TrainStep, batches: Any, progress: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if progress.step else "default")  # the first step warms up
        try:
            step(self, batches, progress)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(TrainStep, "__call__", watched)


@pytest.mark.usefixtures("steps_must_not_wait")
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_step_never_waits_for_the_device(tmp_path: Path, precision: str, resident: bool) -> None:
    state = fit(tmp_path, precision, resident)
    assert all(p.is_cuda for p in state.model.parameters())


@pytest.mark.usefixtures("steps_must_not_wait")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["lstm", "gru", "rnn", "transformer"])
def test_nor_does_a_step_on_text(tmp_path: Path, model: str, precision: str) -> None:
    task, data = language_model(write_text(tmp_path / "text.txt"), model)
    data.prepare(World(device=DEVICE), 0)
    plan = Plan(steps=20, train_size=data.train_size, batch_size=12, micro_batch=6, log_every=10)
    state, report = Fit(plan, precision=precision).train(task, data, World(device=DEVICE), tmp_path / "run")
    assert all(p.is_cuda for p in state.model.parameters())
    assert report.metrics["bits_per_byte"] < 8
    with torch.inference_mode():
        assert "".join(task.predict(state.model.eval(), prompt="the", tokens=5)).startswith("the")


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_compute_in_bf16(layer: type[torch.nn.RNNBase]) -> None:
    """In fp16, gradients as small as those of a mean over many tokens would be subnormal, or 0."""
    torch.manual_seed(0)
    cells, x = layer(8, 16, num_layers=2, bidirectional=True).to(DEVICE), torch.randn(5, 6, 8, device=DEVICE)
    gradients = []
    for precision in ("fp32", "bf16"):
        made = Precision(precision, DEVICE)
        with made.autocast():
            y = cells(x)[0]
        made.backward(y.float().square().sum(), torch.tensor(1e-9, device=DEVICE))
        gradients.append([1e9 * p.grad for p in cells.parameters() if p.grad is not None])
        cells.zero_grad()
    # float32 where cuDNN is too old for bf16
    assert y.dtype in (torch.bfloat16, torch.float32)
    for ours, exact in zip(gradients[1], gradients[0], strict=True):
        assert (ours - exact).norm() < 0.03 * exact.norm()


@pytest.mark.usefixtures("steps_must_not_wait")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_nor_does_a_step_of_the_detector(tmp_path: Path, precision: str) -> None:
    task, data = detector(multi_scale=0.5)
    data.prepare(World(device=DEVICE), 0)
    plan = Plan(
        steps=20, train_size=data.train_size, batch_size=12, micro_batch=6, log_every=10, clip_norm=10
    )
    state, report = Fit(plan, precision=precision).train(task, data, World(device=DEVICE), tmp_path / "run")
    assert all(p.is_cuda for p in state.model.parameters())
    assert 0 <= report.metrics["mAP"] <= 1


def test_batches_copied_ahead_are_neither_read_early_nor_overwritten() -> None:
    """The compute stream lags behind on purpose; what it reads late must still be its own batch."""
    size, count = 1 << 20, 40
    sums = []
    for batch in on_device((torch.full((size,), float(i)).pin_memory() for i in range(count)), DEVICE):
        torch.cuda._sleep(2_000_000)
        sums.append(batch.double().sum())
        del batch  # its memory may now be reused for a copy, but not before the sum is done
    assert torch.stack(sums).tolist() == [float(i) * size for i in range(count)]


class Reserved(Observer):
    """Keeps how much memory torch held after each evaluation."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def log(self, event: Any) -> None: ...

    def evaluated(self, event: Any) -> None:
        self.seen.append(torch.cuda.memory_reserved())


@pytest.mark.parametrize("resident", [True, False])
def test_memory_does_not_grow_with_the_number_of_evaluations(tmp_path: Path, resident: bool) -> None:
    data = ImageData(Shapes(train=32, valid=64), Augment(4, True, 8), workers=0, resident=resident)
    plan = Plan(steps=40, train_size=32, batch_size=16, log_every=100, eval_every=1)
    reserved = Reserved()
    Fit(plan, observers=[reserved]).train(Classify(cnn), data, World(device=DEVICE), tmp_path)
    assert len(reserved.seen) == 40
    assert reserved.seen[-1] <= reserved.seen[4], [size >> 20 for size in reserved.seen]


class Ended(Observer):
    """Keeps what the engine tells of its time."""

    def start(self, event: Any) -> None:
        self.began = time.perf_counter()

    def log(self, event: Any) -> None: ...

    def evaluated(self, event: Any) -> None: ...

    def saved(self, event: Any) -> None: ...

    def end(self, event: End) -> None:
        torch.cuda.synchronize()
        self.wall, self.timing = time.perf_counter() - self.began, event.times.timing


@on_a_real_one
@pytest.mark.parametrize("resident", [True, False])
def test_the_split_adds_up_to_the_wall_time(tmp_path: Path, resident: bool) -> None:
    seen = Ended()
    fit(tmp_path, "bf16", resident, steps=300, observers=[seen])
    assert sum(seen.timing.seconds.values()) == pytest.approx(seen.wall, rel=0.02)
    assert seen.timing.seconds["forward"] > 0
    assert seen.timing.mfu is not None


@on_a_real_one
def test_copies_run_beside_the_computing_in_the_trace(tmp_path: Path) -> None:
    """Host-to-device copies of later batches lie on another stream, inside the time of the step's kernels."""
    world = World(device=DEVICE)
    profiling = partial(profiled, first=10, count=8, world=world, folder=tmp_path / "profile")
    fit(tmp_path / "run", "fp32", resident=False, steps=40, step_iterator=profiling)
    with gzip.open(tmp_path / "profile/trace-rank0.json.gz") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    copies = [
        e
        for e in events
        if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"] and e["args"]["bytes"] >= PICTURES
    ]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert copies
    assert kernels
    own, others = {e["args"]["stream"] for e in copies}, {e["args"]["stream"] for e in kernels}
    assert own - others, "copies have a stream of their own"
    first, last = min(e["ts"] for e in kernels), max(e["ts"] + e["dur"] for e in kernels)
    assert sum(first < copy["ts"] < last for copy in copies) >= len(copies) // 2
    assert (tmp_path / "profile/memory-rank0.pickle").stat().st_size > 1000


def test_two_ranks_share_a_gpu_over_gloo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m",
         "ddptrain", "recipe=cnn_cifar10", "data=shapes", "device=cuda:0", "train.steps=20", "run.dir=run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ddp over gloo" in done.stderr


def test_the_doctor_finds_that_it_computes_right() -> None:
    done = list(proof.prove("cuda:0"))
    assert [one for one in done if not one.ok and not one.lacks] == []
    assert Proof("nms", "cuda:0", "fp32", True, "torchvision's own operator") in done
