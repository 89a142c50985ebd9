"""A run's own last evaluation is what everything says that reads its checkpoint: the verb evaluate,
`ddptrain.load`, the exported file, converted weights, and a model that starts from them.

Combinations of strategy, average, precision and kinds of state of the model; any two settings meet.
"""

import copy
import importlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from composed import RECIPES, made
from pairwise import Case, Excluded, name_of, pairwise_of
from stateful import KINDS, ONLY_CONSTANT, VALID, Guess, Points
from torch import Tensor, nn
from toy import auto, lr_schedule, strict
from verbs import train_on

import ddptrain
from ddptrain.api.recipe import Data, Rows, Task
from ddptrain.api.world import World
from ddptrain.config.check import checked
from ddptrain.config.schema import Config
from ddptrain.run import checkpoint, evaluate, export
from ddptrain.run.initial_weights import load_initial_weights
from ddptrain.run.setup import make_task
from ddptrain.testing import run_ranks
from ddptrain.text import finite

STEPS = 9
EXPORTER = (
    *("torch._dynamo", "torch._inductor", "torch.export._trace", "torch._export.non_strict_utils"),
    "torch._functorch.aot_autograd",
)
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"strategy": auto()}),
    "strict1": (1, {"strategy": strict(3)}),
    "ddp2": (2, {"strategy": auto()}),
    "ddp3": (3, {"strategy": auto()}),
    "strict2": (2, {"strategy": strict(3)}),
    "fsdp2": (2, {"strategy": {"_target_": "ddptrain.strategies.fsdp.Fsdp"}}),
}
FROZEN: dict[str, dict[str, Any]] = {
    "": {}, "freeze": {"freeze": ["first.*"]}, "thaw": {"freeze": ["first.*"], "thaw": 0.5}
}  # fmt: skip
SETTINGS: dict[str, Sequence[Any]] = {
    "strategy": list(STRATEGIES),
    "average": [False, True],
    "precision": ["fp32", "bf16", "fp16"],
    "dtype": ["float32", "float64", "bfloat16"],
    "frozen": list(FROZEN),
    "channels_last": [False, True],
    "left_out": [False, True],
    "background": [False, True],
    "in_one_batch": [False, True],
    **{kind: [False, True] for kind in KINDS if kind not in ("sparse", "dropout")},
}
FEWER: dict[str, Sequence[Any]] = {
    "strategy": ["single", "ddp2", "fsdp2"],
    "precision": ["fp32", "bf16"],
    "dtype": ["float32"],
    "frozen": ["", "thaw"],
}
"""For the tests that run each time."""
EXPORT_ROUNDING = {"float32": 1e-5, "float64": 1e-5, "bfloat16": 0.02}
"""Relative, of the loss: the exporter may add up in another order, in some 20 operations one after the other,
each with an error of half the type's last digit (6e-8; of bfloat16 0.004)."""


EXCLUDED: Sequence[Excluded] = [
    *(
        lambda case, kind=kind: case["strategy"].startswith("fsdp") and case[kind]  # type: ignore[misc]
        for kind in ("complex", "types", "scalars")  # refused
    ),
    # torch's has no such kernel
    lambda case: case["norm"] and case["dtype"] != "float32" and case["precision"] != "fp32",
    lambda case: case["average"] and case["dtype"] == "bfloat16",  # refused: it would stand still
    lambda case: case["average"] and case["types"],
    # nor has its gradient scaler; and autocast to fp16 takes no bf16
    lambda case: case["precision"] == "fp16" and case["complex"],
    lambda case: case["precision"] == "fp16" and case["dtype"] == "bfloat16",
    lambda case: case["precision"] == "fp16" and case["types"],
]
"""What can't be."""


def cases(seed: int, **settings: Sequence[Any]) -> list[Any]:
    drawn = pairwise_of({**SETTINGS, **settings}, EXCLUDED, seed)
    return [pytest.param(case, id=name_of(case)) for case in drawn]


def config_of(case: Case, folder: Path) -> Config:
    kinds = [kind for kind in KINDS if case.get(kind)]
    task = {"kinds": kinds, "dtype": case["dtype"], "bad_steps": [3, 8] if case["left_out"] else []}
    return checked(
        {
            "recipe": "stateful",
            "task": {"_target_": "stateful.Guess", **task},
            "data": {"_target_": "stateful.Points"},
            "optim": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
            "sched": lr_schedule("cosine"),
            "observers": {"jsonl": {"_target_": "ddptrain.observe.jsonl.Jsonl"}},
            "train": {
                "steps": STEPS, "batch_size": 18, "eval_every": 3, "nonfinite": "skip",
                "eval_batch_size": VALID if case["in_one_batch"] else 16,
            },
            "checkpoint": {"every": 3, "background": case["background"]},
            "ema": {"decay": 0.8 if case["average"] else None},
            "run": {"dir": str(folder)},
            "precision": case["precision"],
            "channels_last": case["channels_last"],
            "device": "cpu",
            **FROZEN[case["frozen"]],
            **STRATEGIES[case["strategy"]][1],
        }
    )  # fmt: skip


def logged(folder: Path, step: int = STEPS) -> dict[str, float]:
    """What the run has said of itself."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    [found] = [line for line in lines if line["split"] == "valid" and line["step"] == step]
    return {name: value for name, value in found.items() if name not in ("step", "epoch", "samples", "split")}


def said_by(config: Config, folder: Path, name: str) -> dict[str, Any]:
    """What the verb evaluate prints."""
    with redirect_stdout(io.StringIO()) as out:
        evaluate.run(copy.deepcopy(config), folder, name)
    found: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    del found["checkpoint"]
    return found


def loss_by_hand(module: Callable[[Tensor], Tensor], config: Config, precision: str = "fp32") -> float:
    data, size, sums = Points(), config.train.eval_batch_size, []
    data.prepare(World(), 0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    chunks = [range(i, min(i + size, VALID)) for i in range(0, VALID, size)]
    with torch.no_grad(), nullcontext() if dtype is None else torch.autocast("cpu", dtype):
        for features, labels in data.valid_batches(chunks):
            sums.append(nn.functional.cross_entropy(module(features).float(), labels, reduction="sum"))
    return float(torch.stack(sums).double().sum()) / VALID


def converted(config: Config, folder: Path) -> nn.Module:
    """A new model with the weights of the file that checkpoint convert writes."""
    out = folder / "weights.pt"
    of = checkpoint.RunFolder(folder, config.recipe)
    with redirect_stdout(io.StringIO()):
        checkpoint.run("show", of, {})
        checkpoint.run("convert", of, {"out": str(out), "checkpoint": "last"})
    model = _new(config)
    model.load_state_dict(torch.load(out, weights_only=True))
    return model


def begun(config: Config, folder: Path) -> nn.Module:
    """A new model that starts from the run's last checkpoint (init.weights)."""
    model = _new(config)
    source = str(folder / "checkpoints" / f"step-{STEPS}")
    load_initial_weights(source, [], config.model or {}, model, World())
    return model


def exported(config: Config, folder: Path) -> Callable[[Tensor], Tensor]:
    export.run(copy.deepcopy(config), folder, "last", {"format": "pt2"})
    return torch.export.load(folder / "model.pt2").module()


def _new(config: Config) -> nn.Module:
    torch.manual_seed(99)
    task, _ = make_task(config)
    model = task.build().eval()
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def everywhere(folder: Path) -> dict[str, Any]:
    """The loss of a run's last checkpoint by each way there is, or the error that came of it."""
    config = checked(yaml.safe_load((folder / "config.yaml").read_text()))
    best = json.loads((folder / "checkpoints/best/manifest.json").read_text())["step"]
    own = config.precision

    def loaded() -> nn.Module:
        return ddptrain.load(folder, checkpoint="last").module

    ways: dict[str, Callable[[], Any]] = {
        "evaluate": lambda: said_by(config, folder, "last"),
        "evaluate best": lambda: said_by(config, folder, ""),
        "load": lambda: loss_by_hand(loaded(), config, own),
        "convert": lambda: loss_by_hand(converted(config, folder), config, own),
        "init.weights": lambda: loss_by_hand(begun(config, folder), config, own),
        "load in fp32": lambda: loss_by_hand(loaded(), config),
        "export": lambda: loss_by_hand(exported(config, folder), config),
    }
    found: dict[str, Any] = {"best": {"step": best, **logged(folder, best)}}
    for name, way in ways.items():
        try:
            found[name] = way()
        except Exception as error:  # all ways are told of, not the first alone
            found[name] = f"{type(error).__name__}: {error}"
    return found


def check(case: Case, folder: Path) -> None:
    config = config_of(case, folder)
    train_on(STRATEGIES[case["strategy"]][0], config)
    [found] = run_ranks(lambda world: everywhere(folder), 1, timeout=250.0)
    expected = logged(folder)
    wrong = {
        name: found[name] for name in ("load", "convert", "init.weights") if found[name] != expected["loss"]
    }
    wrong |= {} if found["evaluate"] == {"step": STEPS, **expected} else {"evaluate": found["evaluate"]}
    wrong |= {} if found["evaluate best"] == found["best"] else {"evaluate best": found["evaluate best"]}
    rounding = EXPORT_ROUNDING["bfloat16" if case["types"] else case["dtype"]]
    if found["export"] != pytest.approx(found["load in fp32"], rel=rounding):
        wrong["export"] = found["export"]
    assert not wrong, f"the run says {expected}, {found['best']}"


@pytest.fixture(scope="module", autouse=True)
def exporter() -> None:
    """Imported once, in ten seconds; each test forks."""
    for name in EXPORTER:
        importlib.import_module(name)


@pytest.mark.parametrize("case", cases(1, **FEWER))
def test_everything_says_what_the_run_says(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize("case", cases(2))
def test_everything_says_what_more_runs_say(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path / "run")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*ONLY_CONSTANT, "tied")])
def test_each_kind_of_state_shows_in_the_loss(kind: str) -> None:
    """Else the tests above could lose it and pass: a few passes of training move it, and a model without what
    they moved gives other outputs."""
    torch.manual_seed(0)
    model = Guess([kind]).build()
    x = torch.randn(20, 12)
    before = copy.deepcopy(model.middle)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
    moved = model.eval()(x)
    model.middle = before.eval()
    assert not torch.allclose(model(x), moved)


def reported(task: Task, data: Data, module: nn.Module, size: int) -> Mapping[str, float]:
    """The metrics of a task, batch by batch."""
    ranges = [range(i, min(i + size, data.valid_size)) for i in range(0, data.valid_size, size)]
    found: dict[str, list[Tensor]] = {}
    rows = set()
    with torch.no_grad():
        for batch in data.valid_batches(ranges):
            for name, value in task.evaluate(module, batch).items():
                rows |= {name} if isinstance(value, Rows) else set()
                found.setdefault(name, []).append(value.values if isinstance(value, Rows) else value)
    sums = {
        name: torch.cat(values) if name in rows
        else torch.stack([v.double() if v.is_floating_point() else v.long() for v in values]).sum(dim=0)
        for name, values in found.items()
    }  # fmt: skip
    metrics: Mapping[str, float] = finite(task.report(sums).metrics)
    return metrics


@pytest.mark.long
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe(recipe: str, average: bool, tmp_path: Path) -> None:
    words = ["train.steps=2", "train.batch_size=4", "train.eval_every=2", "checkpoint.every=2", "device=cpu"]
    words += ["observers=[jsonl]", f"ema.decay={0.5 if average else 'null'}", "precision=fp32", "compile=off"]
    words += ["init.weights=null"]  # two recipes start from files that would be fetched
    folder = tmp_path / "run"
    composed, _, _ = made(recipe, tmp_path, *words, f"run.dir={folder}")
    config = checked(asdict(composed))
    train_on(2 if average else 1, config)

    def asked(world: World) -> dict[str, Any]:
        task, data = make_task(copy.deepcopy(config))
        data.prepare(World(), config.seed)
        size = config.train.eval_batch_size
        task.build()  # some learn from the data here what they need
        module = ddptrain.load(folder, checkpoint="last").module
        return {"evaluate": said_by(config, folder, "last"), "load": reported(task, data, module, size)}

    [found] = run_ranks(asked, 1)
    expected = logged(folder, 2)
    assert found["evaluate"] == {"step": 2, **expected}
    assert found["load"] == expected
