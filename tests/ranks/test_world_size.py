"""The number of GPUs does not change the training (design promise 2) nor its metrics (promise 3)."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Classify, CountPositives, Fit, Lasso, Vectors, auto, plain, weights

from ddptrain.api.recipe import Report, Rows
from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.testing import run_ranks

SAMPLES, BATCH, STEPS = 1003, 60, 40  # 1003 does not divide by 60, nor 60 by 7


def trained(
    tmp_path: Path, size: int, fit: Fit
) -> list[tuple[torch.Tensor, list[tuple[int, ...]], dict[str, float]]]:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))

    def rank(world: World) -> tuple[torch.Tensor, list[tuple[int, ...]], dict[str, float]]:
        state, data, report = fit.run(world, folder)
        return weights(state), [tuple(ids.tolist()) for ids in data.asked], dict(report.metrics)

    return run_ranks(rank, size)


def plan(micro_batch: int | None = None) -> Plan:
    return Plan(
        steps=STEPS, train_size=SAMPLES, batch_size=BATCH, micro_batch=micro_batch, eval_batch_size=32, seed=3
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(torch.float32, 1e-5, id="float32", marks=pytest.mark.long),
        pytest.param(torch.float64, 1e-12, id="float64"),
    ],
)
@pytest.mark.parametrize(
    "task", [None, CountPositives, Lasso], ids=["host-count", "device-count", "penalty-on-all-parameters"]
)
def test_any_split_of_the_global_batch_gives_the_same_weights(
    tmp_path: Path, dtype: torch.dtype, tolerance: float, task: type[Classify] | None
) -> None:
    def fit(micro_batch: int | None) -> Fit:
        made = Fit(plan(micro_batch), make_model=lambda: plain(dtype), dtype=dtype)
        if task is not None:
            made.task = task
        return made

    [(expected, _, metrics)] = trained(tmp_path, 1, fit(None))
    for size in (1, 2, 3):
        for micro_batch in (None, -(-BATCH // size // 4)):
            for found, _, found_metrics in trained(tmp_path, size, fit(micro_batch)):
                difference = ((found - expected).norm() / expected.norm()).item()
                assert difference < tolerance, f"{size} ranks, micro-batch {micro_batch}: {difference}"
                assert found_metrics["accuracy"] == metrics["accuracy"]
                assert found_metrics["loss"] == pytest.approx(metrics["loss"], rel=10 * tolerance)


def test_global_batches_hold_the_same_samples_in_the_same_order(tmp_path: Path) -> None:
    [(_, alone, _)] = trained(tmp_path, 1, Fit(plan()))
    for size, micro_batch in ((1, 15), (2, None), (3, None), (3, 5)):
        ranks = trained(tmp_path, size, Fit(plan(micro_batch)))
        per_step = [len(asked) // STEPS for _, asked, _ in ranks]
        for step in range(STEPS):
            together: tuple[int, ...] = ()
            for (_, asked, _), count in zip(ranks, per_step, strict=True):
                for micro in asked[step * count : (step + 1) * count]:
                    together += micro
            assert together == alone[step]


def test_evaluating_one_model_gives_the_same_digits_on_any_world(tmp_path: Path) -> None:
    """Also with fewer validation batches than ranks."""
    for eval_batch_size in (7, 64, 1000):
        chosen = Plan(steps=1, train_size=50, batch_size=12, eval_batch_size=eval_batch_size, seed=1)
        frozen = Fit(chosen, optim={"_target_": "torch.optim.SGD", "lr": 0.0})
        results = {size: [m for _, _, m in trained(tmp_path, size, frozen)] for size in (1, 2, 3, 4)}
        for size, metrics in results.items():
            assert all(m == results[1][0] for m in metrics), f"{size} ranks: {metrics} != {results[1][0]}"


class InOrder(Classify):
    """Reports the rows that it is given, each with its place."""

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Rows]:
        return {"rows": Rows(batch[0][:, 0])}

    def report(self, sums: Mapping[str, Any]) -> Report:
        places = torch.arange(len(sums["rows"]))
        return Report({"accuracy": float((sums["rows"] * places).sum())})


def test_rows_come_in_the_order_of_the_set(tmp_path: Path) -> None:
    chosen = Plan(steps=1, train_size=50, batch_size=12, eval_batch_size=7, seed=1)
    fit = Fit(chosen, task=InOrder, dtype=torch.float64, make_model=lambda: plain(torch.float64))
    values = Vectors(chosen.train_size, dtype=torch.float64).features[chosen.train_size :, 0]
    for size in (1, 2, 3):
        for _, _, metrics in trained(tmp_path, size, fit):
            assert metrics["accuracy"] == float((values * torch.arange(len(values))).sum())


@pytest.mark.parametrize("compression", ["bf16", "fp16"])
def test_compressed_gradients_train_alike(tmp_path: Path, compression: str) -> None:
    [(expected, _, _)] = trained(tmp_path, 1, Fit(plan()))
    fit = Fit(plan(), strategy=auto(compression=compression))
    (found, _, _), (other, _, _) = trained(tmp_path, 2, fit)
    assert torch.equal(found, other)
    distance = ((found - expected).norm() / expected.norm()).item()
    rounding = torch.finfo(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[compression])).eps
    assert rounding / 100 < distance < 10 * rounding  # uncompressed it is below 1e-6


def test_a_batch_smaller_than_the_world_is_refused() -> None:
    from ddptrain.errors import UserError

    with pytest.raises(UserError, match=r"train.batch_size=2: .* 3 ranks"):
        Plan(steps=1, train_size=10, batch_size=2).sampler(World(rank=0, size=3))
