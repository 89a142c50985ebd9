"""What a step may and may not do."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from toy import SGD, Classify, CountPositives, Fit, Vectors, lr_schedule, plain, weights, with_noise

from ddptrain.api.observer import Log, Observer
from ddptrain.api.recipe import Loss, Progress
from ddptrain.api.world import World
from ddptrain.engine import ema, meter
from ddptrain.engine.health import Health
from ddptrain.engine.plan import Plan
from ddptrain.engine.step import TrainStep
from ddptrain.errors import Diverged, UserError
from ddptrain.testing import run_ranks

READS = ("item", "cpu", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__")


class _Scalars(TorchDispatchMode):
    """Counts values read from a tensor to the host, by whatever way."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self._seen.append("_local_scalar_dense")
        return func(*args, **(kwargs or {}))


@contextmanager
def reads_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Those of this thread, which a wait for the device would hold up; another one reads the first batch of
    the evaluation meanwhile."""
    seen: list[str] = []
    own = threading.get_ident()
    with monkeypatch.context() as patch:
        for name in READS:
            original = getattr(torch.Tensor, name)

            def counted(
                self: Any, *args: Any, _name: str = name, _original: Any = original, **kw: Any
            ) -> Any:
                if threading.get_ident() == own:
                    seen.append(_name)
                return _original(self, *args, **kw)

            patch.setattr(torch.Tensor, name, counted)
        with _Scalars(seen):
            yield seen


@pytest.mark.parametrize("optim", ["SGD", "AdamW"])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_no_value_is_read_from_the_device_between_two_log_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: str, decay: float | None
) -> None:
    """Here the device is a CPU, whose meter may read; so this one is told to do as on a GPU."""
    reads: dict[int, list[str]] = {}
    step = TrainStep.__call__
    device = torch.device("cpu")
    monkeypatch.setattr(Health, "ready", lambda self: [])
    monkeypatch.setattr(ema, "_move_on_host", ema._move_on_device)
    monkeypatch.setattr(meter, "_HostSums", lambda *given: meter._DeviceSums(*given, device))

    def watched(self: TrainStep, batches: Any, progress: Progress) -> None:
        with reads_counted(monkeypatch) as seen:
            step(self, batches, progress)
        reads[progress.step] = seen
        self.synchronize()

    monkeypatch.setattr(TrainStep, "__call__", watched)
    plan = Plan(steps=20, train_size=100, batch_size=32, micro_batch=10, log_every=10, clip_norm=1.0)
    node = {"_target_": f"torch.optim.{optim}", "lr": 0.01}
    Fit(plan, make_model=with_noise, optim=node, ema=decay).run(World(), tmp_path)
    assert sorted(reads) == list(range(20))
    assert {step: seen for step, seen in reads.items() if seen} == {}


def test_the_counter_of_reads_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with reads_counted(monkeypatch) as seen:
        float(torch.ones(()))
        torch.ones(()).cpu()
        bool(torch.ones(()) > 0)
    assert len(seen) >= 3


def test_one_all_reduce_a_bucket_a_step_whatever_is_accumulated(tmp_path: Path) -> None:
    """Gradient traffic only with the last micro-batch; nothing else is sent between log steps."""

    def rank(world: World) -> list[int]:
        counts: list[int] = []
        sent = 0

        def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            nonlocal sent
            sent += 1
            work = dist.all_reduce(bucket.buffer().div_(world.size), async_op=True)
            return work.get_future().then(lambda f: f.value()[0])  # type: ignore[no-any-return]

        plan = Plan(steps=6, train_size=100, batch_size=32, micro_batch=4, log_every=100)
        original_step, original_reduce = TrainStep.__call__, dist.all_reduce
        others = 0

        def step(self: TrainStep, batches: Any, progress: Progress) -> None:
            nonlocal sent, others
            if progress.step == 0:
                self.state.wrapped.register_comm_hook(None, hook)
            sent = others = 0
            original_step(self, batches, progress)
            counts.append(sent)
            counts.append(others - sent)

        def reduce(*args: Any, **kw: Any) -> Any:
            nonlocal others
            others += 1
            return original_reduce(*args, **kw)

        TrainStep.__call__, dist.all_reduce = step, reduce  # type: ignore[method-assign,assignment]
        Fit(plan).run(world, tmp_path / str(world.rank))
        return counts

    for counts in run_ranks(rank, 2):
        assert counts == [1, 0] * 6


class _Keep(Observer):
    """Keeps the log events."""

    def __init__(self) -> None:
        self.logs: list[Log] = []

    def start(self, event: Any) -> None: ...
    def log(self, event: Log) -> None:
        self.logs.append(event)

    def evaluated(self, event: Any) -> None: ...
    def saved(self, event: Any) -> None: ...
    def end(self, event: Any) -> None: ...


def test_logged_loss_is_the_mean_over_all_samples_of_all_ranks(tmp_path: Path) -> None:
    plan = Plan(steps=8, train_size=100, batch_size=31, log_every=4, seed=2)

    def rank(world: World) -> list[float]:
        keep = _Keep()
        Fit(plan, optim={**SGD, "lr": 0.0}, observers=[keep]).run(
            world, tmp_path / f"{world.size}-{world.rank}"
        )
        return [event.values["loss"] for event in keep.logs]

    [alone] = run_ranks(rank, 1)
    for together in run_ranks(rank, 3):
        assert together == pytest.approx(alone, rel=1e-6)
    data, model = Vectors(100), _seeded_model(2)
    sampler = plan.sampler(World())
    ids = [i for step in range(4) for part in chain(*sampler.slices(step)) for i in _ids(plan, part)]
    expected = torch.nn.functional.cross_entropy(model(data.features[ids]), data.labels[ids]).item()
    assert alone[0] == pytest.approx(expected, rel=1e-5)


def _seeded_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return plain()


def _ids(plan: Plan, part: Any) -> list[int]:
    found: list[int] = plan.sampler(World()).order(part.epoch)[part.start : part.stop].tolist()
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_on_the_cpu_and_keeps_float32_weights(tmp_path: Path, precision: str) -> None:
    seen = set[torch.dtype]()

    def watched() -> torch.nn.Module:
        model = plain()
        model.register_forward_hook(lambda _, inputs, outputs: seen.add(outputs.dtype))
        return model

    plan = Plan(steps=40, train_size=200, batch_size=50, seed=1, clip_norm=5.0)
    state, _, report = Fit(plan, make_model=watched, precision=precision).run(World(), tmp_path)
    assert seen == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert all(p.dtype == torch.float32 for p in state.model.parameters())
    assert report.metrics["accuracy"] > 0.6
    assert state.scaler.is_enabled() == (precision == "fp16")


def test_an_average_whose_steps_bf16_would_round_away_is_refused(tmp_path: Path) -> None:
    plan = Plan(steps=4, train_size=100, batch_size=20)
    half = {"dtype": torch.bfloat16, "make_model": lambda: plain().to(torch.bfloat16)}
    for frozen in ({}, {"freeze": ["0.*"], "thaw_at": 2}):
        with pytest.raises(UserError, match=r"^ema\.decay: 0\.weight of the model is bfloat16"):
            Fit(plan, ema=0.9, **half, **frozen).run(World(), tmp_path)
    Fit(plan, **half).run(World(), tmp_path)


def test_an_overflown_fp16_gradient_skips_the_step_and_lowers_the_scale(tmp_path: Path) -> None:
    class Overflows(Classify):
        def loss(self, model: torch.nn.Module, batch: Any, progress: Progress) -> Loss:
            loss = super().loss(model, batch, progress)
            return Loss(loss.sum * 1e6, loss.count)

    plan = Plan(steps=1, train_size=100, batch_size=20, seed=1)
    state, _, _ = Fit(plan, task=Overflows, precision="fp16").run(World(), tmp_path)
    assert state.scaler.get_scale() == 65536.0 / 2  # torch's initial scale, halved once
    untrained = torch.cat([p.detach().double().flatten() for p in _seeded_model(1).parameters()])
    assert torch.equal(weights(state), untrained)


def test_a_loss_that_is_not_finite_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    class Explodes(Classify):
        def loss(self, model: torch.nn.Module, batch: Any, progress: Progress) -> Loss:
            loss = super().loss(model, batch, progress)
            return Loss(loss.sum * float("nan") if progress.step == 7 else loss.sum, loss.count)

    def rank(world: World) -> str:
        plan = Plan(steps=20, train_size=100, batch_size=20, log_every=5)
        with pytest.raises(Diverged) as caught:
            Fit(plan, task=Explodes).run(world, tmp_path / str(world.rank))
        return str(caught.value)

    first, second = run_ranks(rank, 2)
    assert first == second
    assert first.startswith("step 8 is not finite. First in rank 0: the loss, though all outputs are finite")


def test_dropout_differs_between_ranks_and_steps_but_not_between_runs(tmp_path: Path) -> None:
    class Mask(Classify):
        seen: list[int]

        def loss(self, model: torch.nn.Module, batch: Any, progress: Progress) -> Loss:
            self.seen.append(int(torch.randint(2**31, ()).item()))
            return super().loss(model, batch, progress)

    def rank(world: World) -> list[int]:
        seen: list[int] = []

        def task(make_model: Any) -> Mask:
            made = Mask(make_model)
            made.seen = seen
            return made

        plan = Plan(steps=5, train_size=100, batch_size=20)
        Fit(plan, task=task).run(world, tmp_path / f"{world.rank}-{len(list(tmp_path.iterdir()))}")
        return seen[-5:]

    first, again = run_ranks(rank, 2), run_ranks(rank, 2)
    assert first == again
    assert len({draw for draws in first for draw in draws}) == 10


def test_strategy_dp_trains_like_single_where_there_is_no_gpu(tmp_path: Path) -> None:
    plan = Plan(steps=10, train_size=100, batch_size=20)
    single, _, _ = Fit(plan).run(World(), tmp_path / "single")
    parallel, _, _ = Fit(plan, strategy={"_target_": "ddptrain.strategies.dp.DataParallel"}).run(
        World(), tmp_path / "dp"
    )
    assert torch.equal(weights(single), weights(parallel))


class AtLeastThirty(CountPositives):
    """More than there are in any batch."""

    least_count = 30.0


@pytest.mark.parametrize("task", [CountPositives, AtLeastThirty])
@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, None), (1, 3), (2, None), (2, 3)])
def test_gradients_are_clipped_after_they_are_divided_by_the_global_count(
    tmp_path: Path, ranks: int, micro_batch: int | None, task: type[CountPositives]
) -> None:
    """Beside a plain loop, for a count that only the device knows."""
    clip_norm = 0.3 if task is CountPositives else 0.1
    plan = Plan(steps=6, train_size=100, batch_size=20, clip_norm=clip_norm, seed=1)
    fit = Fit(
        replace(plan, micro_batch=micro_batch), make_model=lambda: plain(torch.float64), task=task,
        dtype=torch.float64, optim={"_target_": "torch.optim.SGD", "lr": 0.5}, sched=lr_schedule("constant"),
    )  # fmt: skip
    found = run_ranks(lambda world: weights(fit.run(world, tmp_path)[0]), ranks)

    torch.manual_seed(plan.seed)
    model, data = plain(torch.float64), Vectors(plan.train_size, dtype=torch.float64)
    optimizer, clipped = torch.optim.SGD(model.parameters(), lr=0.5), 0
    for features, labels in data.train_batches(plan.sampler(World()), range(plan.steps)):
        optimizer.zero_grad()
        each = torch.nn.functional.cross_entropy(model(features), labels, reduction="none")[labels > 1]
        (each.sum() / max(len(each), task.least_count)).backward()
        clipped += float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)) > clip_norm
        optimizer.step()
    assert clipped == plan.steps
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for own in found:
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-12)
