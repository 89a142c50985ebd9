"""``bench memory=true``: the estimate, and what real steps take."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import RECIPES, made
from memory import allocations, phase
from shell import ddptrain, refusal
from torch import Tensor, nn
from toy import SGD, Classify, Vectors, plain

from ddptrain.api.recipe import At, Data, Loss, Task
from ddptrain.api.world import World
from ddptrain.commands.memory import advice
from ddptrain.commands.setup import make_model
from ddptrain.config.schema import Config, Train
from ddptrain.engine.memory import step_memory
from ddptrain.engine.plan import plan_run
from ddptrain.engine.precision import choose_precision
from ddptrain.engine.recompute import recompute
from ddptrain.engine.state import make_state
from ddptrain.engine.step import make_step
from ddptrain.errors import UserError
from ddptrain.strategies.ddp import Ddp
from ddptrain.strategies.fsdp import Fsdp
from ddptrain.strategies.make_strategy import make_strategy
from ddptrain.strategies.single import Single
from ddptrain.strategies.strict import Strict
from ddptrain.testing import run_ranks
from ddptrain.watchdog.watchdog import Watchdog

CPU = torch.device("cpu")
FEW = "data.source.train=300"
STEPS = {
    "convolutions": ("cnn_cifar10", FEW, "train.batch_size=128"),
    "mostly weights": ("cnn_cifar10", FEW, "train.batch_size=4", "model.hidden=2048"),
    "BatchNorm": ("mobilenet_cifar10", FEW, "train.batch_size=32"),
    "in four parts": ("mobilenet_cifar10", FEW, "train.batch_size=64", "train.micro_batch=16"),
    "computed again": ("mobilenet_cifar10", FEW, "train.batch_size=32", "train.recompute=[features.*]"),
    "a Transformer in bf16": (
        *("transformer_text", "data.window=64", "data.order=shuffled", "model.ngram_rows=512"),
        *("model.width=128", "train.batch_size=32"),
    ),
    "an LSTM": ("lstm_text", "data.window=32", "model.ngram_rows=512", "model.width=128"),
    "a detector with averages": ("yolo_shapes", "train.batch_size=4", "data.source.train=16"),
}
"""A recipe each, and its overrides."""
LONG = ("in four parts", "computed again")


def in_words(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items())


def estimated(config: Config, task: Task, data: Data, ranks: int = 1) -> dict[str, int]:
    """Of the first of so many ranks, before a strategy has its say. To be called in `run_ranks`: once torch
    has made tensors without numbers, a process that is forked can't run a backward pass."""
    world, precision = World(0, ranks, 0, ranks), choose_precision(config.precision, CPU)
    shards = 8 if config.elastic == "strict" else None
    sampler = plan_run(config, data.train_size, shards=shards).sampler(world)
    batch = next(iter(data.train_batches(sampler, range(1))))
    model = make_model(config, task, CPU)
    recompute(model, config.train.recompute)
    return step_memory(
        model,
        lambda model: make_state(config, model, Single(World()), precision, 1),
        task,
        batch,
        precision,
        CPU,
        1 if shards else len(sampler.pieces),
        config.train.clip_norm,
    )


def measured(
    config: Config, task: Task, data: Data, folder: Path, world: World | None = None
) -> tuple[int, dict[str, int]]:
    """The most that torch allocates in the third real step, and what is there after it."""
    world = world or World()
    strategy = make_strategy(config.strategy, world, strict=config.elastic == "strict")
    precision = choose_precision(config.precision, CPU)
    plan = plan_run(config, data.train_size, shards=strategy.shards)
    with allocations(folder) as allocated:
        model = make_model(config, task, CPU)
        recompute(model, config.train.recompute)
        model = strategy.prepare(model)
        step = make_step(config, task, model, strategy, precision, plan, Watchdog(world))
        batches = data.train_batches(step.sampler, range(3))
        for number in range(3):
            with phase(str(number)):
                step(batches, plan.at(number))
    state = step.state
    states: list[Any] = [value for one in state.optimizer.state.values() for value in one.values()]
    averages = state.average.state_dict().get("weights", {}).values()
    return allocated.peak("2"), {
        "weights": size([*model.parameters(), *model.buffers()]),
        "gradients": size([p.grad for p in model.parameters() if p.grad is not None]),
        "optimizer": size([value for value in states if isinstance(value, Tensor)]),
        "average": size([value for value in averages if isinstance(value, Tensor)]),
    }


def size(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    "what", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in STEPS]
)
def test_the_estimate_is_what_a_real_step_takes(tmp_path: Path, what: str) -> None:
    """Each part that can be counted to the byte, and the most at a time to 15 %."""
    recipe, *changes = STEPS[what]

    def rank(_: World) -> tuple[dict[str, int], int, dict[str, int]]:
        parts = estimated(*made(recipe, tmp_path, *changes))
        return parts, *measured(*made(recipe, tmp_path, *changes), tmp_path)

    [(parts, peak, alive)] = run_ranks(rank, 1)
    print(f"{what}: {in_words(parts)}; estimated {sum(parts.values()) / peak:.3f} of what is measured")
    assert {name: parts[name] for name in alive} == alive
    assert parts["activations"] > 0
    assert sum(parts.values()) == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize(
    ("changes", "of"),
    [
        ([], {}),
        (["elastic=strict"], None),
        pytest.param(
            ["strategy.gradient_as_bucket_view=false"],
            {"gradient_as_bucket_view": False},
            marks=pytest.mark.long,
        ),
        pytest.param(["strategy.compression=bf16"], {"compression": "bf16"}, marks=pytest.mark.long),
        pytest.param(["strategy.compression=powersgd"], {"compression": "powersgd"}, marks=pytest.mark.long),
    ],
    ids=["views", "strict", "copies", "bf16", "powersgd"],
)
def test_with_two_ranks(tmp_path: Path, changes: list[str], of: dict[str, Any] | None) -> None:
    """Weights and gradients are most of it, so that what the strategy adds counts."""
    words = (FEW, "train.batch_size=16", "model.hidden=1024", *changes)

    def rank(world: World) -> tuple[dict[str, int], int]:
        (tmp_path / str(world.rank)).mkdir()
        config, task, data = made("cnn_cifar10", tmp_path / str(world.rank), *words)
        peak, _ = measured(config, task, data, tmp_path / str(world.rank), world)
        strategy = Strict(world) if of is None else Ddp(world, **of)
        recipe = made("cnn_cifar10", tmp_path / str(world.rank), *words)
        return strategy.memory(make_model(config, task, CPU), estimated(*recipe, ranks=2), 1), peak

    for parts, peak in run_ranks(rank, 2):
        print(f"{in_words(parts)}; estimated {sum(parts.values()) / peak:.3f} of what is measured")
        assert sum(parts.values()) == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize(
    "what",
    [
        "an LSTM",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("a Transformer", "accumulated", "mostly weights")
        ),
    ],
)
def test_in_parts_on_two_ranks(tmp_path: Path, what: str) -> None:
    """strategy=fsdp: what is gathered counts, and is in flight for a while."""
    wide = (*STEPS["a Transformer in bf16"][:-2], "model.width=256", "train.batch_size=8", "precision=fp32")
    accumulated = (*wide, "train.micro_batch=2")
    recipe, *changes = {**STEPS, "a Transformer": wide, "accumulated": accumulated}[what]

    def rank(world: World) -> tuple[dict[str, int], int]:
        home = tmp_path / str(world.rank)
        home.mkdir()
        config, task, data = made(recipe, home, *changes, "strategy=fsdp")
        peak, _ = measured(config, task, data, home, world)
        config, task, data = made(recipe, home, *changes)
        strategy = Fsdp(world)
        passes = -(-config.train.batch_size // 2 // (config.train.micro_batch or config.train.batch_size))
        parts = estimated(config, task, data, ranks=2)
        return strategy.memory(make_model(config, task, CPU), parts, passes), peak

    for parts, peak in run_ranks(rank, 2):
        print(f"{in_words(parts)}; estimated {sum(parts.values()) / peak:.3f} of what is measured")
        assert sum(parts.values()) == pytest.approx(peak, rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_followed(tmp_path: Path, recipe: str) -> None:
    [parts] = run_ranks(lambda _: estimated(*made(recipe, tmp_path, "train.batch_size=4")), 1)
    assert min(parts["weights"], parts["gradients"], parts["activations"]) > 0


class Reading(Classify):
    """Looks at a number of the batch."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], at: At) -> Loss:
        assert batch[0].sum().item() > -1e9
        return super().loss(model, batch, at)


def test_a_step_that_reads_numbers_is_refused() -> None:
    config = Config(optim=SGD, train=Train(batch_size=4))

    def rank(_: World) -> None:
        with pytest.raises(UserError, match="memory=true: this recipe's step can't be followed without its"):
            estimated(config, Reading(plain), Vectors(20))

    run_ranks(rank, 1)


def test_the_table(tmp_path: Path) -> None:
    line = (
        f"bench memory=true recipe=mobilenet_cifar10 data=shapes {FEW} device=cpu train.batch_size=32 ranks=2"
    )
    done = ddptrain(tmp_path, f"{line} strategy=ddp ema.decay=0.9")
    assert done.code == 0, done.err
    assert "2 ranks of ddp over gloo, on cpu, fp32, 16 samples at once" in done.out
    rows = dict(re.findall(r"^  (\w+) +([\d.,]+)\b", done.out, re.MULTILINE))
    assert list(rows) == [
        "weights",
        "gradients",
        "optimizer",
        "average",
        "activations",
        "communication",
        "total",
    ]
    sizes = {name: float(mib.replace(",", "")) for name, mib in rows.items()}
    assert sum(sizes.values()) == pytest.approx(2 * sizes["total"], abs=0.4)
    assert sizes["weights"] == sizes["average"] == pytest.approx(1528106 * 4 / 2**20, abs=0.1)
    assert "fits" not in done.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("memory=true steps=3", "steps: memory=true trains nothing; it takes ranks= alone."),
        ("memory=true ranks=0", "ranks=0: must be 1 or more."),
        ("memory=true ranks=2 strategy=single", "ranks=2: this strategy runs in one process."),
        ("memory=maybe", "memory=maybe: must be true or false"),
    ],
)
def test_wrong_words_are_one_message(tmp_path: Path, words: str, said: str) -> None:
    assert refusal(tmp_path, f"bench recipe=cnn_digits device=cpu {words}").startswith(said)


def test_the_cheapest_advice_comes_first() -> None:
    strategy = Ddp(World(0, 2, 0, 2))
    plain = "train.micro_batch=4, then train.recompute=[<blocks>], then precision=bf16, then strategy=fsdp"
    assert advice(Config(), strategy, 8, "fp32") == plain
    tried = Config(train=Train(recompute=["blocks.*"]))
    assert advice(tried, strategy, 1, "bf16") == "strategy=fsdp"
