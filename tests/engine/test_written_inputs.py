"""A model that writes into its input, as nn.ReLU(inplace=True) does, trains and is measured like one that
does not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import CLASSES, FEATURES, Classify, Fit, auto, newest_state, run_killed_at

from ddptrain.api.world import World
from ddptrain.data.tensors import TensorData
from ddptrain.engine.plan import Plan
from ddptrain.testing import run_ranks


class Shifted(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self._in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(0.5).add_(1.0) if self._in_place else x * 0.5 + 1.0
        logits: Tensor = self.last(x)
        return logits


@pytest.mark.parametrize("size", [1, 2])
def test_as_if_it_did_not(size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(120, FEATURES), torch.randint(CLASSES, (120,))
    plan = Plan(steps=6, train_size=108, batch_size=24, eval_batch_size=5, eval_every=2, save_every=3, seed=3)
    fit = Fit(plan, strategy=auto())

    def rank(world: World, in_place: bool, name: str, stop_at: int | None = None) -> dict[str, float]:
        task = Classify(lambda: Shifted(in_place))
        _, report = fit.train(task, TensorData((x, y)), world, tmp_path / name, stop_at)
        return dict(report.metrics)

    run_killed_at(3, lambda world: rank(world, True, "killed", 3), size, tmp_path / "killed")
    runs: list[Any] = [
        run_ranks(lambda world, name=name: rank(world, name != "copied", name), size)  # type: ignore[misc]
        for name in ("killed", "in place", "copied")
    ]
    assert runs[0] == runs[1] == runs[2]
    killed, in_place, copied = (
        newest_state(tmp_path / name)["model"] for name in ("killed", "in place", "copied")
    )
    for name, value in copied.items():
        assert torch.equal(value, in_place[name])
        assert torch.equal(value, killed[name])
