"""A training that compiles nothing imports no compiler, and trains as one that does."""

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from running import FAULTY
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from toy import Fit, auto, weights

from ddptrain import torch_private
from ddptrain.api.world import World
from ddptrain.engine.optimizer_step import OptimizerStep
from ddptrain.engine.plan import Plan
from ddptrain.engine.precision import Precision
from ddptrain.testing import run_ranks

TRAINING = """
import sys
if sys.argv[1] == "compiler":
    import torch._dynamo
from ddptrain.verbs.main import main
assert main(sys.argv[2:]) == 0
heavy = {"torch._dynamo", "torch.onnx", "torchvision", "triton", "sklearn", "pandas", "IPython", "sympy"}
print(*sorted(heavy & sys.modules.keys()))
"""
LATE = """
import os, sys
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, SGD
from ddptrain.torch_private import spare_dynamo, sparing_dynamo

spare_dynamo()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = SGD([weight], lr=0.5)
weight.grad = torch.ones(2)
optimizer.step()
assert "torch._dynamo" not in sys.modules
assert weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
with sparing_dynamo():
    wrapped = DistributedDataParallel(model)
wrapped(torch.ones(2)).sum().backward()
assert "torch._dynamo" not in sys.modules and "_dynamo" not in vars(torch)
compiled = torch.compile(lambda x: x + 1, backend="eager")
compiled(weight)
wrapped(torch.ones(2)).sum().backward()
assert DistributedDataParallel(model)._use_python_reducer is False
optimizer.zero_grad()
weight.grad = torch.ones(2)
optimizer.step()
print(weight.tolist(), vars(Optimizer.zero_grad.__wrapped__)["__dynamo_disable"].__module__, flush=True)
os._exit(0)
"""


def run(script: str, *words: str, cwd: Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.long
def test_without_the_compiler_the_bits_are_the_same(tmp_path: Path) -> None:
    words = [f"--config-dir={FAULTY}", "recipe=faulty", "device=cpu", "train.steps=6"]
    losses = []
    for compiler in ("compiler", "none"):
        said = run(TRAINING, compiler, *words, f"run.dir={compiler}", cwd=tmp_path)
        assert ("torch._dynamo" in said) == (compiler == "compiler")
        assert compiler == "compiler" or not said
        lines = (tmp_path / compiler / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in lines])
    assert losses[0] == losses[1]


def test_a_compiler_that_comes_later_is_asked_as_ever(tmp_path: Path) -> None:
    assert run(LATE, cwd=tmp_path) == "[0.0, 0.0] torch._dynamo.eval_frame"


@pytest.mark.parametrize("name", ["_run_backward", "_queue_callback", "_DDPS_FORWARD"])
def test_a_torch_without_a_name_trains_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way back, on two ranks."""
    plan = Plan(steps=6, train_size=60, batch_size=12, log_every=3)

    def rank(world: World) -> Tensor:
        fit = Fit(plan, strategy=auto(bucket_cap_mb=0.001))
        return weights(fit.run(world, tmp_path / f"{torch_private_is(name)}-{world.rank}")[0])

    def torch_private_is(name: str) -> bool:
        return getattr(torch_private, name) is not None

    assert torch_private_is(name)
    whole = run_ranks(rank, 2)
    monkeypatch.setattr(torch_private, name, None)
    for ours, theirs in zip(run_ranks(rank, 2), whole, strict=True):
        assert torch.equal(ours, theirs)


def test_an_optimizer_without_torchs_wrapper_steps_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    monkeypatch.delattr(torch.optim.Optimizer, "profile_hook_step")
    weight.grad = torch.ones(2)
    OptimizerStep(optimizer, torch.amp.GradScaler("cpu", enabled=False))(torch.zeros(()))
    assert weight.tolist() == [0.5, 0.5]


def test_the_kernels_of_recurrent_layers_stay_replaced() -> None:
    """Under bf16 torch's own would compute in fp16. What replaces them lasts as long as its handle."""
    Precision("bf16", torch.device("cpu"))
    torch_private.rnns_in_autocasts_dtype()
    gc.collect()
    [active] = [
        line
        for line in torch._C._dispatch_dump("aten::_cudnn_rnn").splitlines()
        if line.startswith("AutocastCUDA:")
    ]
    assert "torch_private.py" in active
    assert not hasattr(torch_private.nccl_trace, "cache_info"), "a later hang has another trace"


def test_ddps_range_is_there_for_a_profiler_alone(tmp_path: Path) -> None:
    """Each pass of DDP asks whether one records."""

    def rank(world: World) -> list[bool]:
        wrapped: Any = DistributedDataParallel(torch.nn.Linear(2, 2))
        torch_private.lean_forward(wrapped)
        assert "forward" in vars(wrapped), "this torch's forward is not known"
        ranges = []
        for _ in range(2):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                wrapped(torch.ones(3, 2)).sum().backward()
            ranges.append(any(event.name == "DistributedDataParallel.forward" for event in profile.events()))
            wrapped(torch.ones(3, 2)).sum().backward()
        expected = wrapped.module.weight.grad.clone()
        wrapped.module.weight.grad = None
        for _ in range(4):
            DistributedDataParallel.forward(wrapped, torch.ones(3, 2)).sum().backward()
        return [*ranges, torch.equal(expected, wrapped.module.weight.grad)]

    assert all(all(seen) for seen in run_ranks(rank, 2))
