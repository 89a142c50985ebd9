"""Buffers that are replaced or made late, extra state, complex parameters, an optimizer's own numbers: each
is in what evaluates, in a checkpoint, and back after a warm-up, a skipped step and a resume."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import CLASSES, FEATURES, Classify, Fit, auto, newest_state, run_killed_at, strict

from ddptrain.api.recipe import Loss, Progress
from ddptrain.api.world import World
from ddptrain.engine.load_model import fit_model
from ddptrain.engine.plan import Plan
from ddptrain.errors import UserError
from ddptrain.strategies.single import Single
from ddptrain.testing import run_ranks

WIDTH = 8


class Moving(nn.Module):
    """Its output depends on each kind of state that a forward pass in training moves."""

    def __init__(self, late: bool = True, extra: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.last = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("replaced", torch.zeros(WIDTH))
        self.register_buffer("in_place", torch.zeros(WIDTH))
        self.register_buffer("phase", torch.ones(WIDTH // 2 + 1, dtype=torch.complex64))
        self.register_buffer("late", None)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.replaced: Tensor
        self.in_place: Tensor
        self.phase: Tensor
        self.late: Tensor | None
        self.passes: Tensor
        self.scale = 1.0
        self._has_late = late
        self._moves_extra = extra

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            with torch.no_grad():
                mean = x.mean(dim=0)
                self.replaced = 0.9 * self.replaced + 0.1 * mean
                self.in_place.mul_(0.8).add_(mean, alpha=0.2)
                self.phase.mul_(torch.polar(torch.tensor(0.99), mean[0]))
                self.passes += 1
                if self._has_late:
                    self.late = mean.clone() if self.late is None else 0.5 * self.late + 0.5 * mean
            if self._moves_extra:
                self.scale *= 1.01
        x = (x - self.replaced + self.in_place) * self.scale + 0.01 * self.passes
        x = x if self.late is None else x + self.late
        x = torch.fft.irfft(torch.fft.rfft(x) * self.filter * self.phase, n=WIDTH)
        logits: Tensor = self.last(torch.tanh(x))
        return logits

    def get_extra_state(self) -> dict[str, Any]:
        return {"scale": self.scale, "names": ["a"]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


def fit(**changes: Any) -> Fit:
    plan = Plan(
        steps=6, train_size=103, batch_size=24, eval_batch_size=40, eval_every=2, save_every=3, seed=3
    )
    plan = replace(plan, **changes.pop("plan", {}))
    return Fit(plan, **{"make_model": Moving, **changes})


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """Each value of nested dicts and lists, by its place."""
    if isinstance(state, dict | list | tuple):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {k: v for key, value in items for k, v in flat(value, f"{name}.{key}").items()}
    return {name: state}


def differing(ours: Any, theirs: Any) -> list[str]:
    a, b = flat(ours), flat(theirs)
    assert a.keys() == b.keys()

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor):
            return x.dtype == y.dtype and torch.equal(x, y)
        return bool(x == y)

    return [name for name in a if not same(a[name], b[name])]


@pytest.mark.parametrize("ema", [None, 0.9])
def test_the_checkpoint_evaluates_as_the_run_did(ema: float | None, tmp_path: Path) -> None:
    _, data, report = fit(ema=ema).run(World(), tmp_path)
    state = newest_state(tmp_path)
    model = Moving()
    fit_model(model, state["average"].get("weights") or state["model"], "test")
    task, totals = Classify(Moving), [0.0, 0]
    with torch.no_grad():
        for batch in data.valid_batches([range(i, min(i + 40, 101)) for i in range(0, 101, 40)]):
            sums = task.evaluate(model.eval(), batch)
            totals = [totals[0] + float(sums["loss"]), totals[1] + int(sums["count"])]
    assert totals[0] / totals[1] == report.metrics["loss"]


def test_the_average_of_each_is_what_five_lines_compute(tmp_path: Path) -> None:
    models: list[nn.Module] = []
    seen: list[dict[str, Any]] = []

    def made() -> nn.Module:
        models.append(Moving())
        return models[-1]

    def note() -> None:
        state = models[-1].state_dict()
        seen.append({name: v.clone() if isinstance(v, Tensor) else v for name, v in state.items()})

    def noted(steps: range) -> Iterator[int]:
        note()
        for step in steps:
            yield step
            note()

    fit(ema=0.9, make_model=made, step_iterator=noted).run(World(), tmp_path)
    start, *steps = seen
    average = newest_state(tmp_path)["average"]["weights"]
    assert average.keys() == steps[-1].keys()
    for name, found in average.items():
        expected = start.get(name, steps[0][name])
        for step, values in enumerate(steps, start=1):
            decay = min(0.9, (1 + step) / (10 + step))
            if isinstance(found, Tensor) and (found.is_floating_point() or found.is_complex()):
                expected = decay * expected + (1 - decay) * values[name]
            else:
                expected = values[name]
        if isinstance(found, Tensor):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        else:
            assert found == expected


@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("size", [1, 2])
def test_a_resume_ends_with_the_same_state(size: int, ema: float | None, tmp_path: Path) -> None:
    def rank(folder: Path, stop_at: int | None = None) -> Callable[[World], Any]:
        one = fit(ema=ema, strategy=auto(), plan={"batch_size": 24 * size})
        return lambda world: one.run(world, folder, stop_at)[2].metrics

    run_killed_at(3, rank(tmp_path / "killed", 3), size, tmp_path / "killed")
    killed = run_ranks(rank(tmp_path / "killed"), size)
    unkilled = run_ranks(rank(tmp_path / "unkilled"), size)
    assert killed == unkilled
    assert not differing(newest_state(tmp_path / "killed"), newest_state(tmp_path / "unkilled"))


def test_warming_up_leaves_no_trace(tmp_path: Path) -> None:
    """Two runs of which one makes three passes more before its first step."""
    once = fit().run(World(), tmp_path / "once")[0]
    passes = Single.warm_up_passes
    try:
        Single.warm_up_passes = lambda self, compiled: 3  # type: ignore[method-assign]
        more = fit().run(World(), tmp_path / "more")[0]
    finally:
        Single.warm_up_passes = passes  # type: ignore[method-assign]
    assert not differing(dict(once.model.state_dict()), dict(more.model.state_dict()))


class Restless(Moving):
    """Moves its state in evaluation, too."""

    def forward(self, x: Tensor) -> Tensor:
        training = self.training
        self.training = True
        try:
            return super().forward(x)
        finally:
            self.training = training


@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("size", [1, 2])
def test_an_evaluation_leaves_no_trace(size: int, ema: float | None, tmp_path: Path) -> None:
    """Two runs of which one evaluates after each step."""

    def rank(every: int) -> Callable[[World], Any]:
        one = fit(ema=ema, strategy=auto(), make_model=Restless, plan={"eval_every": every})
        return lambda world: one.run(world, tmp_path / str(every))[2].metrics

    assert run_ranks(rank(1), size) == run_ranks(rank(6), size)
    often, once = (newest_state(tmp_path / name) for name in ("1", "6"))
    for part in ("model", "average", "optimizer"):
        assert not differing(often[part], once[part])


class MadeLate(nn.Module):
    """Its only buffer, but for those of its norm, is made by its first pass in training, and read there."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(FEATURES, WIDTH), norm, nn.Linear(WIDTH, CLASSES)
        self.register_buffer("mean", None)
        self.mean: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        if self.training:
            own = x.detach().mean(dim=0)
            self.mean = own if self.mean is None else 0.5 * self.mean + 0.5 * own
        logits: Tensor = self.last(torch.tanh(x if self.mean is None else x - self.mean))
        return logits


@pytest.mark.parametrize("strategy", [auto(), {"_target_": "ddptrain.strategies.fsdp.Fsdp"}])
@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm1d(WIDTH)])
def test_a_buffer_that_a_pass_makes_is_the_first_ranks(
    norm: Callable[[], nn.Module], strategy: dict[str, Any], tmp_path: Path
) -> None:
    """In each step: so that an evaluation and a resume, which give its value to all ranks, change nothing."""

    def rank(name: str, every: int, stop_at: int | None = None) -> Callable[[World], Any]:
        one = fit(strategy=strategy, make_model=lambda: MadeLate(norm()), plan={"eval_every": every})
        return lambda world: one.run(world, tmp_path / name, stop_at)[2].metrics

    run_killed_at(3, rank("killed", 6, 3), 2, tmp_path / "killed")
    runs = [run_ranks(rank(name, every), 2) for name, every in (("killed", 6), ("once", 6), ("often", 1))]
    assert runs[0] == runs[1] == runs[2]
    killed, once, often = (newest_state(tmp_path / name) for name in ("killed", "once", "often"))
    for other in (killed, often):
        assert not differing(other["model"], once["model"])


class Spoils(Classify):
    """Its loss is not finite in the steps named."""

    steps: tuple[int, ...] = (0, 3)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
        plain = super().loss(model, batch, progress)
        return Loss(plain.sum * (float("nan") if progress.step in self.steps else 1.0), plain.count)


def test_a_step_that_is_left_out_leaves_no_trace(tmp_path: Path) -> None:
    """Steps 1 and 4 of six are left out: the same state as of a model that never saw them."""
    _, _, report = fit(task=Spoils, ema=0.9, plan={"skips_nonfinite": True}).run(World(), tmp_path)
    state = newest_state(tmp_path)
    assert state["left_out"] == 2
    assert state["model"]["passes"] == 4
    assert state["model"]["_extra_state"]["scale"] == pytest.approx(1.01**4)
    assert state["average"]["weights"]["passes"] == 4
    assert report.metrics["loss"] > 0


def test_strict_gives_the_same_state_on_any_number_of_ranks(tmp_path: Path) -> None:
    def rank(folder: Path) -> Callable[[World], Any]:
        one = fit(ema=0.9, strategy=strict(4), plan={"shards": 4})
        return lambda world: one.run(world, folder)[2].metrics

    reports = [run_ranks(rank(tmp_path / str(size)), size)[0] for size in (1, 2, 3)]
    assert reports[0] == reports[1] == reports[2]
    for size in (2, 3):
        ours, theirs = newest_state(tmp_path / str(size)), newest_state(tmp_path / "1")
        assert not differing(ours["model"], theirs["model"])
        assert not differing(ours["average"], theirs["average"])


class SeesItsShare(Moving):
    """Extra state that each rank has another of."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale += float(x.sum())
        return super().forward(x)


def test_extra_state_that_differs_between_ranks_is_refused_before_the_first_step(tmp_path: Path) -> None:
    steps: list[int] = []

    def rank(world: World) -> str:
        one = fit(make_model=SeesItsShare, step_iterator=lambda s: steps.extend(s) or s)  # type: ignore[func-returns-value]
        try:
            one.run(world, tmp_path)
        except UserError as error:
            return f"{len(steps)} {error}"
        return "trained"

    for said in run_ranks(rank, 2):
        assert said.startswith("0 model: after 0 steps the extra state (get_extra_state) of SeesItsShare")


class Grows(Moving):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.in_place = torch.cat([self.in_place, self.in_place[:1]])
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class Registers(Moving):
    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("new", torch.ones(3))
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Grows, r"buffer in_place .* \(8,\) of torch.float32 and becomes \(12,\)"),
        (Registers, "new .* registered there"),
    ],
)
def test_buffers_that_no_checkpoint_could_give_back_are_refused(
    model: Callable[[], nn.Module], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        fit(make_model=model).run(World(), tmp_path)


def half() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).to(torch.bfloat16)


OPTIMIZERS = [
    "NAdam",
    "ASGD",
    "Adam",
    "AdamW",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "SGD",
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_state_keeps_its_dtypes(name: str, tmp_path: Path) -> None:
    """Of parameters in bf16, and to the bit over a kill."""
    node = {"_target_": f"torch.optim.{name}", "lr": 0.01} | ({"momentum": 0.9} if name == "SGD" else {})
    one = fit(make_model=half, dtype=torch.bfloat16, optim=node, sched=Fit(fit().plan).sched)
    run_killed_at(3, lambda world: one.run(world, tmp_path / "killed", 3)[2], 1, tmp_path / "killed")
    one.run(World(), tmp_path / "killed")
    one.run(World(), tmp_path / "unkilled")
    ours, theirs = newest_state(tmp_path / "killed"), newest_state(tmp_path / "unkilled")
    assert not differing(ours["optimizer"], theirs["optimizer"])
    assert not differing(ours["model"], theirs["model"])


def test_weights_of_another_dtype_are_refused() -> None:
    model = nn.Linear(3, 2)
    saved = {name: value.to(torch.complex64) for name, value in model.state_dict().items()}
    with pytest.raises(
        UserError, match=r"weight is \(2, 3\) of torch.complex64 there and \(2, 3\) of torch.float32"
    ):
        fit_model(model, saved, "there")
