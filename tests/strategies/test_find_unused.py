"""Parameters without a gradient on two ranks, in models whose outputs are more than a tensor."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from toy import CLASSES, FEATURES, Classify, Fit, auto, weights

from ddptrain.api.recipe import Loss, Progress
from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.testing import RankFailed, run_ranks


@dataclass(frozen=True)
class Answer:
    features: Tensor
    logits: Tensor


class Pair(NamedTuple):
    mask: Tensor
    logits: Tensor


SHAPES: dict[str, Any] = {
    "tensor": (lambda mask, logits: logits, lambda out: out),
    "tuple": (lambda mask, logits: (mask, logits), lambda out: out[1]),
    "list": (lambda mask, logits: [mask, [logits]], lambda out: out[1][0]),
    "named tuple": (Pair, lambda out: out.logits),
    "dict": (
        lambda mask, logits: {"mask": mask, "deep": {"logits": logits}},
        lambda out: out["deep"]["logits"],
    ),
    "ordered dict": (lambda mask, logits: OrderedDict(mask=mask, logits=logits), lambda out: out["logits"]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_any_outputs_carry_the_flags(shape: str, tmp_path: Path) -> None:
    wrap, unwrap = SHAPES[shape]
    train_on_two_ranks(wrap, unwrap, tmp_path)


@pytest.mark.parametrize(
    ("shape", "static"),
    [("dataclass", False), ("in place", False), ("tuple", False), ("tuple", True), ("dict", True)],
)
def test_a_loss_need_not_use_the_first_output(shape: str, static: bool, tmp_path: Path) -> None:
    """torch ties the outputs together, but not those of a dataclass, and with a static graph in one pass."""
    makes: dict[str, Any] = {
        "dataclass": (Answer, lambda out: out.logits),
        "in place": (Answer, lambda out: out.logits.clamp_(max=1.0)),
        "tuple": (lambda features, logits: (features, logits), lambda out: out[1]),
        "dict": (lambda features, logits: {"a": features, "b": logits}, lambda out: out["b"]),
    }
    make, unwrap = makes[shape]

    def wrap(mask: Tensor, logits: Tensor) -> Any:
        return make(logits * 2, logits)

    train_on_two_ranks(wrap, unwrap, tmp_path, static_graph=static)


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_static_graph_of_outputs_that_torch_does_not_see_is_refused(
    find_unused: bool, tmp_path: Path
) -> None:
    """It would send no gradient."""
    with pytest.raises(RankFailed, match=r"strategy\.static_graph=true: torch finds no tensor"):
        train_on_two_ranks(
            lambda mask, logits: Answer(mask, logits), lambda out: out.logits, tmp_path,
            static_graph=True, find_unused_parameters=find_unused,
        )  # fmt: skip


def train_on_two_ranks(wrap: Any, unwrap: Any, folder: Path, **settings: bool) -> None:
    """The same weights as on one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(FEATURES, CLASSES)
            self.spare = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Any:
            return wrap(x[:, 0] > 0, self.used(x))

    class Unwrapping(Classify):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
            logits = unwrap(model(batch[0]))
            return Loss(nn.functional.cross_entropy(logits, batch[1], reduction="sum"), len(batch[1]))

        def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
            return super().evaluate(lambda x: unwrap(model(x)), batch)  # type: ignore[arg-type]

    def rank(world: World) -> Tensor:
        plan = Plan(steps=5, train_size=60, batch_size=12, micro_batch=3)
        settings_of_ddp = {"find_unused_parameters": True, **settings}
        fit = Fit(plan, make_model=Model, task=Unwrapping, strategy=auto(**settings_of_ddp))
        return weights(fit.run(world, folder / f"{world.size}-{world.rank}")[0])

    [alone] = run_ranks(rank, 1)
    for found in run_ranks(rank, 2):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
