"""An evaluation of a batch a rank before the first step: mistakes in it end the run there, and nothing of it
is kept."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from composed import RECIPES, made
from torch import Tensor, nn
from toy import CLASSES, FEATURES, Classify, Fit, Vectors, run_killed_at, strict, weights

from ddptrain.api.controller import Controller
from ddptrain.api.observer import Evaluated, Observer, Start
from ddptrain.api.recipe import Loss, Progress, Report, Rows
from ddptrain.api.world import World
from ddptrain.engine.early_stop import EarlyStop
from ddptrain.engine.plan import Plan
from ddptrain.errors import UserError
from ddptrain.testing import run_ranks
from ddptrain.tools.sweep.pruning import Pruning

PLAN = Plan(steps=6, train_size=96, batch_size=24, eval_batch_size=10, eval_every=3, save_every=3, seed=5)
FSDP = yaml.safe_load((Path(__file__).parents[2] / "conf/strategy/fsdp.yaml").read_text())
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp on 2": (2, {}),
    "ddp on 3": (3, {}),
    "strict on 2": (2, {"strategy": strict(4)}),
    "fsdp on 2": (2, {"strategy": {**FSDP, "gather": "fp32"}}),
}


@dataclass(frozen=True)
class Mistake:
    said: str
    task: type[Classify] = Classify
    data: type[Vectors] = Vectors
    controllers: Mapping[str, Controller] = field(default_factory=dict)


def evaluating(found: Any) -> type[Classify]:
    class Wrong(Classify):
        def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
            return found

    return Wrong


def reporting(found: Any) -> type[Classify]:
    class Wrong(Classify):
        def report(self, sums: Mapping[str, Tensor]) -> Report:
            wrong: Report = found
            return wrong

    return Wrong


class OtherBest(Classify):
    best_metric = "acuracy"


class NoNames(Classify):
    def report(self, sums: Mapping[str, Tensor]) -> Report:
        raise UserError("of the whole set")


class NoBatches(Vectors):
    def valid_batches(self, chunks: Sequence[range]) -> Any:
        return None


class TooFew(Vectors):
    def valid_batches(self, chunks: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        return super().valid_batches(chunks[1:])


class TooMany(Vectors):
    def valid_batches(self, chunks: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        return super().valid_batches([*chunks, range(3)])


class Broken(Vectors):
    """In the last rank's first batch: that rank alone finds it."""

    def prepare(self, world: World, seed: int) -> None:
        self.last = range(10 * (world.size - 1), 10 * world.size)

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        if self.last in chunks:
            raise UserError("cat.png: can't be read as an image", everywhere=False)
        return super().valid_batches(chunks)


MISTAKES = {
    "a metric to stop by": Mistake(
        "stop.metric=acuracy: the evaluation has accuracy, loss. Did you mean accuracy?",
        controllers={"stop": EarlyStop(2, "acuracy", None)},
    ),
    "a sweep's objective": Mistake(
        "sweep.objectives=los: the evaluation has accuracy, loss. Did you mean loss?",
        controllers={"pruning": Pruning("nowhere", waits=False, metrics=["accuracy", "los"])},
    ),
    "best_metric": Mistake("metrics has no 'acuracy', which OtherBest.best_metric names", OtherBest),
    "sums as Python's numbers": Mistake("and is float. torch.tensor(...) makes", evaluating({"loss": 1.5})),
    "counts as Python's numbers": Mistake("'n' must be a 0-d floating tensor", evaluating({"n": 3})),
    "sums in a list": Mistake("Wrong.evaluate: returned list; it must return a dict", evaluating([1.5])),
    "nothing": Mistake("Wrong.evaluate: returned NoneType", evaluating(None)),
    "a sum for each sample": Mistake("float32 tensor of shape (4,)", evaluating({"loss": torch.ones(4)})),
    "rows of one number": Mistake("Rows must hold", evaluating({"found": Rows(torch.tensor(1.0))})),
    "no report": Mistake("Wrong.report: returned dict", reporting({"accuracy": 1.0})),
    "metrics as tensors": Mistake(
        "metrics['accuracy'] must be a number", reporting(Report({"accuracy": torch.ones(())}))  # type: ignore[dict-item]
    ),
    "no batches": Mistake("NoBatches.valid_batches: returned NoneType", data=NoBatches),
    "too few batches": Mistake("TooFew.valid_batches: gave 0 batches for 1 ranges", data=TooFew),
    "too many batches": Mistake("TooMany.valid_batches: gave more batches for 1 ranges", data=TooMany),
    "a broken file on one rank": Mistake("cat.png: can't be read as an image", data=Broken),
}  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
def test_mistakes_in_the_evaluation_end_a_run_before_its_first_step(world: str, tmp_path: Path) -> None:
    size, settings = WORLDS[world]

    def refused(rank: World, mistake: Mistake, folder: Path) -> tuple[str, list[int]]:
        done: list[int] = []

        def counted(steps: range) -> Iterable[int]:
            for step in steps:
                done.append(step)
                yield step

        fit = Fit(PLAN, step_iterator=counted, controllers=dict(mistake.controllers), **settings)
        try:
            fit.train(mistake.task(fit.make_model), mistake.data(PLAN.train_size), rank, folder)
        except UserError as error:
            return str(error) * error.everywhere, done
        return "", done

    def rank(rank: World) -> dict[str, tuple[str, list[int]]]:
        return {name: refused(rank, mistake, tmp_path / name) for name, mistake in MISTAKES.items()}

    for found in run_ranks(rank, size):
        for name, (said, done) in found.items():
            assert MISTAKES[name].said in said, f"{name}: {said}"
            assert not done, f"{name}: after steps {done}"


@pytest.mark.parametrize("world", ["single", "ddp on 2"])
def test_so_they_do_at_a_resume(world: str, tmp_path: Path) -> None:
    size, settings = WORLDS[world]

    def rank(rank: World, metric: str, stop_at: int | None) -> str:
        plan = replace(PLAN, save_every=2)  # an evaluation that comes first would find it too
        fit = Fit(plan, controllers={"stop": EarlyStop(9, metric, None)}, **settings)
        try:
            fit.run(rank, tmp_path / "run", stop_at if rank.is_first else None)
        except UserError as error:
            return str(error)
        return ""

    run_killed_at(2, lambda world: rank(world, "loss", 2), size, tmp_path / "run")
    assert (
        run_ranks(lambda world: rank(world, "accuracie", None), size)
        == ["stop.metric=accuracie: the evaluation has accuracy, loss. Did you mean accuracy?"] * size
    )
    assert run_ranks(lambda world: rank(world, "accuracy", None), size) == [""] * size


class Moving(nn.Module):
    """State of all kinds, each of which the training reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.register_buffer("written", torch.zeros(8))
        self.register_buffer("replaced", torch.zeros(8))
        self.register_buffer("cache", torch.zeros(8), persistent=False)
        self.register_buffer("empty", None)
        self.written: Tensor
        self.replaced: Tensor
        self.cache: Tensor
        self.empty: Tensor | None
        self.kept = 0.0
        self.attribute = 0.0

    def forward(self, x: Tensor) -> Tensor:
        late = getattr(self, "late", 0.0)
        more = self.written + self.replaced + self.cache + self.kept + self.attribute + late
        hidden = torch.tanh(self.first(x)) * (1 + more + (0 if self.empty is None else self.empty))
        out: Tensor = self.last(hidden)
        return out

    def get_extra_state(self) -> dict[str, float]:
        return {"kept": self.kept}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.kept = state["kept"]

    def move(self) -> None:
        self.written += 1.0
        self.replaced = self.replaced + 1.0
        self.cache += 1.0
        self.empty = torch.ones(8)
        self.register_buffer("late", torch.ones(8))
        self.kept, self.attribute = 1.0, 1.0


class Meddles(Classify):
    """Its loss reads the global generators and a state of this rank's rows; an evaluation before the first
    step changes these, and the model."""

    def __init__(self, meddles: bool, training: list[int], rows: int) -> None:
        super().__init__(Moving)
        self._meddles = meddles
        self._training = training
        self._rows = torch.zeros(rows, 1)
        self.meddled = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
        found = super().loss(model, batch, progress)
        self._rows = 0.5 * self._rows + 0.1
        drawn = random.random() + float(np.random.rand())
        return Loss(found.sum * (1 + drawn + self._rows.mean()), found.count)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        if self._meddles and not self._training:
            self.meddled += 1
            assert isinstance(model, Moving)
            model.move()
            self._rows += 1
            torch.rand(3)
            np.random.rand(3)
            random.random()
        return super().evaluate(model, batch)

    def rank_state(self) -> Mapping[str, Tensor]:
        return {"rows": self._rows}

    def load_rank_state(self, rows: Mapping[str, Tensor]) -> None:
        self._rows = rows["rows"] if rows else torch.zeros_like(self._rows)


@pytest.mark.parametrize("world", WORLDS)
def test_nothing_of_it_is_kept(world: str, tmp_path: Path) -> None:
    size, settings = WORLDS[world]

    def trained(rank: World, meddles: bool, folder: Path, stop_at: int | None) -> Any:
        training: list[int] = []

        def iterated(steps: range) -> Iterable[int]:
            for step in steps:
                training.append(step)
                yield step

        random.seed(1)
        np.random.seed(1)
        plan = replace(PLAN, save_every=2, shards=settings.get("strategy", {}).get("shards"))
        fit = Fit(plan, step_iterator=iterated, ema=0.9, **settings)
        task = Meddles(meddles, training, 24 // size)
        state, report = fit.train(task, Vectors(96), rank, folder, stop_at if rank.is_first else None)
        assert task.meddled == meddles
        whole = state.strategy.whole(state.model.state_dict())
        kept = {name: value.double() for name, value in whole.items() if isinstance(value, Tensor)}
        meter = {key: repr(value) for key, value in state.meter.state_dict().items()}
        random_numbers = (random.random(), float(np.random.rand()))
        return kept, dict(report.metrics), task.rank_state()["rows"], meter, random_numbers

    for killed in (None, 2):
        found = []
        for meddles in (True, False):
            folder = tmp_path / f"{killed}-{meddles}"
            if killed is not None:
                run_killed_at(killed, lambda rank: trained(rank, meddles, folder, killed), size, folder)  # noqa: B023
            found.append(run_ranks(lambda rank: trained(rank, meddles, folder, None), size))  # noqa: B023
        for meddled, plain in zip(*found, strict=True):
            assert meddled[0].keys() == plain[0].keys()
            assert all(torch.equal(value, plain[0][name]) for name, value in meddled[0].items())
            assert meddled[1] == plain[1]
            assert torch.equal(meddled[2], plain[2])
            assert meddled[3:] == plain[3:]


class Notes(Observer):
    def __init__(self) -> None:
        self.before: set[str] = set()
        self.after: set[str] = set()

    def start(self, event: Start) -> None:
        self.before = set(event.metrics)

    def evaluated(self, event: Evaluated) -> None:
        self.after = set(event.metrics)


def main(names: Iterable[str]) -> set[str]:
    return {name for name in names if "/" not in name}


QUICK = ("cnn_digits", "transformer_text", "yolo_shapes")


@pytest.mark.parametrize(
    "recipe", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in RECIPES]
)
def test_each_recipe_names_its_metrics_by_one_sample(recipe: str, tmp_path: Path) -> None:
    _, task, data = made(recipe, tmp_path)
    plan = Plan(steps=1, train_size=data.train_size, batch_size=4, eval_batch_size=1)
    notes = Notes()
    Fit(plan, observers=[notes], optim={"_target_": "torch.optim.SGD", "lr": 0.0}).train(
        task, data, World(), tmp_path / "run"
    )
    assert main(notes.before) == main(notes.after)
    assert task.best_metric in notes.before


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("by zero"), KeyError("n"), ValueError("one class"), UserError("no box")]
)
def test_a_report_that_needs_more_samples_is_noted(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Picky(Classify):
        def report(self, sums: Mapping[str, Tensor]) -> Report:
            if int(sums["count"]) < 101:
                raise error
            return super().report(sums)

    fit = Fit(PLAN, task=Picky, controllers={"stop": EarlyStop(9, "loss", None)})
    with caplog.at_level("WARNING", logger="ddptrain"):
        state, _, _ = fit.run(World(), tmp_path)
    assert state.step == PLAN.steps
    assert (
        f"Picky.report fails on the first 10 validation samples before training ({type(error).__name__}"
        in (caplog.text)
    )


def test_a_report_that_no_samples_mend_ends_it(tmp_path: Path) -> None:
    class Misspelt(Classify):
        def report(self, sums: Mapping[str, Tensor]) -> Report:
            return Report({"accuracy": len(summs)})  # type: ignore[name-defined]  # noqa: F821

    done: list[int] = []

    def counted(steps: range) -> Iterable[int]:
        done.extend(steps)
        return steps

    with pytest.raises(NameError):
        Fit(PLAN, task=Misspelt, step_iterator=counted).run(World(), tmp_path)
    with pytest.raises(UserError, match="of the whole set"):
        Fit(Plan(steps=6, train_size=96, batch_size=24), task=NoNames, step_iterator=counted).run(
            World(), tmp_path
        )
    assert not done


def test_a_detail_may_be_missing_and_metrics_are_told(tmp_path: Path) -> None:
    class Details(Classify):
        def report(self, sums: Mapping[str, Tensor]) -> Report:
            found = super().report(sums)
            seen = {"recall/cat": 0.5} if int(sums["count"]) == 101 else {}
            return Report({**found.metrics, **seen})

    notes = Notes()
    fit = Fit(PLAN, task=Details, observers=[notes], controllers={"stop": EarlyStop(9, "recall/cat", None)})
    state, _, _ = fit.run(World(), tmp_path)
    assert state.step == PLAN.steps
    assert notes.before == {"accuracy", "loss"}
    assert weights(state).isfinite().all()
