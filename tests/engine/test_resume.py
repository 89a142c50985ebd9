"""A resume is the same run (design promise 4): bit for bit, on the CPU."""

from pathlib import Path
from typing import Any

import pytest
from compare import assert_same
from toy import Fit, auto, lr_schedule, newest_state, run_killed_at, with_noise

from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.observe.jsonl import Jsonl

PLAN = Plan(
    steps=24, train_size=100, batch_size=30, micro_batch=8, eval_every=7, save_every=5, log_every=3,
    clip_norm=1.0, seed=5,
)  # fmt: skip
ADAMW: dict[str, Any] = {"_target_": "torch.optim.AdamW", "lr": 0.01}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("sched", "precision"),
    [("cosine", "fp32"), ("step", "bf16"), ("onecycle", "fp32")],
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    tmp_path: Path, ranks: int, sched: str, precision: str
) -> None:
    def run(folder: Path, stop_at: int | None = None) -> None:
        def rank(world: World) -> None:
            fit = Fit(
                PLAN, make_model=with_noise, optim=ADAMW, sched=lr_schedule(name=sched, warmup=0.2), ema=0.9,
                precision=precision, strategy=auto(bucket_cap_mb=0.001),  # several buckets
                observers=[Jsonl()] if world.is_first else [],
            )  # fmt: skip
            fit.run(world, folder, stop_at if world.is_first else None)

        run_killed_at(stop_at, rank, ranks, folder)

    run(tmp_path / "whole")
    run(tmp_path / "stopped", stop_at=5)
    run(tmp_path / "stopped", stop_at=15)
    run(tmp_path / "stopped")
    assert_same(newest_state(tmp_path / "whole"), newest_state(tmp_path / "stopped"))
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (
        tmp_path / "stopped/metrics.jsonl"
    ).read_bytes()
