"""A loss or gradient that is not finite: the same decision on all ranks at the same step."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from rates import Rates
from toy import (
    CLASSES,
    FEATURES,
    Classify,
    Fit,
    Vectors,
    lr_schedule,
    newest_state,
    plain,
    run_killed_at,
    weights,
    with_noise,
)

from ddptrain.api.recipe import Loss, Progress
from ddptrain.api.world import World
from ddptrain.engine.compiled import compile_loss
from ddptrain.engine.plan import Plan
from ddptrain.errors import Diverged
from ddptrain.testing import run_ranks

BAD_STEP, BAD_RANK = 6, 1
CONSTANT = lr_schedule("constant")


def plan(**changes: Any) -> Plan:
    return Plan(**{"steps": 15, "train_size": 100, "batch_size": 24, "log_every": 1, "seed": 2, **changes})


class Bad(Classify):
    """Something is not finite on one rank, from one step on."""

    how = "input"
    rank = BAD_RANK
    steps = (BAD_STEP,)

    def loss(self, model: torch.nn.Module, batch: Any, progress: Progress) -> Loss:
        features, labels = batch
        here = progress.step in self.steps and self.rank == _rank()
        if here and self.how == "input":
            features = features * float("nan")
        logits = model(features)
        if here and self.how == "gradient":
            logits.register_hook(lambda gradient: gradient * float("inf"))
        if here and self.how == "layer":
            logits = torch.where(labels[:, None] >= 0, torch.log(logits * 0), logits)
        total = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        return Loss(total, len(labels))


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else BAD_RANK


def bad(how: str, steps: tuple[int, ...] = (BAD_STEP,)) -> type[Bad]:
    return type("Bad", (Bad,), {"how": how, "steps": steps})


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("input", "the output of 0 (Linear)"),
        ("layer", "the loss, though all outputs are finite"),
        ("gradient", "the gradient of 4.bias, though the loss is finite"),
    ],
)
def test_it_is_seen_at_its_step_on_all_ranks_and_named(
    tmp_path: Path, ranks: int, how: str, where: str
) -> None:
    def rank(world: World) -> tuple[str, Any, list[list[int]]]:
        fit = Fit(plan(log_every=100), task=bad(how), make_model=with_noise)
        with pytest.raises(Diverged) as caught:
            fit.run(world, tmp_path / f"{how}{ranks}-{world.rank}")
        asked = plan().sampler(world).samples(range(BAD_STEP, BAD_STEP + 1), torch.device("cpu"))
        return str(caught.value), caught.value.evidence, [ids.tolist() for ids, _ in asked]

    results = run_ranks(rank, ranks)
    bad_rank = BAD_RANK if ranks > 1 else 0
    for message, evidence, _ in results:
        assert message.startswith(f"step {BAD_STEP + 1} is not finite. First in rank {bad_rank}: {where}: ")
        assert evidence["step"] == BAD_STEP + 1
        assert [entry["samples"] for entry in evidence["ranks"]] == [ids[0] for _, _, ids in results]
        assert [entry["rank"] for entry in evidence["ranks"] if entry["first"]] == [bad_rank]


@pytest.mark.parametrize("ranks", [1, 2])
def test_data_that_are_not_finite_are_named_by_their_sample(tmp_path: Path, ranks: int) -> None:
    broken = 41

    def rank(world: World) -> str:
        fit, data = Fit(plan(micro_batch=5, log_every=100), make_model=with_noise), Vectors(100)
        data.features[broken, 3] = float("inf")
        with pytest.raises(Diverged) as caught:
            fit.train(Classify(with_noise), data, world, tmp_path / f"{ranks}-{world.rank}")
        return str(caught.value)

    for message in run_ranks(rank, ranks):
        assert f": the input of training sample {broken}: the data are not finite. Mend or remove" in message
        assert "optim.lr" not in message


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("how", "precision"), [("input", "fp32"), ("gradient", "fp32"), ("gradient", "fp16")]
)
def test_a_left_out_step_leaves_no_trace_but_its_number(
    tmp_path: Path, ranks: int, how: str, precision: str
) -> None:
    """The weights and buffers are those of a run that stands still for one step; the schedule goes on.
    fp16's scaler leaves steps out by itself."""
    skips = precision == "fp32"

    def rank(world: World) -> tuple[list[float], Any]:
        rates = Rates()
        at_skip: dict[int, Any] = {}

        class Watched(bad(how)):  # type: ignore[misc]
            def loss(self, model: torch.nn.Module, batch: Any, progress: Progress) -> Loss:
                bare = getattr(model, "module", model)
                bare = getattr(bare, "model", bare)
                at_skip[progress.step] = {n: v.clone() for n, v in bare.state_dict().items()}
                return super().loss(model, batch, progress)

        fit = Fit(
            plan(skips_nonfinite=skips), task=Watched, make_model=with_noise, precision=precision,
            sched=lr_schedule("cosine", warmup=0.2), observers=[rates] if world.is_first else [],
        )  # fmt: skip
        state, _, _ = fit.run(world, tmp_path / f"{how}{precision}{ranks}-{world.rank}")
        assert (state.step, state.left_out) == (15, 1)
        assert all(bool(v.isfinite().all()) for v in state.model.state_dict().values())
        before, after = at_skip[BAD_STEP], at_skip[BAD_STEP + 1]
        moved = [n for n in before if not torch.equal(before[n], after[n]) and "running" not in n]
        assert [n for n in moved if "num_batches" not in n] == []
        if skips and world.is_first:  # DDP makes rank 0's buffers the truth
            assert_same(before, after)
        return rates.seen, state.model.state_dict()

    results = run_ranks(rank, ranks)
    keep = Rates()
    Fit(plan(), make_model=with_noise, sched=lr_schedule("cosine", warmup=0.2), observers=[keep]).run(
        World(), tmp_path / "good"
    )
    assert results[0][0] == keep.seen
    for _, model in results:
        own = {n: v for n, v in model.items() if "running" not in n and "num_batches" not in n}
        assert_same(own, {n: results[0][1][n] for n in own})


def test_a_skipping_run_that_is_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    def final(folder: Path, *stops: int) -> Any:
        for stop_at in (*stops, None):
            fit = Fit(
                plan(skips_nonfinite=True, save_every=2),
                task=bad("input", (5, 6)),
                make_model=with_noise,
                ema=0.9,
            )
            run_killed_at(stop_at, partial(fit.run, folder=folder, stop_at=stop_at), 1, folder)
        return newest_state(folder)

    whole = final(tmp_path / "whole")
    assert (whole["step"], whole["left_out"], whole["left_out_in_a_row"]) == (15, 2, 0)
    assert_same(whole, final(tmp_path / "killed", 6, 8))


def test_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    def rank(world: World) -> str:
        steps = (2, 5, 6, 7, 8)
        fit = Fit(plan(skips_nonfinite=True, nonfinite_limit=3), task=bad("input", steps))
        with pytest.raises(Diverged) as caught:
            fit.run(world, tmp_path / str(world.rank))
        return str(caught.value)

    first, second = run_ranks(rank, 2)
    assert first == second
    assert first.startswith(
        "step 9 is not finite and 3 before it were skipped for the same reason. First in rank 1"
    )


def test_the_mean_loss_is_over_what_is_finite(tmp_path: Path) -> None:
    class Losses(Rates):
        def log(self, event: Any) -> None:
            self.seen.append(event.values["loss"])

    keep = Losses()
    fit = Fit(plan(skips_nonfinite=True, log_every=5), task=bad("input"), make_model=plain, observers=[keep])
    state, _, _ = fit.run(World(), tmp_path)
    assert all(0 < loss < 3 for loss in keep.seen)
    assert bool(weights(state).isfinite().all())


@pytest.mark.long
def test_what_only_compiled_code_computes_is_laid_at_its_door(tmp_path: Path) -> None:
    class Miscompiled(Classify):
        def loss(self, model: torch.nn.Module, batch: Any, progress: Progress) -> Loss:
            loss = super().loss(model, batch, progress)
            wrong = float("nan") if torch.compiler.is_compiling() else 1.0
            return Loss(loss.sum * wrong, loss.count)

    task = Miscompiled(plain)
    compile_loss(task)
    with pytest.raises(Diverged, match=r"repeated without torch\.compile.* Use compile=off"):
        Fit(plan()).train(task, Vectors(100), World(), tmp_path)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_first_step_may_be_left_out(tmp_path: Path, precision: str) -> None:
    """Fused SGD's momentum begins there, with whatever lies in memory if nobody writes to it."""
    how = "input" if precision == "fp32" else "gradient"
    for trial in range(5):
        fit = Fit(plan(skips_nonfinite=True, steps=6), task=bad(how, (0,)), precision=precision)
        state, _, _ = fit.run(World(), tmp_path / str(trial))
        assert state.left_out == 1
        assert weights(state).abs().max() < 10


def test_what_fp16s_scaler_left_out_before_is_another_matter(tmp_path: Path) -> None:
    class Overflows(Bad):
        def loss(self, model: torch.nn.Module, batch: Any, progress: Progress) -> Loss:
            self.how = "input" if progress.step == BAD_STEP else "gradient"
            return super().loss(model, batch, progress)

    task = type("Late", (Overflows,), {"steps": range(BAD_STEP - 2, BAD_STEP + 1)})
    with pytest.raises(Diverged, match=r"^step 7 is not finite\. First in .*nonfinite=skip"):
        Fit(plan(), task=task, precision="fp16").run(World(), tmp_path)


def test_fp16_leaves_out_a_loss_that_is_not_finite_too(tmp_path: Path) -> None:
    class BadLoss(Bad):
        def loss(self, model: torch.nn.Module, batch: Any, progress: Progress) -> Loss:
            loss = super().loss(model, batch, progress)
            # finite gradients: the infinite part hangs on no weight
            return Loss(loss.sum + (float("inf") if progress.step == 3 else 0.0), loss.count)

    seen: dict[int, Any] = {}

    class Watched(BadLoss):
        def loss(self, model: torch.nn.Module, batch: Any, progress: Progress) -> Loss:
            seen[progress.step] = [p.detach().clone() for p in model.parameters()]
            return super().loss(model, batch, progress)

    for precision in ("fp32", "fp16"):
        seen.clear()
        fit = Fit(plan(skips_nonfinite=True, steps=6), task=bad_task(Watched), precision=precision)
        state, _, _ = fit.run(World(), tmp_path / precision)
        assert state.left_out == 1
        assert_same(seen[3], seen[4])


def bad_task(kind: type[Bad]) -> type[Bad]:
    return type("Named", (kind,), {"steps": ()})


def test_the_average_stands_still_with_the_weights(tmp_path: Path) -> None:
    fit = Fit(plan(skips_nonfinite=True, steps=9), task=bad("input", (6, 7, 8)), ema=0.9, sched=CONSTANT)
    state, _, _ = fit.run(World(), tmp_path / "to the end")
    until = Fit(plan(skips_nonfinite=True, steps=6), ema=0.9, sched=CONSTANT)
    earlier, _, _ = until.run(World(), tmp_path / "to the sixth step")
    assert (state.left_out, earlier.left_out) == (3, 0)
    assert_same(state.average.state_dict(), earlier.average.state_dict())


@pytest.mark.parametrize("kind", ["complex", "sparse"])
def test_a_gradient_may_be_sparse_or_complex_from_a_later_step_on(kind: str, tmp_path: Path) -> None:
    class Late(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(FEATURES, CLASSES)
            self.rows = torch.nn.Embedding(7, CLASSES, sparse=kind == "sparse")
            kept = torch.complex64 if kind == "complex" else torch.float32
            self.turn = torch.nn.Parameter(torch.ones(CLASSES, dtype=kept))
            self.passes = 0

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.first(features)
            self.passes += self.training
            if self.passes < 6:  # a warm-up pass and some steps
                return logits
            ids = features[:, 0].abs().long().clamp(max=6)
            return (logits * self.turn).real if kind == "complex" else logits + self.rows(ids)

    sgd = {"_target_": "torch.optim.SGD", "lr": 0.1, "foreach": False, "fused": False}
    state, _, _ = Fit(plan(steps=9), make_model=Late, optim=sgd).run(World(), tmp_path)
    assert state.left_out == 0
    assert state.model.get_parameter("turn" if kind == "complex" else "rows.weight").grad is not None


def test_sparse_and_complex_gradients_are_looked_at_too(tmp_path: Path) -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.Embedding(7, 5, sparse=True)
            self.turn = torch.nn.Parameter(torch.ones(5, dtype=torch.complex64))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return (self.rows(features[:, 0].abs().long().clamp(max=6)) * self.turn).real

    for steps in ((), (3,)):
        fit = Fit(
            plan(steps=6), task=bad("gradient", steps), make_model=Mixed,
            optim={"_target_": "torch.optim.SGD", "lr": 0.1, "foreach": False, "fused": False},
        )  # fmt: skip
        if not steps:
            state, _, _ = fit.run(World(), tmp_path / "good")
            assert state.left_out == 0
        else:
            with pytest.raises(Diverged, match="step 4 is not finite"):
                fit.run(World(), tmp_path / "bad")


def test_a_scale_that_is_too_large_is_what_ends_an_fp16_run(tmp_path: Path) -> None:
    """Without it the step is finite: neither the rate nor the device is to blame."""

    class Large(Classify):
        def loss(self, model: torch.nn.Module, batch: Any, progress: Progress) -> Loss:
            loss = super().loss(model, batch, progress)
            return Loss(1e3 * loss.sum, loss.count)

    with pytest.raises(Diverged, match=r"without fp16's scale, .*scaled gradients overflow.*nonfinite_limit"):
        Fit(plan(nonfinite_limit=2), task=Large, precision="fp16").run(World(), tmp_path)
