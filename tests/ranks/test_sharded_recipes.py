"""The recipes under strategy=fsdp: the same weights and metrics as under ddp, and as in one process."""

import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from composed import made
from torch import Tensor
from toy import SGD, Fit, auto

from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.plan import Plan
from ddptrain.engine.saved_checkpoint import unpack
from ddptrain.testing import run_ranks

FSDP = yaml.safe_load((Path(__file__).parents[2] / "conf/strategy/fsdp.yaml").read_text()) | {
    "gather": "fp32"
}
WITHOUT_BATCHNORM = ("transformer_text", "lstm_text", "transformer_translate")
RECIPES = (*WITHOUT_BATCHNORM, "mobilenet_cifar10", "yolo_shapes", "yolo_shapes model.one_to_one=true")


def trained(
    recipe: str, size: int, strategy: dict[str, Any], home: Path, lr: float
) -> tuple[dict[str, Any], dict[str, float]]:
    """The last state, and the metrics."""
    folder = home / f"{recipe}-{size}-{strategy['_target_']}-{lr}"
    name, *changes = recipe.split()
    _, task, data = made(name, home, *changes)
    # BatchNorm of two samples amplifies rounding sixfold a step (1e-5 after four), of one a
    # thousandfold: the detector takes two steps, of whole micro-batches
    steps, batch_size = (2, 4 * size) if name == "yolo_shapes" else (4, 8)
    plan = Plan(
        steps=steps, train_size=data.train_size, batch_size=batch_size, micro_batch=2, eval_batch_size=3,
        eval_every=2, save_every=2, clip_norm=1.0, seed=1,
    )  # fmt: skip
    fit = Fit(plan, optim=dict(SGD, lr=lr), ema=0.9, strategy=strategy)
    run_ranks(lambda world: fit.train(task, data, world, folder) and None, size, timeout=600)
    saved = Checkpointer(folder, keep=1).newest()
    assert saved is not None
    return unpack(saved), dict(saved.manifest["metrics"])


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected["model"].items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found["model"][name], value, rtol=0, atol=1e-5)


def check(recipe: str, size: int, home: Path) -> None:
    many, ddp = (trained(recipe, size, node, home, 0.05)[0] for node in (FSDP, auto()))
    assert_close(many, ddp)
    # weights that do not move: what is left are the passes, and BatchNorm's statistics of a rank
    (_, metrics), (_, expected) = (trained(recipe, size, node, home, 0.0) for node in (FSDP, auto()))
    assert metrics == expected
    if recipe in WITHOUT_BATCHNORM:
        assert_close(many, trained(recipe, 1, auto(), home, 0.05)[0])
        assert metrics == trained(recipe, 1, auto(), home, 0.0)[1]


@pytest.mark.long
@pytest.mark.timeout(4000)
def test_weights_sent_in_half_precision_learn_a_text_as_well(tmp_path: Path) -> None:
    """300 steps, of a text that is longer than they read: one that they read fifty times is learnt by heart,
    and the loss of another one then goes up, by other amounts with other rounding."""
    text = tmp_path / "modules.txt"
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text.write_bytes(b"".join(module.read_bytes() for module in modules)[:600_000])
    _, task, data = made("transformer_text", tmp_path, f"data.source.path={text}")
    plan = Plan(steps=300, train_size=data.train_size, batch_size=8, eval_batch_size=8, eval_every=300)
    optim = {"_target_": "torch.optim.AdamW", "lr": 0.001}

    def loss(gather: str) -> float:
        fit = Fit(plan, optim=optim, strategy={**FSDP, "gather": gather}, precision="bf16")
        ranks = run_ranks(lambda world: fit.train(task, data, world, tmp_path / gather)[1], 2, timeout=1800)
        return ranks[0].metrics["loss"]

    assert loss("bf16") == pytest.approx(loss("fp32"), abs=0.01)


@pytest.mark.long
def test_a_transformer_trains_the_same_in_parts(tmp_path: Path) -> None:
    check("transformer_text", 2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_train_the_same_in_parts(recipe: str, size: int, tmp_path: Path) -> None:
    check(recipe, size, tmp_path)
