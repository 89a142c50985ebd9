"""Gradients as thin factors: what arrives, what is left for the next step, and how a run goes on with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from torch import Tensor, nn
from toy import Classify, Fit, auto

from ddptrain.api.recipe import At, Loss
from ddptrain.api.world import World
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.plan import Plan
from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.strategies.make_strategy import make_strategy
from ddptrain.testing import RankFailed, run_ranks


def powersgd(rank: int = 1, bucket_cap_mb: float = 0.004, static_graph: bool = False) -> dict[str, Any]:
    """Of several buckets."""
    return auto(
        compression="powersgd", powersgd_rank=rank, bucket_cap_mb=bucket_cap_mb, static_graph=static_graph
    )


class Linears(nn.Module):
    """Layers of which each gets the gradient that it is given, so that a test knows what is to arrive."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 16) for _ in range(count))

    def forward(self, given: list[Tensor]) -> Tensor:
        pairs = zip(self.parameters(), given, strict=True)
        return torch.stack([(parameter * gradient).sum() for parameter, gradient in pairs]).sum()


def gradients(model: nn.Module, step: int, rank: int, columns: int | None = None) -> list[Tensor]:
    """One for each parameter. columns: the rank of matrices, with rows in a span that all ranks and steps
    share."""
    made = []
    for i, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + 10 * i + rank)
        common = torch.Generator().manual_seed(i)
        if columns is None or parameter.dim() == 1:
            made.append(torch.randn(parameter.shape, generator=generator))
        else:
            left = torch.randn(len(parameter), columns, generator=generator)
            made.append(left @ torch.randn(columns, parameter.shape[1], generator=common))
    return made


def sent(
    world: World,
    config: dict[str, Any],
    layers: int,
    steps: int,
    columns: int | None = None,
    zero_until: int = 0,
) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """What DDP leaves as gradients, step by step, and what this rank has not sent at the end. zero_until: the
    step before which the first one is zero."""
    strategy = make_strategy(config, world)
    model = Linears(layers)
    wrapped = strategy.wrap(model)
    found = []
    for step in range(steps):
        given = gradients(model, step, world.rank, columns)
        loss = wrapped([given[0] * (step >= zero_until), *given[1:]])
        model.zero_grad(set_to_none=True)
        sent_flags = strategy.send_flags(wrapped, step, False, loss)
        assert sent_flags is not None
        torch.autograd.backward([loss, sent_flags[0]], [torch.ones(()), sent_flags[1]])
        flags = strategy.receive_flags(wrapped)
        assert flags is not None
        assert strategy.same_step(flags.tolist()[1], step)
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    left = {n: v for n, v in strategy.rank_state().items() if n.startswith("left_out")}
    return found, left


def mean(step: int, ranks: int, layers: int, columns: int | None = None) -> list[Tensor]:
    model = Linears(layers)
    each = [gradients(model, step, rank, columns) for rank in range(ranks)]
    return [torch.stack(values).mean(dim=0) for values in zip(*each, strict=True)]


@pytest.mark.parametrize(("size", "static_graph", "columns"), [(2, False, 2), (3, True, 2), (2, False, 1)])
def test_a_matrix_of_its_rank_or_less_arrives_as_it_is(size: int, static_graph: bool, columns: int) -> None:
    """And so does what is no matrix, at any rank. Six layers in as many buckets: with torch's own hook they
    wait for each other for ever."""
    config = powersgd(rank=2, bucket_cap_mb=0.001, static_graph=static_graph)
    for arrived, left in run_ranks(lambda world: sent(world, config, 6, 5, columns), size):
        for step, found in enumerate(arrived):
            for value, expected in zip(found, mean(step, size, 6, columns), strict=True):
                torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
        assert len(left) == 6, "of biases nothing is left"


@pytest.mark.parametrize("layers", [1, 6])
def test_a_gradient_that_was_zero_arrives_too(layers: int) -> None:
    """Beside matrices that were not, in one bucket."""
    config = powersgd(rank=2, bucket_cap_mb=25.0)
    for arrived, _ in run_ranks(lambda world: sent(world, config, layers, 8, 2, zero_until=3), 2):
        assert not arrived[2][0].any()
        torch.testing.assert_close(arrived[7][0], mean(7, 2, layers, 2)[0], rtol=1e-4, atol=1e-4)


def test_what_is_left_out_arrives_later() -> None:
    """All that was ever sent and all that is left make up all gradients."""
    ranks = run_ranks(lambda world: sent(world, powersgd(), 3, 12), 2)
    (arrived, _), (other, _) = ranks
    assert_same(arrived, other)
    total = [sum(values) for values in zip(*arrived, strict=True)]
    expected = [sum(values) for values in zip(*(mean(step, 2, 3) for step in range(12)), strict=True)]
    for i, name in enumerate(dict(Linears(3).named_parameters())):
        left = [rest.get(f"left_out.{name}", torch.zeros(())) for _, rest in ranks]
        torch.testing.assert_close(total[i] + sum(left) / 2, expected[i], rtol=1e-3, atol=1e-3)
        assert name.endswith("bias") or 1 < float(left[0].norm()) < 100


def convolving() -> nn.Module:
    """Matrices, a convolution in channels_last, biases and BatchNorm."""
    return nn.Sequential(
        nn.Linear(12, 64), nn.BatchNorm1d(64), nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 16, 3, padding=1),
        nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(256, 5),
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return] # fmt: skip


PLAN = Plan(
    steps=18, train_size=100, batch_size=30, micro_batch=8, eval_every=7, save_every=5, log_every=100,
    clip_norm=1.0, seed=5,
)  # fmt: skip


def ran(folder: Path, ranks: int, fit: Fit, stop_at: int | None = None) -> dict[str, Any]:
    """The last checkpoint of a run, or of one that is killed."""
    try:
        run_ranks(lambda world: fit.run(world, folder, stop_at if world.is_first else None)[2], ranks)
    except RankFailed:
        assert stop_at is not None
    saved = Checkpointer(folder, keep=2).newest()
    assert saved is not None
    return unpack(saved)


@pytest.mark.parametrize(("ranks", "static_graph"), [(2, False), (3, False), (3, True)])
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path, ranks: int, static_graph: bool) -> None:
    fit = Fit(PLAN, make_model=convolving, strategy=powersgd(static_graph=static_graph), ema=0.9)
    whole = ran(tmp_path / "whole", ranks, fit)
    stopped = ran(tmp_path / "killed", ranks, fit, stop_at=5)
    assert all(len(rows) == ranks for rows in stopped["unsent"].values())
    assert any(float(rows.abs().max()) > 0 for rows in stopped["unsent"].values())
    ran(tmp_path / "killed", ranks, fit, stop_at=15)
    assert_same(whole, ran(tmp_path / "killed", ranks, fit))


def test_on_other_ranks_nothing_is_lost_and_without_powersgd_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = {"left_out.layers.0.weight": torch.randn(2, 16, 24), "right.layers.0.weight": torch.ones(2, 24, 1)}

    def handed(world: World) -> dict[str, Tensor]:
        strategy = make_strategy(powersgd(), world)
        strategy.wrap(Linears(1))
        strategy.scatter(rows)
        return dict(strategy.rank_state())

    for rank, rank_state in enumerate(run_ranks(handed, 2)):
        assert_same(rank_state, {name: rows[name][rank] for name in rows})
    for rank_state in run_ranks(handed, 3):
        assert_same(rank_state, {name: rows[name].mean(dim=0) for name in rows})
    with caplog.at_level("INFO", logger="ddptrain"):
        make_strategy(auto(), World()).scatter(rows)
    assert "powersgd has kept are dropped" in caplog.text
    fit = Fit(PLAN, make_model=convolving, strategy=powersgd())
    ran(tmp_path, 2, fit, stop_at=5)
    assert ran(tmp_path, 3, fit)["step"] == PLAN.steps


class Bad(Classify):
    """The loss is not finite, on one rank."""

    def loss(self, model: nn.Module, batch: Any, at: At) -> Loss:
        plain = super().loss(model, batch, at)
        bad = at.step in (6, 7) and torch.distributed.get_rank() == 1
        return Loss(plain.sum * float("nan"), plain.count) if bad else plain


def test_a_left_out_step_leaves_nothing_behind(tmp_path: Path) -> None:
    plan = replace(PLAN, steps=8, save_every=2, micro_batch=None, skips_nonfinite=True)
    ran(tmp_path, 2, Fit(plan, task=Bad, strategy=powersgd()))
    before, after = (unpack(read(tmp_path / f"step-{at}")) for at in (6, 8))
    assert (after["step"], after["applied"]) == (8, 6)
    assert_same(before["unsent"], after["unsent"])
    assert_same(before["model"], after["model"])


def test_it_learns_as_well(tmp_path: Path) -> None:
    plan = Plan(steps=150, train_size=500, batch_size=40, log_every=1000, seed=3)

    def accuracy(config: dict[str, Any]) -> float:
        fit = Fit(plan, strategy=config)
        folder = tmp_path / config.get("compression", "none")
        folder.mkdir()
        found: list[float] = run_ranks(
            lambda world: fit.run(world, folder / str(world.rank))[2].metrics["accuracy"], 2
        )
        return found[0]

    assert accuracy(powersgd()) > accuracy(auto()) - 0.03
