"""Where the time goes: each bottleneck, put in on purpose, is the one that the verdict names."""

import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from toy import FEATURES, Classify, Fit, Vectors, auto, strict, with_noise

from ddptrain.api.observer import End, Evaluated, Observer, RunInfo, Times
from ddptrain.api.observer import Log as Logged
from ddptrain.api.recipe import Loading
from ddptrain.api.sampler import Sampler
from ddptrain.api.timing import PHASES, TRAINING, Timing, format_shares
from ddptrain.api.world import World
from ddptrain.config.schema import Checkpoint, Config, LogSection, Train
from ddptrain.distributed.cpu import cores
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.engine.flops import counter, known_peak
from ddptrain.engine.phases import Phases
from ddptrain.engine.plan import Plan
from ddptrain.engine.stopwatch import HostClock, Stopwatch
from ddptrain.observe.advice import advise
from ddptrain.strategies.ddp import Ddp
from ddptrain.strategies.flag_bucket import FlagBucket
from ddptrain.strategies.strict import Strict
from ddptrain.testing import run_ranks

STEPS = 12
EVERY_TIME = pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.long)])
"""Ten times of ten on a machine of one's own; beside others, with bursts as long as a trial, two of three."""
ALONE, UNKNOWN = World(), Loading()


class TimeKeeper(Observer):
    """Keeps what the engine tells of its time."""

    def __init__(self) -> None:
        self.logs: list[Timing] = []
        self.evaluations: list[Timing] = []

    def start(self, event: Any) -> None:
        self.began = time.perf_counter()

    def log(self, event: Logged) -> None:
        self.logs.append(event.timing)

    def evaluated(self, event: Evaluated) -> None:
        self.evaluations.append(event.timing)

    def saved(self, event: Any) -> None: ...

    def end(self, event: End) -> None:
        self.times = event.times


class SlowVectors(Vectors):
    """A data set that takes its time for each batch, on the given rank or on all."""

    def __init__(self, train: int, seconds: float, rank: int | None = None) -> None:
        super().__init__(train)
        self._seconds, self._rank = seconds, rank

    def prepare(self, world: World, seed: int) -> None:
        self._slow = self._rank in (None, world.rank)

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Any]:
        for batch in super().train_batches(sampler, steps):
            time.sleep(self._seconds if self._slow else 0.0)
            yield batch


def plan(steps: int = STEPS, **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "steps": steps, "train_size": 1000, "batch_size": 32, "micro_batch": None, "eval_batch_size": 128,
        "log_every": steps, "eval_every": None, "save_every": steps, "clip_norm": None, "seed": 0,
    }  # fmt: skip
    return Plan(**{**settings, **changes})


def heavy() -> nn.Module:
    """A pass takes milliseconds; few weights, so that nothing else does."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(FEATURES, 64), nn.Linear(64, 5)
            self.again = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(150):
                x = torch.tanh(self.again(x))
            return self.last(x)

    return Repeated()


def light() -> nn.Module:
    return nn.Linear(FEATURES, 5)


def trained(
    folder: Path, data: Vectors, make_model: Callable[[], nn.Module], world: World = ALONE, steps: int = STEPS
) -> Times:
    times = TimeKeeper()
    fit = Fit(plan(steps), make_model=make_model, observers=[times])
    fit.train(Classify(make_model), data, world, folder)
    return times.times


def setup(world: World = ALONE, loading: Loading = UNKNOWN, **config: Any) -> RunInfo:
    observers = {"console": {}, "plots": {}}
    given = {"recipe": "toy", "task": {}, "data": {}, "optim": {}, "observers": observers}
    given["strategy"] = auto(compression="none")
    return RunInfo(
        Path(),
        asdict(Config(**{**given, **config})),
        world,
        "fp32",
        loading,
        gradient_bytes=32_000_000,
        fused=True,
        steps_per_epoch=32,
        steps=200,
        valid_size=101,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where a save waits for no disk: a busy one would be the bottleneck, and rightly be named."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as found:
        yield Path(found)


@EVERY_TIME
def test_a_slow_data_set_is_named_every_time(times: int, folder: Path) -> None:
    said = []
    for trial in range(times):
        took = trained(folder / str(trial), SlowVectors(1000, seconds=0.02), light, steps=20)
        said.append(advise(setup(loading=Loading(workers=0, resident=False), data={"resident": False}), took))
    assert_named(said, "waiting for data ", f"data.workers={cores()} or data.resident=true")


@pytest.mark.long
@EVERY_TIME
def test_a_heavy_model_is_as_it_should_be_every_time(times: int, folder: Path) -> None:
    trials = [trained(folder / str(trial), Vectors(1000), heavy, steps=150) for trial in range(times)]
    said = [advise(setup(), took) for took in trials]
    for phase in ("forward", "backward"):  # a moment in which another process has the core falls into one
        assert statistics.median(took.timing.shares[phase] for took in trials) > 0.15
    assert_named(said, "forward and backward pass ", "python -m ddptrain bench tries what could shorten it")


@EVERY_TIME
def test_a_slow_disk_is_named_every_time(times: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.05)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    own = setup(checkpoint=Checkpoint(background=False))
    said = [advise(own, trained(folder / str(i), Vectors(1000), light)) for i in range(times)]
    assert_named(said, "saving checkpoints ", "checkpoint.background=true writes while it trains")


@EVERY_TIME
def test_a_slow_link_is_named_every_time(times: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message takes 40 ms longer to arrive; DDP waits for it by itself. Over a link that is
    really slow: tests/launch/test_hosts.py."""

    def late(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sending = dist.all_reduce(bucket.buffer(), async_op=True)
        arrived: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def receive() -> None:  # in a thread: Future.then would sleep in the backward pass of the later rank
            sending.wait()
            time.sleep(0.04)
            arrived.set_result(bucket.buffer() / dist.get_world_size())

        threading.Thread(target=receive).start()
        return arrived

    wrap = Ddp.wrap

    def wrap_over_slow_link(self: Ddp, model: nn.Module) -> nn.Module:
        wrapped = wrap(self, model)
        wrapped.register_comm_hook(None, late)
        return wrapped

    def rank(world: World) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr(Ddp, "wrap", wrap_over_slow_link)
            runs = [trained(folder / str(i), Vectors(1000), light, world, 30) for i in range(times)]
        return [advise(setup(world), took) for took in runs]

    said = run_ranks(rank, 2)[0]
    assert_named(
        said, "waiting for the other ranks' gradients ", "strategy.compression=bf16 halves the traffic"
    )


@pytest.mark.parametrize("model", [light, with_noise])
@EVERY_TIME
def test_a_rank_that_holds_the_others_up_is_named_every_time(
    times: int, model: Callable[[], nn.Module], folder: Path
) -> None:
    """With BatchNorm too, whose statistics DDP sends from rank 0 before each forward pass: the wait for them
    is no forward pass."""

    def rank(world: World) -> list[tuple[str, float, float]]:
        said = []
        for trial in range(times):
            data = SlowVectors(1000, seconds=0.06, rank=1)
            took = trained(folder / str(trial), data, model, world)
            first = took.ranks[0].seconds
            verdict = advise(setup(world, Loading(workers=2, resident=False)), took)
            said.append((verdict, first["all_reduce"], first["forward"]))
        return said

    found = run_ranks(rank, 2)[0]
    assert_named([said for said, _, _ in found], "rank 1 delays the others: waiting for data ", "")
    assert statistics.median(waited - forward for _, waited, forward in found) > 0.3


def assert_named(said: Sequence[str], begins: str, ends: str) -> None:
    right = [words.startswith(begins) and words.endswith(ends) for words in said]
    assert sum(right) >= (2 if len(said) == 3 else len(said)), said


@pytest.mark.parametrize(
    ("loading", "data", "said"),
    [
        (Loading(workers=64, resident=False), {}, "smaller files, a faster disk, or more cores"),
        (Loading(workers=0, resident=False), {}, f"data.workers={cores()}"),
        (Loading(workers=64, resident=False), {"resident": False}, "data.resident=true"),
    ],
)
def test_workers_are_not_doubled_beyond_the_cores(loading: Loading, data: dict[str, Any], said: str) -> None:
    seconds = dict.fromkeys(PHASES, 0.4 / (len(PHASES) - 1)) | {"data": 0.6}
    timing = Timing(seconds, samples=100)
    told = advise(setup(loading=loading, data=data), Times(timing, [timing], 1.0, 0.0))
    assert told == f"waiting for data 60% of the run: {said}"


def test_every_moment_belongs_to_a_phase(tmp_path: Path) -> None:
    """Of the whole of `fit` after its set-up."""
    times = TimeKeeper()
    steps = plan(40, log_every=10, eval_every=20, save_every=10)
    Fit(steps, observers=[times]).train(Classify(light), SlowVectors(1000, 0.005), World(), tmp_path)
    wall = time.perf_counter() - times.began
    split = times.times.timing
    assert 0.9 * wall < sum(split.seconds.values()) <= wall
    assert split.seconds["data"] >= 39 * 0.005  # the first batch belongs to the set-up
    assert split.samples == 40 * 32
    assert sum(lap.samples for lap in times.logs) == 40 * 32
    assert sum(lap.samples for lap in times.evaluations) == 40 * 32
    assert all(abs(sum(lap.shares.values()) - 1) < 1e-6 for lap in times.logs)
    assert split.seconds["all_reduce"] < 0.01 * wall


@pytest.mark.parametrize("strategy", [auto(), strict(2)])
def test_ranks_tell_their_backward_pass_from_the_wait_for_others(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    """Rank 1's data comes late: rank 0 waits for it in the all-reduce, and not in its own backward pass."""

    def rank(world: World) -> list[dict[str, float]]:
        times = TimeKeeper()
        own = plan(20, shards=strategy.get("shards"))
        fit = Fit(own, strategy=strategy, observers=[times])
        fit.train(Classify(light), SlowVectors(1000, 0.02, rank=1), world, tmp_path)
        return [dict(rank.seconds) for rank in times.times.ranks]

    first, second = run_ranks(rank, 2)[0]
    assert first["all_reduce"] > 0.25 > 0.15 > first["backward"]
    assert second["data"] > 0.35
    assert second["all_reduce"] < first["all_reduce"] - 0.15  # of 0.4 s that rank 0 waits for this one


def test_timing_costs_less_than_a_hundredth_of_two_milliseconds() -> None:
    """All phases of a step, the hook and callback of the flags among them, against a real step of 2 ms: the
    ratio of the fastest of each, in turns."""
    model, batch = heavy(), torch.randn(64, FEATURES)
    watch = Stopwatch(torch.device("cpu"))
    phase = Phases(Watchdog(ALONE), watch)
    strategy, bare = Strict(ALONE, 1), FlagBucket(nn.Linear(1, 1))
    wrapped = strategy.wrap(nn.Linear(1, 1))
    assert isinstance(wrapped, FlagBucket)
    watch.begin(0.0, 0.0)
    strategy.time_waits(wrapped, watch.mark_early)
    weight = torch.ones((), requires_grad=True)

    def step() -> None:
        while time.perf_counter() < step.ends:  # type: ignore[attr-defined]
            model(batch).sum().backward()

    def backward(watched: bool) -> float:
        began = time.perf_counter()
        for _ in range(200):
            roots, gradients = (
                [weight * 2, (wrapped if watched else bare).rank_flags],
                [torch.ones(()), torch.zeros(2)],
            )
            if not watched:
                torch.autograd.backward(roots, gradients)
                continue
            with phase("data", 1):
                pass
            with phase("all_reduce"):
                with phase("forward", 1):
                    pass
                with phase("backward", 1):
                    torch.autograd.backward(roots, gradients)
            with phase("optimizer", 1):
                pass
            watch.count(64)
        return (time.perf_counter() - began) / 200

    costs, steps = [], []
    for _ in range(10):
        costs.append(backward(watched=True) - backward(watched=False))
        began = time.perf_counter()
        step.ends = began + 0.002  # type: ignore[attr-defined]
        step()
        steps.append(time.perf_counter() - began)
    assert min(steps) >= 0.002
    assert sorted(costs)[len(costs) // 2] / min(steps) < 0.01


@pytest.mark.parametrize(
    ("phase", "changes", "said"),
    [
        ("copy", {}, "waiting for copies to the GPU 60% of the run: smaller batches, for example uint8"),
        ("optimizer", {}, "the optimizer 60% of the run: train.batch_size=256 halves how often"),
        ("logging", {"log": LogSection(every=1)}, "log lines 60% of the run: log.every=10"),
        ("evaluating", {}, "evaluating 60% of the run: train.eval_every=128"),
        (
            "evaluating",
            {"train": Train(eval_every=5, eval_batch_size=50)},
            "evaluating 60% of the run: train.eval_every=20, or train.eval_batch_size=101",
        ),
        (
            "evaluating",
            {"train": Train(eval_every=200)},
            "evaluating 60% of the run: a smaller validation set",
        ),
        ("drawing", {}, "drawing figures 60% of the run: train.eval_every=128, or ~observers.plots"),
        (
            "saving",
            {"checkpoint": Checkpoint(background=False)},
            "saving checkpoints 60% of the run: checkpoint.background=true",
        ),
        ("saving", {}, "saving checkpoints 60% of the run: checkpoint.every=128"),
        (
            "saving",
            {"checkpoint": Checkpoint(every=200)},
            "saving checkpoints 60% of the run: a faster disk for run.dir",
        ),
        ("data", {}, "waiting for data 60% of the run: let train_batches read ahead"),
        ("replay", {}, "captured steps 60% of the run, as it should be"),
    ],
)
def test_the_override_follows_from_the_run(phase: str, changes: dict[str, Any], said: str) -> None:
    seconds = dict.fromkeys(PHASES, 0.4 / (len(PHASES) - 1)) | {phase: 0.6}
    timing = Timing(seconds, samples=100)
    assert advise(setup(**changes), Times(timing, [timing], 1.0, 0.0)).startswith(said)


def test_flops_are_counted_by_hand() -> None:
    """Two for each multiply-add; the backward pass twice the forward, less the gradient of the input."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    with counter(torch.device("cpu")) as counted:
        model(torch.randn(8, 16)).sum().backward()
    assert counted.get_total_flops() == 3 * 2 * 8 * (16 * 32 + 32 * 4) - 2 * 8 * 16 * 32
    for groups in (1, 8, 64):
        layer = nn.Conv2d(64, 64, 3, padding=1, groups=groups)
        with counter(torch.device("cpu")) as counted:
            layer(torch.randn(2, 64, 8, 8, requires_grad=True)).sum().backward()
        assert counted.get_total_flops() == 3 * 2 * 2 * 64 * 8 * 8 * (64 // groups) * 9
    upwards = nn.ConvTranspose2d(8, 4, 2, stride=2)
    with counter(torch.device("cpu")) as counted:
        upwards(torch.randn(2, 8, 5, 5, requires_grad=True)).sum().backward()
    assert counted.get_total_flops() == 3 * 2 * 2 * 8 * 5 * 5 * 4 * 2 * 2
    lstm = nn.LSTM(16, 32, 2)
    with counter(torch.device("cpu")) as counted:
        lstm(torch.randn(10, 4, 16))[0].sum().backward()
    assert counted.get_total_flops() == 3 * 2 * 10 * 4 * 4 * 32 * (16 + 32 + 32 + 32)


def test_the_peak_of_known_gpus() -> None:
    assert known_peak("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert known_peak("NVIDIA H100 PCIe", "bf16") == 756e12
    assert known_peak("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert known_peak("Tesla T4", "bf16") is None
    assert known_peak("NVIDIA GeForce RTX 9999", "bf16") is None


def test_a_run_knows_its_flops(tmp_path: Path) -> None:
    times = TimeKeeper()
    Fit(plan(), make_model=light, observers=[times]).train(Classify(light), Vectors(1000), World(), tmp_path)
    timing = times.times.timing
    assert timing.flops == 2 * 2 * FEATURES * 5  # no gradient of the input
    assert timing.mfu is not None
    assert 0 < timing.mfu < 1


def test_a_split_in_one_line() -> None:
    seconds = dict.fromkeys(PHASES, 0.0) | {"data": 4.1, "forward": 2.0, "backward": 3.9}
    assert format_shares(Timing(seconds, 100)) == "data 41%  forward 20%  backward 39%"
    assert format_shares(Timing(seconds, 100, flops=1e9, peak=1e11)).endswith("(10% of the device's peak)")
    assert Timing(seconds, 100, flops=1.1e10, peak=1e11).mfu is None, "the peak was measured in a slow moment"


def test_the_host_clock_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    clock = HostClock()
    for phase in TRAINING * 50:
        clock.mark(phase)
    assert sum(clock.seconds.values()) == len(TRAINING) * 50


def test_while_it_is_paused_the_times_are_shown_and_marks_not_heeded() -> None:
    """Other threads read it meanwhile: Prometheus takes a number that falls for a process that began anew."""
    watch = Stopwatch(torch.device("cpu"))
    watch.begin(0.0, 0.0)
    watch.mark("data")
    before = watch.total()
    assert before.seconds["data"] > 0
    with watch.paused():
        watch.mark("forward")
        watch.count(5)
        assert watch.total().seconds == before.seconds
    watch.mark("backward")
    after = watch.total()
    assert after.seconds["forward"] == 0
    assert after.seconds["backward"] > 0
    assert (after.seconds["data"], after.samples) == (before.seconds["data"], 5)
