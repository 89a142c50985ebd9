"""Models that are legal in PyTorch train the same on any number of ranks, killed or not, or are refused
before the first step. The table in docs/reliability.md is this file's."""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from toy import DIED, Fit, auto, newest_state, strict
from zoo import ZOO, Animal

from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.errors import UserError
from ddptrain.testing import RankFailed, run_ranks

SHARDS = 6  # as many on each of 1, 2 and 3 ranks
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}


class Trained(NamedTuple):
    tensors: dict[str, Tensor]
    metrics: dict[str, float]


def trained(
    animal: Animal,
    size: int,
    folder: Path,
    precision: str = "fp32",
    in_shards: bool = False,
    stop_at: int | None = None,
    lr: float = 0.1,
) -> list[Trained | str]:
    """By rank; a refusal is its message."""
    plan = Plan(
        steps=6, train_size=103, batch_size=24, eval_batch_size=40, eval_every=2, save_every=3,
        verify_every=2, seed=3, shards=SHARDS if in_shards else None,
    )  # fmt: skip
    fit = Fit(
        plan, make_model=animal.make, precision=precision,
        strategy=strict(SHARDS) if in_shards else auto(**animal.strategy),
        optim={"_target_": "torch.optim.SGD", "lr": lr, "momentum": 0.9},
    )  # fmt: skip

    def rank(world: World) -> Trained | str:
        try:
            state, _, report = fit.run(world, folder, stop_at)
        except UserError as error:
            return str(error)
        saved = {name: value for name, value in state.model.state_dict().items() if isinstance(value, Tensor)}
        kept = dict(state.model.named_parameters()) if animal.parameters_only else saved
        tensors = {name: value.detach().to_dense().clone() for name, value in kept.items()}
        return Trained(tensors, dict(report.metrics))

    return run_ranks(rank, size)


def distance(found: Trained, expected: Trained) -> float:
    """Relative, over all tensors; infinite where a whole number differs."""
    total, scale = 0.0, 0.0
    assert found.tensors.keys() == expected.tensors.keys()
    for name, ours in expected.tensors.items():
        theirs = found.tensors[name]
        if not (ours.is_floating_point() or ours.is_complex()):
            if not torch.equal(ours, theirs):
                return float("inf")
            continue
        total += float((theirs - ours).abs().square().sum())
        scale += float(ours.abs().square().sum())
    return float((total / scale) ** 0.5)


def same_bits(found: Trained, expected: Trained) -> bool:
    assert found.tensors.keys() == expected.tensors.keys()
    return found.metrics == expected.metrics and all(
        torch.equal(value, expected.tensors[name]) for name, value in found.tensors.items()
    )


def check(name: str, size: int, folder: Path) -> dict[str, str]:
    """What one of the zoo does on so many ranks, by column of the table."""
    animal = ZOO[name]

    def run(where: str, ranks: int = size, **changes: Any) -> list[Trained | str]:
        return trained(animal, ranks, Path(tempfile.mkdtemp(prefix=where, dir=folder)), **changes)

    found: dict[str, str] = {}
    for column, changes in (
        ("train", {}), ("bf16", {"precision": "bf16"}),
        ("in_shards", {"in_shards": True}), ("evaluate", {"lr": 0.0}),
    ):  # fmt: skip
        ranks, [alone] = run("many", **changes), run("one", 1, **changes)
        refusal = animal.refused or (animal.refused_by_ranks if size > 1 else "")
        refusal = refusal or (animal.refused_by_ddp if size > 1 and column != "in_shards" else "")
        if refusal:
            for one in ranks:
                assert isinstance(one, str), f"{name}, {size} ranks, {column}: is not refused"
                assert refusal in one
                assert "\n" not in one
            found[column] = "refused"
            continue
        assert isinstance(alone, Trained), alone
        for one in ranks:
            assert isinstance(one, Trained), f"{name}, {size} ranks, {column}: {one}"
            if column in ("in_shards", "evaluate"):
                assert same_bits(one, alone), f"{name}, {size} ranks, {column}: other bits than on one"
            else:
                far, allowed = distance(one, alone), TOLERANCE["bf16" if column == "bf16" else "fp32"]
                assert far < allowed, f"{name}, {size} ranks, {column}: {far}"
        found[column] = "same"
    found["resume"] = found["train"]
    if found["train"] == "same":
        unkilled = run("unkilled")
        place = Path(tempfile.mkdtemp(prefix="killed", dir=folder))
        with pytest.raises(RankFailed, match=DIED):
            trained(animal, size, place, stop_at=3)
        assert newest_state(place)["step"] == 3
        for one, other in zip(trained(animal, size, place), unkilled, strict=True):
            assert isinstance(one, Trained), one
            assert isinstance(other, Trained), other
            assert same_bits(one, other), f"{name}, {size} ranks: a resumed run ends with other bits"
    return found


@pytest.mark.parametrize(
    "name",
    [
        "layer used for some data",
        pytest.param("buffer cached in forward", marks=pytest.mark.long),
        pytest.param("extra state", marks=pytest.mark.long),
    ],
)
def test_some_of_the_zoo_on_two_ranks(name: str, tmp_path: Path) -> None:
    check(name, 2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", ZOO)
def test_the_whole_zoo(name: str, size: int, tmp_path: Path) -> None:
    check(name, size, tmp_path)


@pytest.mark.parametrize("name", ["unused layer", "unused last layer", "layer used in some steps"])
def test_without_the_key_a_missing_gradient_is_named(name: str, tmp_path: Path) -> None:
    """In the first step where it is missing, which for a layer used in some steps is the second."""
    animal = Animal(ZOO[name].make)
    for one in trained(animal, 2, tmp_path):
        assert isinstance(one, str)
        assert "got no gradient in step" in one
        assert "strategy.find_unused_parameters=true" in one
