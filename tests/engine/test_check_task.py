"""What a recipe's Task may return, and what it is told when it returns something else."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy import Classify, Fit, Vectors, plain
from toy import weights as weights_of

from ddptrain.api.recipe import Loss, Progress, Report, Rows
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.engine.check_task import check_loss, check_sums
from ddptrain.engine.plan import Plan
from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.errors import UserError
from ddptrain.observe.jsonl import Jsonl
from ddptrain.observe.metrics_file import read_lines
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
    **{
        f"the engine's {name}": (lambda loss, name=name: Loss(loss.sum, 4, {name: loss.sum}),
            f"logs: {name} is one of the engine's own names")
        for name in ("loss", "count", "lr", "lr/x0.1", "grad_norm", "left_out", "step", "split")
    },
}
# fmt: on


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_can_not_be_used(kind: str, tmp_path: Path) -> None:
    change, said = LOSSES[kind]

    class Wrong(Classify):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
            changed: Loss = change(super().loss(model, batch, progress))
            return changed

    message = refused(tmp_path, Wrong)
    assert message.startswith("Wrong.loss: ")
    assert said in message


def test_what_one_ranks_batch_may_show_is_said_by_that_rank() -> None:
    """As a message that is on all ranks it would be printed by the first alone, which does not have it."""
    task, total = Classify(plain), torch.ones((), requires_grad=True)
    for loss in (Loss(total.detach(), 4), Loss(total, 0)):
        with pytest.raises(UserError) as raised:
            check_loss(task, loss)
        assert not raised.value.everywhere
    with pytest.raises(UserError) as raised:
        check_sums(task, {"loss": 0.5})
    assert not raised.value.everywhere


@pytest.mark.parametrize(
    ("how", "noted"),
    [("sum", False), ("mean", True), ("sum of squares", False), ("mean, counted by a tensor", True)],
)
def test_a_loss_that_looks_like_a_mean_is_noted(
    how: str, noted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(Classify):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
            found = super().loss(model, batch, progress)
            if how == "sum of squares":
                return Loss(model(batch[0]).square().sum(), len(batch[0]))
            total = found.sum / len(batch[0]) if "mean" in how else found.sum
            return Loss(total, torch.tensor(len(batch[0])) if "tensor" in how else len(batch[0]))

    with caplog.at_level("WARNING", logger="ddptrain"):
        Fit(PLAN, task=Own).run(World(), tmp_path)
    assert ("Loss.sum looks like a mean" in caplog.text) == noted


def test_a_count_that_is_zero_later(tmp_path: Path) -> None:
    class Wrong(Classify):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
            return Loss(super().loss(model, batch, progress).sum, 20 if progress.step < 2 else 0)

    assert "Task.loss: count is 0" in refused(tmp_path, Wrong)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_int_that_is_another_for_each_sample(ranks: int, tmp_path: Path) -> None:
    """The gradients would be those of another mean."""

    class Wrong(Classify):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
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
    **{
        f"the engine's {name}": (Report({"accuracy": 1.0, name: 1.0}), f"metrics: {name} is one of the")
        for name in ("step", "epoch", "samples", "split")
    },
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


def test_numbers_of_numpy_are_saved_as_pythons(tmp_path: Path) -> None:
    """A metric of scikit-learn's is a float of NumPy's, which no checkpoint could give back."""

    class Own(Classify):
        def report(self, sums: Mapping[str, Tensor]) -> Report:
            of_torch = super().report(sums).metrics
            accuracy, loss = np.float64(of_torch["accuracy"]), np.float32(of_torch["loss"])
            return Report({"accuracy": accuracy, "loss": loss, "count": np.int64(sums["count"])})

    observers = [Jsonl()]
    Fit(replace(PLAN, save_every=2), task=Own, observers=observers).run(World(), tmp_path)
    for path in (tmp_path / "step-4", tmp_path / "best"):
        assert {type(value) for value in read(path).manifest["metrics"].values()} == {float, int}
        assert type(unpack(read(path))["best"]) is float


COUNTS: dict[str, Any] = {
    "an int, then a tensor": lambda step, n: n if step < 2 else torch.tensor(n),
    "a tensor, then an int": lambda step, n: torch.tensor(n) if step < 2 else n,
    "an int, then a float": lambda step, n: n if step < 2 else n / 2,
}


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_count_is_always_of_one_kind(kind: str, ranks: int, tmp_path: Path) -> None:
    class Wrong(Classify):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
            return Loss(super().loss(model, batch, progress).sum, COUNTS[kind](progress.step, len(batch[1])))

    with pytest.raises((UserError, RankFailed), match=r"count is \w+, and was (Tensor|int) before"):
        run_ranks(lambda world: Fit(PLAN, task=Wrong).run(world, tmp_path), ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_weighted_mean_does_not_depend_on_the_scale_of_its_weights(ranks: int, tmp_path: Path) -> None:
    """Also where they add up to less than one."""

    def trained(scale: float) -> tuple[Tensor, list[dict[str, Any]]]:
        class Weighted(Classify):
            def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
                features, labels = batch
                weights = scale * (1 + labels)
                each = nn.functional.cross_entropy(model(features), labels, reduction="none")
                return Loss((weights * each).sum(), weights.sum())

        folder = tmp_path / str(scale)

        def rank(world: World) -> Tensor:
            observers = [Jsonl()] if world.is_first else []
            plan = replace(PLAN, log_every=1)
            return weights_of(Fit(plan, task=Weighted, observers=observers).run(world, folder)[0])

        folder.mkdir()
        return run_ranks(rank, ranks)[0], read_lines(folder / "metrics.jsonl")

    (usual, lines), (small, others) = trained(1.0), trained(2.0**-12)
    torch.testing.assert_close(small, usual, rtol=0, atol=1e-6)
    losses, others_losses = ([line["loss"] for line in of] for of in (lines, others))
    assert others_losses == pytest.approx(losses, rel=1e-5)


def kinds_of_results() -> dict[str, tuple[Tensor | Rows, Tensor | Rows]]:
    ones = torch.ones
    return {
        "an int and a sum": (torch.tensor(3), torch.tensor(0.0)),
        "counts of two shapes": (ones(3).long(), ones(4).long()),
        "counts that broadcast": (ones(1).long(), ones(4).long()),
        "rows and a sum": (Rows(ones(2)), torch.tensor(0.0)),
        "rows of two dtypes": (Rows(ones(2).long()), Rows(ones(2))),
        "rows of two shapes": (Rows(ones(2, 3)), Rows(ones(2, 4))),
    }


@pytest.mark.parametrize("kind", kinds_of_results())
@pytest.mark.parametrize("ranks", [1, 2])
def test_results_of_an_evaluation_are_of_one_kind(kind: str, ranks: int, tmp_path: Path) -> None:
    """In all batches, whichever rank has them."""
    usual, other = kinds_of_results()[kind]

    class Wrong(Classify):
        def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Any]:
            return {**super().evaluate(model, batch), "own": usual if len(batch[1]) == 40 else other}

    plan = replace(PLAN, eval_batch_size=40)  # of 101: the last one has 21
    with pytest.raises((UserError, RankFailed), match=r"Wrong.evaluate: 'own' is .* in one batch and "):
        run_ranks(lambda world: Fit(plan, task=Wrong).run(world, tmp_path), ranks)


def test_a_model_that_the_task_keeps_is_not_trained_by_each_rank_for_itself(tmp_path: Path) -> None:
    class Bare(Classify):
        def build(self) -> nn.Module:
            self._own = super().build()
            return self._own

        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
            return super().loss(self._own, batch, progress)

    with pytest.raises(RankFailed, match=r"Bare.loss: has not called the model that it was given"):
        run_ranks(lambda world: Fit(PLAN, task=Bare).run(world, tmp_path), 2)
    Fit(PLAN, task=Bare).run(World(), tmp_path / "alone")


@pytest.mark.parametrize("given", [0, 5])
def test_batches_that_end_too_early(given: int, tmp_path: Path) -> None:
    class Short(Vectors):
        def train_batches(self, sampler: Sampler, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
            return islice(super().train_batches(sampler, steps), given)

    plan = replace(PLAN, micro_batch=10)
    with pytest.raises(UserError, match=r"Short.train_batches: ended before the last step"):
        Fit(plan).train(Classify(plain), Short(60), World(), tmp_path)


def test_a_share_in_place_of_a_micro_batch(tmp_path: Path) -> None:
    class Whole(Vectors):
        def train_batches(self, sampler: Sampler, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
            return super().train_batches(replace(sampler, micro_batch=None), steps)

    plan = replace(PLAN, micro_batch=5)
    said = r"Whole.train_batches: gave 20 samples for a micro-batch of 5"
    with pytest.raises(UserError, match=said) as caught:
        Fit(plan).train(Classify(plain), Whole(60), World(), tmp_path)
    assert not caught.value.everywhere  # another rank's share may be one micro-batch
