"""What a recipe's Task may return, and what it is told when it returns something else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Classify, Fit

from ddptrain.api.recipe import At, Loss, Report
from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.errors import UserError
from ddptrain.testing import RankFailed, run_ranks

PLAN = Plan(steps=4, train_size=60, batch_size=20, eval_every=2)


def refused(tmp_path: Path, task: type[Classify]) -> str:
    with pytest.raises(UserError) as raised:
        Fit(PLAN, task=task).run(World(), tmp_path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# fmt: off
LOSSES: dict[str, tuple[Any, str]] = {
    "a tensor": (lambda loss: loss.sum,
        "returned a float32 tensor of shape (); it must return a ddptrain.api.Loss"),
    "nothing": (lambda loss: None, "returned NoneType"),
    "a mean as float": (lambda loss: Loss(1.5, 3),  # type: ignore[arg-type]
        "sum must be one number, a 0-d floating tensor, and is float"),
    "one sum a sample": (lambda loss: Loss(loss.sum.expand(4), 4), "and is a float32 tensor of shape (4,)"),
    "a whole number": (lambda loss: Loss(torch.tensor(3), 4), "and is a int64 tensor of shape ()"),
    "no graph": (lambda loss: Loss(loss.sum.detach(), 4), "sum has no graph"),
    "a count of zero": (lambda loss: Loss(loss.sum, 0), "count is 0; it must be an int of at least 1"),
    "a count below": (lambda loss: Loss(loss.sum, -2), "count is -2"),
    "a count as float": (lambda loss: Loss(loss.sum, 2.5), "count is float"),  # type: ignore[arg-type]
    "counts": (lambda loss: Loss(loss.sum, torch.ones(3)), "count is a float32 tensor of shape (3,)"),
    "a log as float": (lambda loss: Loss(loss.sum, 4, {"a": 1.0}),  # type: ignore[dict-item]
        "logs['a'] must be a 0-d tensor, and is float"),
    "a log with a shape": (lambda loss: Loss(loss.sum, 4, {"a": torch.ones(1)}), "of shape (1,)"),
    "the engine's name": (lambda loss: Loss(loss.sum, 4, {"count": loss.sum}), "are the engine's own names"),
}
# fmt: on


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_can_not_be_used(kind: str, tmp_path: Path) -> None:
    change, said = LOSSES[kind]

    class Wrong(Classify):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], at: At) -> Loss:
            changed: Loss = change(super().loss(model, batch, at))
            return changed

    message = refused(tmp_path, Wrong)
    assert message.startswith("Wrong.loss: ")
    assert said in message


@pytest.mark.parametrize(
    ("how", "noted"),
    [("sum", False), ("mean", True), ("sum of squares", False), ("mean, counted by a tensor", True)],
)
def test_a_loss_that_looks_like_a_mean_is_noted(
    how: str, noted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(Classify):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], at: At) -> Loss:
            found = super().loss(model, batch, at)
            if how == "sum of squares":
                return Loss(model(batch[0]).square().sum(), len(batch[0]))
            total = found.sum / len(batch[0]) if "mean" in how else found.sum
            return Loss(total, torch.tensor(len(batch[0])) if "tensor" in how else len(batch[0]))

    with caplog.at_level("WARNING", logger="ddptrain"):
        Fit(PLAN, task=Own).run(World(), tmp_path)
    assert ("Loss.sum looks like a mean" in caplog.text) == noted


def test_a_count_that_is_zero_later(tmp_path: Path) -> None:
    class Wrong(Classify):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], at: At) -> Loss:
            return Loss(super().loss(model, batch, at).sum, 20 if at.step < 2 else 0)

    assert "Task.loss: count is 0" in refused(tmp_path, Wrong)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_int_that_is_another_for_each_sample(ranks: int, tmp_path: Path) -> None:
    """The gradients would be those of another mean."""

    class Wrong(Classify):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], at: At) -> Loss:
            seen = batch[0][:, 0] > 0
            return Loss((model(batch[0]).square().sum(1) * seen).sum(), int(seen.sum()) or 1)

    with pytest.raises((UserError, RankFailed), match=r"count is the int \d+ of \d+ samples, and was \d+"):
        run_ranks(lambda world: Fit(PLAN, task=Wrong).run(world, tmp_path), ranks)


REPORTS: dict[str, tuple[Any, str]] = {
    "a dict": ({"accuracy": 1.0}, "returned dict; it must return a ddptrain.api.Report"),
    "a tensor among metrics": (
        Report({"accuracy": torch.tensor(1.0)}),
        "metrics['accuracy'] must be a number",
    ),  # type: ignore[dict-item]
    "another name": (
        Report({"loss": 1.0}),
        "metrics has no 'accuracy', which Wrong.best_metric names; it has 'loss'",
    ),
    "no metric": (Report({}), "it has none"),
}


@pytest.mark.parametrize("kind", REPORTS)
def test_a_report_that_can_not_be_used(kind: str, tmp_path: Path) -> None:
    report, said = REPORTS[kind]

    class Wrong(Classify):
        def report(self, sums: Mapping[str, Tensor]) -> Report:
            wrong: Report = report
            return wrong

    message = refused(tmp_path, Wrong)
    assert message.startswith("Wrong.report: ")
    assert said in message
