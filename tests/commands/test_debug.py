"""A closer look at a run: traces of chosen steps, CUDA in step with the host, the layer of a NaN."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import FEATURES, Classify, Fit

from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.errors import Diverged
from ddptrain.testing import run_ranks

DIGITS = [
    "recipe=cnn_digits",
    "device=cpu",
    "observers=[console,jsonl,plots]",
    "train.steps=20",
    "run.dir=run",
]


def train(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ddptrain", *DIGITS, *words]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_a_profile_holds_the_steps_that_were_chosen_and_changes_nothing(tmp_path: Path) -> None:
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    plain.mkdir()
    profiled.mkdir()
    assert train(plain).returncode == 0
    done = train(profiled, "debug.profile=true", "debug.profile_from=6", "debug.profile_steps=4")
    assert done.returncode == 0, done.stderr
    assert "profile    run/profile/trace-rank0.json.gz (steps 6 to 9;" in done.stderr
    with gzip.open(profiled / "run/profile/trace-rank0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    steps = [event for event in events if str(event.get("name", "")).startswith("Optimizer.step")]
    assert len(steps) == 4
    assert (plain / "run/metrics.jsonl").read_bytes() == (profiled / "run/metrics.jsonl").read_bytes()


@pytest.mark.long
def test_a_profile_beyond_the_end_is_told(tmp_path: Path) -> None:
    done = train(tmp_path, "debug.profile=true", "debug.profile_from=19")
    assert done.returncode == 0
    assert "debug.profile: the run ends before step 21, so nothing is recorded" in done.stderr
    assert not (tmp_path / "run/profile").exists()


@pytest.mark.long
def test_sync_sets_what_cuda_reads_when_it_starts(tmp_path: Path) -> None:
    """Seen from inside the run, by a model."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "looking.py").write_text(
        "import os, torch\n"
        "def looking(num_classes: int, width: int = 1, hidden: int = 1, dropout: float = 0.0):\n"
        "    print('SEEN', os.environ.get('CUDA_LAUNCH_BLOCKING'), torch.is_anomaly_enabled())\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))\n"
    )
    (tmp_path / "recipe/looking.yaml").write_text(
        "# @package _global_\ndefaults:\n  - cnn_digits\n  - _self_\nmodel:\n  _target_: looking.looking\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_LAUNCH_BLOCKING"}
    for sync, seen in (("true", "SEEN 1 True"), ("false", "SEEN None False")):
        words = ["recipe=looking", f"--config-dir={tmp_path}", *DIGITS[1:], f"debug.sync={sync}"]
        done = subprocess.run(
            [sys.executable, "-m", "ddptrain", *words, "run.resume=never"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert seen in done.stdout


class Root(nn.Module):
    """Its output is finite at zero, its gradient is not."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach()).abs().sqrt()


def rooted() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), Root(), nn.Linear(8, 5))


def test_a_gradient_that_is_not_finite_names_its_layer(tmp_path: Path) -> None:
    plan = Plan(steps=5, train_size=100, batch_size=20, micro_batch=10)
    with pytest.raises(Diverged) as caught:
        Fit(plan, make_model=rooted).run(World(), tmp_path)
    assert "step 1 is not finite. First in rank 0: the gradient that 1 (Root) returns" in str(caught.value)


def test_a_model_that_torch_can_not_count_trains_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What fails under the counter alone is told and left out."""

    class Shy(Classify):
        def loss(self, model: nn.Module, batch: Any, at: Any) -> Any:
            if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                raise NotImplementedError("an operator without a rule")
            return super().loss(model, batch, at)

    plan = Plan(steps=5, train_size=100, batch_size=20)
    with caplog.at_level("INFO", logger="ddptrain"):
        state, _, _ = Fit(plan, task=Shy).run(World(), tmp_path)
    assert (state.step, state.left_out) == (5, 0)
    assert "FLOPs are not counted: an operator without a rule" in caplog.text


def test_a_compiled_model_is_still_compiled_after_its_flops_are_counted(tmp_path: Path) -> None:
    """Under torch's counter Dynamo leaves a frame alone, and torch 2.11 does so ever after."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def compiled() -> nn.Module:
        model = Doubled(FEATURES, 5)
        model.compile(backend=backend)
        return model

    plan = Plan(steps=3, train_size=100, batch_size=20)
    state, _, _ = Fit(plan, make_model=compiled).run(World(), tmp_path)
    assert (state.step, state.left_out) == (3, 0)
    assert graphs


class Doubled(nn.Linear):
    """Of a file of its own: torch 2.11 compiles none that is torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_a_buffer_that_comes_with_the_first_forward_pass_is_no_hindrance(tmp_path: Path) -> None:
    class Lazy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "scale"):
                self.register_buffer("scale", torch.ones(()), persistent=False)
            return super().forward(x) * self.scale

    plan = Plan(steps=3, train_size=100, batch_size=20)
    state, _, _ = Fit(plan, make_model=lambda: Lazy(FEATURES, 5)).run(World(), tmp_path)
    assert (state.step, state.left_out) == (3, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tasks_own_error_is_the_one_that_is_raised(tmp_path: Path, ranks: int) -> None:
    class Broken(Classify):
        def loss(self, model: nn.Module, batch: Any, at: Any) -> Any:
            loss = super().loss(model, batch, at)
            loss.sum.register_hook(_refuse)
            return loss

    def rank(world: World) -> str:
        plan = Plan(steps=3, train_size=100, batch_size=20)
        try:
            Fit(plan, task=Broken).run(world, tmp_path / str(world.rank))
        except ValueError as error:
            return str(error)
        return "nothing"

    assert run_ranks(rank, ranks) == ["no gradient, thanks"] * ranks


def _refuse(gradient: Tensor) -> None:
    raise ValueError("no gradient, thanks")
