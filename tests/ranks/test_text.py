"""Language models on several ranks, and after a stop: the same training, the hidden states included."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from texts import language_model, write_text
from toy import Fit, auto, lr_schedule, newest_state, run_killed_at, weights

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.engine.evaluate import OwnBatches, evaluate
from ddptrain.engine.plan import Plan
from ddptrain.engine.precision import Precision
from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.observe.jsonl import Jsonl
from ddptrain.testing import run_ranks

ROWS = 12
ADAMW: dict[str, Any] = {"_target_": "torch.optim.AdamW", "lr": 0.01}
MODELS = ["lstm", *(pytest.param(name, marks=pytest.mark.long) for name in ("gru", "rnn")), "transformer"]


def plan(text: Path, steps: int, **changes: Any) -> Plan:
    _, data = language_model(text)
    data.prepare(World(), 0)
    return Plan(steps=steps, train_size=data.train_size, batch_size=ROWS, seed=3, **changes)


def trained(
    text: Path, model: str, size: int, micro_batch: int | None, dtype: torch.dtype
) -> list[tuple[torch.Tensor, dict[str, float]]]:
    calendar = plan(text, 30, micro_batch=micro_batch, eval_batch_size=5)

    def rank(world: World) -> tuple[torch.Tensor, dict[str, float]]:
        fit = Fit(calendar, optim={"_target_": "torch.optim.SGD", "lr": 0.3, "momentum": 0.9})
        folder = Path(tempfile.mkdtemp(dir=text.parent)) if world.is_first else text.parent / "unused"
        state, report = fit.train(*language_model(text, model, dtype=dtype), world, folder)
        return weights(state), dict(report.metrics)

    return run_ranks(rank, size)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(torch.float32, 1e-5, id="float32", marks=pytest.mark.long),
        pytest.param(torch.float64, 1e-11, id="float64"),
    ],
)
@pytest.mark.parametrize("model", ["lstm", pytest.param("transformer", marks=pytest.mark.long)])
def test_ranks_and_accumulation_change_neither_weights_nor_perplexity(
    tmp_path: Path, model: str, dtype: torch.dtype, tolerance: float
) -> None:
    text = write_text(tmp_path / "text.txt")
    [(expected, metrics)] = trained(text, model, 1, None, dtype)
    assert metrics["perplexity"] < 20, "of 256 byte values: it has learnt"
    for size in (1, 2, 4):
        for pieces in (1, 2):
            for found, found_metrics in trained(text, model, size, ROWS // size // pieces, dtype):
                difference = ((found - expected).norm() / expected.norm()).item()
                assert difference < tolerance, f"{size} ranks, {pieces} micro-batches: {difference}"
                for name, value in metrics.items():
                    assert f"{found_metrics[name]:.4f}" == f"{value:.4f}"


@pytest.mark.parametrize("model", MODELS)
def test_one_model_is_judged_alike_on_any_world(tmp_path: Path, model: str) -> None:
    text = write_text(tmp_path / "text.txt")

    def rank(world: World) -> dict[str, float]:
        task, data = language_model(text, model)
        data.prepare(world, 0)
        torch.manual_seed(1)
        batches = OwnBatches(data, data.valid_size, 3, world)
        precision = Precision("fp32", world.device)
        return dict(evaluate(task, task.build(), batches, precision, Watchdog(world)).metrics)

    alone = run_ranks(rank, 1)
    for size in (2, 3):
        assert run_ranks(rank, size) == alone * size


@pytest.mark.parametrize("order", ["streams", "shuffled"])
def test_global_batches_do_not_depend_on_the_number_of_ranks(tmp_path: Path, order: str) -> None:
    _, data = language_model(write_text(tmp_path / "text.txt"), data={"order": order})
    data.prepare(World(), 5)
    steps = range(40, 44)

    def global_batches(size: int, micro_batch: int | None) -> list[torch.Tensor]:
        samplers = [Sampler(data.train_size, ROWS, 5, rank, size, micro_batch) for rank in range(size)]
        ranks = [iter(data.train_batches(sampler, steps)) for sampler in samplers]
        return [
            torch.cat(
                [
                    next(batches).tokens
                    for sampler, batches in zip(samplers, ranks, strict=True)
                    for _ in sampler.micro_sizes
                ]
            )
            for _ in steps
        ]

    alone = global_batches(1, None)
    for size, micro_batch in ((1, 5), (2, None), (3, 2), (5, None)):
        assert_same(global_batches(size, micro_batch), alone)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    ("model", "precision", "order"),
    [
        ("lstm", "bf16", "streams"),
        pytest.param("gru", "fp32", "streams", marks=pytest.mark.long),
        pytest.param("transformer", "fp32", "shuffled", marks=pytest.mark.long),
        pytest.param("transformer", "fp32", "streams", marks=pytest.mark.long),
    ],
)
def test_a_stopped_run_goes_on_with_the_states_it_had(
    tmp_path: Path, ranks: int, model: str, precision: str, order: str
) -> None:
    text = write_text(tmp_path / "text.txt")
    calendar = plan(text, 24, micro_batch=3, eval_every=7, save_every=5, log_every=3, clip_norm=1.0)

    def run(folder: Path, stop_at: int | None = None) -> None:
        def rank(world: World) -> None:
            fit = Fit(
                calendar, optim=ADAMW, sched=lr_schedule(warmup=0.2), ema=0.9, precision=precision,
                strategy=auto(bucket_cap_mb=0.001),  # several buckets
                observers=[Jsonl()] if world.is_first else [],
            )  # fmt: skip
            task, data = language_model(text, model, data={"order": order}, dropout=0.2)
            fit.train(task, data, world, folder, stop_at if world.is_first else None)

        run_killed_at(stop_at, rank, ranks, folder)

    run(tmp_path / "whole")
    run(tmp_path / "stopped", stop_at=5)
    run(tmp_path / "stopped", stop_at=15)
    run(tmp_path / "stopped")
    whole, stopped = newest_state(tmp_path / "whole"), newest_state(tmp_path / "stopped")
    if order == "streams":
        assert all(len(rows) == ROWS for rows in whole["carried"].values())
        assert whole["carried"]
    assert_same(whole, stopped)
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "stopped")]
    assert metrics[0] == metrics[1]


def test_states_follow_their_streams_to_another_number_of_ranks(tmp_path: Path) -> None:
    """Stopped on three ranks, gone on with on two and one: equal to rounding, so no state went astray."""
    text = write_text(tmp_path / "text.txt")
    calendar = plan(text, 20, save_every=8)

    def run(folder: Path, size: int, stop_at: int | None = None) -> torch.Tensor | None:
        def rank(world: World) -> torch.Tensor:
            task, data = language_model(text)
            return weights(Fit(calendar).train(task, data, world, folder, stop_at)[0])

        if stop_at is not None:
            run_killed_at(stop_at, rank, size, folder)
            return None
        return run_ranks(rank, size)[0]

    whole = run(tmp_path / "whole", 3)
    run(tmp_path / "changed", 3, stop_at=8)
    run(tmp_path / "changed", 2, stop_at=16)
    changed = run(tmp_path / "changed", 1)
    assert whole is not None
    assert changed is not None
    assert ((whole - changed).norm() / whole.norm()).item() < 1e-5


def test_the_best_checkpoint_holds_the_states_of_its_own_step(tmp_path: Path) -> None:
    """Also where nothing else has been saved yet."""
    text = write_text(tmp_path / "text.txt")
    calendar = plan(text, 12, eval_every=12, save_every=100)

    def rank(world: World) -> None:
        task, data = language_model(text)
        Fit(calendar).train(task, data, world, tmp_path / "run")

    run_ranks(rank, 2)
    best, last = (unpack(read(tmp_path / "run" / name)) for name in ("best", "step-12"))
    assert best["carried"]["hidden"].shape == (ROWS, 2, 2, 16)
    assert_same(best["carried"], last["carried"])
