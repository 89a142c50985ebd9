"""Every figure of metrics.jsonl beside a slow reference: with steps left out, killed and resumed, on other
ranks."""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import pairwise_of, product_of
from torch import Tensor, nn
from toy import Fit, Vectors, auto, run_killed_at, strict

from ddptrain.api.recipe import Loss, Progress, Report, Task
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.engine import meter
from ddptrain.engine.health import Health
from ddptrain.engine.plan import Plan
from ddptrain.observe.jsonl import Jsonl
from ddptrain.testing import run_ranks

TRAIN, BATCH, STEPS = 40, 12, 9
FAULTS: dict[str, list[tuple[int, int, int]]] = {
    "none": [],
    "one rank": [(4, -1, 0)],
    "one micro-batch": [(3, 0, -1), (7, -1, -1)],
    "all ranks": [(4, rank, 0) for rank in range(3)],
    "a whole window, and the first step": [(step, 0, 0) for step in (0, 3, 4, 5)],
}
"""(step, rank, micro-batch) of what is not finite; a step beside which a window of one or three has no other
is among them."""
CHOICES: dict[str, list[Any]] = {
    "ranks": [1, 2, 3],
    "micro_batch": [None, 2],
    "strict": [False, True],
    "how": ["loss", "gradient", "count", "fp16"],
    "where": list(FAULTS),
    "count": ["int", "tensor"],
    "log_every": [1, 3, 4],
    "killed": [None, (2, 1), (5, 0)],
    "late": [False, True],
}
"""killed: after which step, and by how many ranks fewer it goes on. late: sums and outcomes as on a GPU."""


def loss_of(sample: int) -> float:
    return sample * sample / 8 % 13


def items_of(sample: int, count: str) -> int:
    """What `Loss.count` counts of a sample."""
    return 3 if count == "int" else (0, 0, 0, 5, 1)[sample % 5]


class Numbered(Vectors):
    """Batches know their samples."""

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Any]:
        for ids, (features, _) in zip(
            sampler.samples(steps, torch.device("cpu")), super().train_batches(sampler, steps), strict=False
        ):
            yield features, ids[0]


class Known(Task):
    """Its losses are known beforehand; the gradient is 0, or not finite for some samples at some steps."""

    best_metric, higher_is_better = "loss", False

    def __init__(self, case: Mapping[str, Any], bad: Mapping[int, set[int]]) -> None:
        self._case = case
        self._bad = bad

    def build(self) -> nn.Module:
        return nn.Linear(12, 1)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
        features, ids = batch
        zero = 0 * model(features).float().sum()
        is_bad = bool(self._bad.get(progress.step, set()) & set(ids.tolist()))
        how = self._case["how"]
        losses = torch.tensor([loss_of(sample) for sample in ids.tolist()])
        items = sum(items_of(sample, self._case["count"]) for sample in ids.tolist())
        count: int | Tensor = items if self._case["count"] == "int" else torch.tensor(items)
        logs = {"twice": 2 * losses.sum()} | ({"third": losses.sum() / 4} if progress.step % 3 == 1 else {})
        if is_bad and how == "count" and isinstance(count, Tensor):
            count = count * float("nan")
        elif is_bad and how in ("gradient", "fp16"):
            zero = zero * 1e38 * 1e38
            zero = torch.where(zero == zero, zero, 0)
            zero.register_hook(lambda gradient: gradient * float("inf"))
        elif is_bad:
            zero, logs = zero * float("nan"), {name: value * float("nan") for name, value in logs.items()}
        return Loss(zero + losses.sum(), count, logs)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        return {"count": torch.tensor(len(batch[0]))}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        return Report({"loss": float(sums["count"])})


def expected(plan: Plan, case: Mapping[str, Any], bad: Mapping[int, set[int]]) -> list[dict[str, float]]:
    """What is logged, by a loop over the samples."""
    lines, sums, left_out = [], dict[str, list[float]](), 0
    sampler = plan.sampler(World())
    for step in range(plan.steps):
        left_out += step in bad
        for part in chain(*sampler.slices(step)) if step not in bad else []:
            for sample in sampler.order(part.epoch)[part.start : part.stop].tolist():
                loss = loss_of(sample)
                values = {"loss": loss, "twice": 2 * loss} | ({"third": loss / 4} if step % 3 == 1 else {})
                for name, value in values.items():
                    total, count = sums.get(name, (0.0, 0.0))
                    sums[name] = [total + value, count + items_of(sample, case["count"])]
        if (step + 1) % plan.log_every == 0 or step + 1 == plan.steps:
            means = {name: total / (count or 1) for name, (total, count) in sums.items()}
            epoch, samples = (step + 1) * BATCH / TRAIN, (step + 1) * BATCH
            line = {"step": step + 1, "epoch": epoch, "samples": samples, "split": "train", **means}
            lines.append(line | ({"left_out": left_out} if left_out else {}))
            sums.clear()
    return lines


def bad_samples(plan: Plan, case: Mapping[str, Any], ranks: int) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for step, rank, piece in FAULTS[case["where"]]:
        pieces = plan.sampler(World(rank=rank % ranks, size=ranks)).slices(step)
        for part in pieces[piece % len(pieces)]:
            order = plan.sampler(World()).order(part.epoch)
            found.setdefault(step, set()).update(order[part.start : part.stop].tolist())
    return found


def check(folder: Path, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = case["ranks"]
    folder.mkdir(exist_ok=True)
    plan = Plan(
        steps=STEPS, train_size=TRAIN, batch_size=BATCH, micro_batch=case["micro_batch"], save_every=1,
        log_every=case["log_every"], eval_every=STEPS, skips_nonfinite=case["how"] != "fp16", seed=3,
        shards=4 if case["strict"] else None,
    )  # fmt: skip
    bad = bad_samples(plan, case, ranks)
    strategy = strict(4) if case["strict"] else auto()

    def rank(world: World, stop_at: int | None) -> None:
        fit = Fit(
            plan, strategy=strategy, observers=[Jsonl()] if world.is_first else [],
            precision="fp16" if case["how"] == "fp16" else "fp32",
        )  # fmt: skip
        fit.train(Known(case, bad), Numbered(TRAIN, 5), world, folder, stop_at if world.is_first else None)

    with monkeypatch.context() as patch:
        if case["late"]:
            sums = meter._DeviceSums
            patch.setattr(Health, "ready", lambda self: [])
            patch.setattr(meter, "_HostSums", lambda shards: sums(shards, torch.device("cpu")))
        if case["killed"] is not None:
            stop_at, fewer = case["killed"]
            run_killed_at(stop_at, lambda world: rank(world, stop_at), ranks, folder)
            ranks = max(1, ranks - fewer)
        run_ranks(lambda world: rank(world, None), ranks)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = [{n: v for n, v in line.items() if n != "lr"} for line in lines if line["split"] == "train"]
    assert found == expected(plan, case, bad), case


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.long] * (i % 2)) for i, case in enumerate(pairwise_of(CHOICES))],
    ids=str,
)
def test_figures_are_those_of_a_loop_over_samples(
    tmp_path: Path, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path, case, monkeypatch)


class Sometimes(Known):
    """Logs one more number of the micro-batches that have sample 7 or 8."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
        loss, ids = super().loss(model, batch, progress), set(batch[1].tolist())
        return replace(loss, logs={"some": loss.sum.detach()} if ids & {7, 8} else {})


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("ranks", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 2)), 3])
@pytest.mark.parametrize("killed", [None, 3])
def test_what_only_some_ranks_log(
    ranks: int, late: bool, killed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At other steps on each: the mean of the micro-batches that log it."""
    plan = Plan(
        steps=STEPS, train_size=TRAIN, batch_size=BATCH, micro_batch=2, save_every=1, log_every=1,
        eval_every=STEPS, seed=3,
    )  # fmt: skip
    if late:
        monkeypatch.setattr(meter, "_HostSums", lambda shards: meter._DeviceSums(shards, torch.device("cpu")))

    def rank(world: World, stop_at: int | None) -> None:
        fit = Fit(plan, strategy=auto(), observers=[Jsonl()] if world.is_first else [])
        task = Sometimes({"how": "loss", "count": "int"}, {})
        fit.train(task, Numbered(TRAIN, 5), world, tmp_path, stop_at if world.is_first else None)

    if killed:
        run_killed_at(killed, lambda world: rank(world, killed), ranks, tmp_path)
    run_ranks(lambda world: rank(world, None), ranks)
    wanted: list[float | None] = []
    for step in range(STEPS):
        total, count = 0.0, 0
        for place in range(ranks):
            sampler = plan.sampler(World(rank=place, size=ranks))
            for parts in sampler.slices(step):
                ids = [
                    i for part in parts for i in sampler.order(part.epoch)[part.start : part.stop].tolist()
                ]
                if {7, 8} & set(ids):
                    total, count = total + sum(map(loss_of, ids)), count + 3 * len(ids)
        wanted.append(total / count if count else None)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line.get("some") for line in lines if line["split"] == "train"] == wanted
    assert None in wanted
    assert any(wanted)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", CHOICES["ranks"])
@pytest.mark.parametrize("how", CHOICES["how"])
def test_of_a_part_of_the_whole_product(
    tmp_path: Path, ranks: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 of 720 cases each, others in each test."""
    dice = random.Random(f"{ranks} {how}")
    cases = dice.sample(product_of({**CHOICES, "ranks": [ranks], "how": [how]}), 40)
    for i, case in enumerate(cases):
        check(tmp_path / str(i), case, monkeypatch)
