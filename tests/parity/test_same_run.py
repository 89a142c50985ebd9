"""A resume is the same run: killed, resumed, killed again and resumed, it ends with the bits of one that
nobody disturbed, whatever state it has.

Combinations of optimizer, dtype, precision, strategy, state of the model, average, schedule, steps left out,
freezing, controllers and moments of the kills, such that any two settings meet.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from pairwise import Case, Excluded, name_of, pairwise_of
from stateful import KINDS, Guess, Points
from torch import Tensor
from toy import Fit, auto, lr_schedule, strict

from ddptrain.api.controller import Controller
from ddptrain.api.observer import Evaluated, Log
from ddptrain.api.world import World
from ddptrain.distributed.comm import on_first_rank
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.early_stop import EarlyStop
from ddptrain.engine.plan import Plan
from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.observe.jsonl import Jsonl
from ddptrain.testing import run_ranks

STEPS, SAVES, EVALUATES = 14, 3, 4


def optim(name: str, lr: float = 0.05, **settings: Any) -> dict[str, Any]:
    return {"_target_": f"torch.optim.{name}", "lr": lr, **settings}


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": optim("SGD"),
    "momentum": optim("SGD", momentum=0.9),
    "nesterov": optim("SGD", momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampening": optim("SGD", momentum=0.9, dampening=0.3),
    "adam": optim("Adam"),
    "amsgrad": optim("Adam", amsgrad=True, maximize=False),
    "adamw": optim("AdamW", weight_decay=0.1),
    "adamw_loop": optim("AdamW", foreach=False),
    "nadam": optim("NAdam"),
    "radam": optim("RAdam"),
    "asgd": optim("ASGD", t0=4),
    "adadelta": optim("Adadelta", lr=1.0),
    "adagrad": optim("Adagrad", lr_decay=0.01),
    "adamax": optim("Adamax"),
    "rmsprop": optim("RMSprop", lr=0.01, momentum=0.5, centered=True),
    "rprop": optim("Rprop", lr=0.01),
    "adafactor": optim("Adafactor"),
    "sparse_adam": optim("SparseAdam"),
    "muon": optim("Muon", lr=0.02),
    "muon_with_sgd": {
        "_target_": "ddptrain.recipes.muon.MuonWithSgd", "lr": 0.05, "head_lr": 0.05, "bias_lr": 0.05,
        "normalise_every": 2,
    },
    "muon_with_adamw": {"_target_": "ddptrain.recipes.muon_with_adamw.MuonWithAdamW", "lr": 0.02},
}  # fmt: skip
ONLY = {"sparse_adam": ("first.*", "last.*"), "muon": ("*bias",)}
"""What these do not take, and so is frozen."""
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "strict1": (1, {"strategy": strict(3)}),
    "ddp2": (2, {"strategy": auto(bucket_cap_mb=0.001)}),
    "ddp3": (3, {}),
    "strict2": (2, {"strategy": strict(3)}),
    "fsdp2": (2, {"strategy": {"_target_": "ddptrain.strategies.fsdp.Fsdp"}}),
    "fsdp2_bf16": (2, {"strategy": {"_target_": "ddptrain.strategies.fsdp.Fsdp", "gather": "bf16"}}),
}


class Killed(Exception):
    """In place of a kill: nothing after it is done, and what goes on is made anew."""


class Kill:
    """before: the step before which it happens, or else in_evaluation: after so many steps."""

    def __init__(self, before: int | None = None, in_evaluation: int | None = None) -> None:
        self.before, self.in_evaluation = before, in_evaluation

    def steps(self, steps: range) -> Iterator[int]:
        for step in steps:
            if step == self.before:
                raise Killed
            yield step


KILLS: dict[str, tuple[Kill, ...]] = {
    "late": (Kill(5), Kill(10)),
    "saved": (Kill(3), Kill(9)),
    "evaluating": (Kill(in_evaluation=4), Kill(in_evaluation=12)),
    "twice_the_same": (Kill(8), Kill(8)),
}


class KilledPoints(Points):
    """The end comes when the first batch of an evaluation is read: it may be asked for long before."""

    def __init__(self, kill: Kill) -> None:
        super().__init__()
        self._kill, self.step = kill, 0

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        if self.step == self._kill.in_evaluation:
            raise Killed
        yield from super().valid_batches(chunks)

    def steps(self, steps: range) -> Iterator[int]:
        self.step = steps.start
        for step in self._kill.steps(steps):
            self.step = step + 1
            yield step


class Counting(Controller):
    """Ends the run at its third evaluation; remembers what it has seen."""

    completes = True

    def __init__(self) -> None:
        self._evaluations, self._seen = 0, torch.zeros(2)

    def goes_on(self, event: Evaluated) -> bool:
        self._evaluations += 1
        return self._evaluations < 3

    def log(self, event: Log) -> None:
        self._seen = self._seen + torch.tensor([event.values["loss"], 1.0])

    def state_dict(self) -> Mapping[str, Any]:
        return {"evaluations": self._evaluations, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._evaluations, self._seen = state["evaluations"], state["seen"]


CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "counting": Counting, "early_stop": lambda: EarlyStop(2, "loss", None)
}  # fmt: skip
KIND_SETTINGS = {kind: [False, True] for kind in KINDS}
SETTINGS: dict[str, Sequence[Any]] = {
    "optimizer": list(OPTIMIZERS),
    "strategy": ["single", "strict1"],
    "dtype": ["float32", "float64", "bfloat16"],
    "precision": ["fp32", "bf16", "fp16"],
    "average": [False, True],
    "left_out": ["", "before", "after", "both"],
    "frozen": ["", "freeze", "thaw3", "thaw7"],
    "sched": ["constant", "linear", "cosine", "step", "onecycle", "wsd"],
    "kills": list(KILLS),
    "controller": ["", *CONTROLLERS],
    "clipped": [False, True],
    "pieces": [False, True],
    "carried": ["", "anew", "in_place"],
    "drawn": [False, True],
    **KIND_SETTINGS,
}
FEWER: dict[str, Sequence[Any]] = {
    "strategy": ["single"],
    "dtype": ["float32", "float64"],
    "precision": ["fp32", "fp16"],
    "left_out": ["", "both"],
    "frozen": ["", "thaw7"],
    "sched": ["cosine", "onecycle"],
    "kills": ["late", "evaluating"],
}
"""For the tests that run each time."""
RANKS: dict[str, Sequence[Any]] = {
    "strategy": ["ddp2", "strict2", "fsdp2", "fsdp2_bf16", "ddp3"],
    "optimizer": ["momentum", "adamw", "nadam", "asgd", "rmsprop", "adafactor"],
}
FEW_RANKS = {**FEWER, "strategy": ["ddp2", "strict2", "fsdp2"], "optimizer": ["momentum", "adamw"]}
LEFT_OUT: dict[str, tuple[int, ...]] = {"": (), "before": (2,), "after": (6, 11), "both": (2, 6, 7)}
SPARSE = ("sgd", "adagrad", "sparse_adam")
WHOLE = ("adafactor", "muon", "muon_with_sgd")
"""These take no parameters in parts."""
NOT_COMPLEX = ("adafactor", "muon", "muon_with_adamw", "muon_with_sgd", "sparse_adam")


def is_sharded(case: Case) -> bool:
    return bool(case["strategy"].startswith("fsdp"))


EXCLUDED: Sequence[Excluded] = [
    lambda case: case["sparse"] and case["optimizer"] not in SPARSE,
    lambda case: case["sparse"] and case["strategy"].startswith(("ddp", "fsdp")),
    lambda case: case["optimizer"] in ONLY and case["frozen"],
    *(
        lambda case, kind=kind: case["optimizer"] in ONLY and case[kind]  # type: ignore[misc]
        for kind in KINDS
        if kind not in ("sparse", "extra", "in_place", "integers")
    ),
    lambda case: case["optimizer"] == "sparse_adam" and not case["sparse"],
    lambda case: case["optimizer"] == "sparse_adam" and case["clipped"],
    lambda case: case["optimizer"] == "sparse_adam" and case["strategy"].startswith("strict"),
    lambda case: case["optimizer"] == "muon" and case["sparse"],
    lambda case: case["strategy"] == "fsdp2_bf16" and case["precision"] != "bf16",
    lambda case: case["complex"] and case["optimizer"] in NOT_COMPLEX,
    lambda case: is_sharded(case) and case["complex"],
    lambda case: is_sharded(case) and case["types"],
    lambda case: is_sharded(case) and case["scalars"],
    lambda case: is_sharded(case) and case["optimizer"] in WHOLE,
    # gaps in memory are refused
    lambda case: case["turned"] and case["optimizer"] in ("muon_with_adamw", "muon_with_sgd"),
    lambda case: case["scalars"] and case["optimizer"] == "adafactor",  # torch's divides by their number
    lambda case: case["average"] and case["dtype"] == "bfloat16",  # it would stand still
    lambda case: case["average"] and case["types"],
    # torch's has no such kernel
    lambda case: case["norm"] and case["dtype"] != "float32" and case["precision"] != "fp32",
    # nor has its gradient scaler; and autocast to fp16 takes no bf16
    lambda case: case["precision"] == "fp16" and case["complex"],
    lambda case: case["precision"] == "fp16" and case["dtype"] == "bfloat16",
    lambda case: case["precision"] == "fp16" and case["types"],
    lambda case: case["carried"] and case["pieces"],
    lambda case: case["carried"] and case["strategy"].startswith("strict"),
]
"""What is refused before the first step, or is nothing."""


def cases(seed: int, **settings: Sequence[Any]) -> list[Any]:
    return [
        pytest.param(case, id=name_of(case)) for case in pairwise_of({**SETTINGS, **settings}, EXCLUDED, seed)
    ]


def train(case: Case, world: World, folder: Path, kill: Kill) -> None:
    in_shards = case["strategy"].startswith("strict")
    plan = Plan(
        steps=STEPS, train_size=60, batch_size=18, micro_batch=4 if case["pieces"] else None,
        eval_batch_size=16, log_every=5, eval_every=EVALUATES, save_every=SAVES, verify_every=4, seed=5,
        clip_norm=0.5 if case["clipped"] else None, shards=3 if in_shards else None,
        skips_nonfinite=bool(case["left_out"]), nonfinite_limit=8,  # fp16's scaler looks for its scale
    )  # fmt: skip
    frozen = ("first.*",) if case["frozen"] else ONLY.get(case["optimizer"], ())
    controllers = {} if not case["controller"] else {"own": CONTROLLERS[case["controller"]]()}
    kinds = [kind for kind in KINDS if case[kind]]
    task = Guess(kinds, case["dtype"], LEFT_OUT[case["left_out"]], case["carried"], case["drawn"])
    data = KilledPoints(kill)
    fit = Fit(
        plan, optim=OPTIMIZERS[case["optimizer"]], sched=lr_schedule(case["sched"], warmup=0.2),
        ema=0.8 if case["average"] else None, precision=case["precision"], freeze=frozen,
        thaw_at=int(case["frozen"][4:]) if case["frozen"].startswith("thaw") else None,
        observers=[Jsonl()] if world.is_first else [], controllers=controllers,
        step_iterator=data.steps, **STRATEGIES[case["strategy"]][1],
    )  # fmt: skip
    fit.train(task, data, world, folder)


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run has left: its checkpoints, with what their manifests say, and its metrics."""
    found: dict[str, Any] = {"metrics.jsonl": (folder / "metrics.jsonl").read_text().splitlines()}
    for path in [*Checkpointer(folder, keep=2).steps(), folder / "best"]:
        saved = read(path)
        facts = {name: value for name, value in saved.manifest.items() if name not in ("files", "sha256")}
        found[path.name] = {"state": unpack(saved), "facts": facts, "bytes": saved.payload}
    return found


def both(case: Case, place: Path, world: World) -> int:
    """Train twice, once killed twice. Returns how many kills there were."""
    whole, killed = place / "whole", place / "killed"
    if world.is_first:
        whole.mkdir()
        killed.mkdir()
    train(case, world, whole, Kill())
    kills = 0
    for kill in (*KILLS[case["kills"]], Kill()):
        on_first_rank(world, lambda: None)  # it may still be writing what the others go on from
        try:
            train(case, world, killed, kill)
        except Killed:
            kills += 1
    return kills


def check(case: Case, place: Path) -> None:
    size, _ = STRATEGIES[case["strategy"]]
    if size == 1:
        kills = both(case, place, World())
    else:
        [kills, *_] = run_ranks(partial(both, case, place), size)
    assert kills == 2
    assert_same(outcome(place / "whole"), outcome(place / "killed"))


@pytest.mark.parametrize("case", cases(1, **FEWER))
def test_in_one_process(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.parametrize("case", cases(1, **FEW_RANKS))
def test_on_ranks(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", cases(2))
def test_more_in_one_process(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", cases(2, **RANKS))
def test_more_on_ranks(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)
