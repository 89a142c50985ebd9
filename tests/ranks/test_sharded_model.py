"""What strategy=fsdp cuts is the first rank's: made there alone, and cut block by block."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from compare import assert_same
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from toy import CLASSES, FEATURES, SGD, Classify, lr_schedule, with_noise

from ddptrain.api.world import World
from ddptrain.config.schema import Config
from ddptrain.run.setup import make_model
from ddptrain.run.sharded_model import make_sharded_model
from ddptrain.strategies.fsdp import Fsdp
from ddptrain.testing import run_ranks


class WithBuffers(nn.Module):
    """A tied weight, a frozen one, and buffers: random, shared, not saved, whole and bool."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES)) for _ in range(3))
        self.last, self.again = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.again.weight = self.last.weight
        self.last.bias.requires_grad_(False)
        self.register_buffer("noise", torch.randn(5))
        self.register_buffer("angles", torch.outer(torch.arange(3.0), torch.rand(2)), persistent=False)
        self.register_buffer("mask", torch.rand(6) > 0.5)
        self.register_buffer("count", torch.tensor(7))
        self.last.register_buffer("noise", self.noise)


class ReadsNumbers(nn.Sequential):
    """As models do whose drop rates come from a `linspace`."""

    def __init__(self) -> None:
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        super().__init__(*(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(p)) for p in rates))


class KeepsTensors(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, CLASSES))
        self.scales = {"all": [torch.ones(3)]}


class KeepsThemDeepInside(nn.Sequential):
    """Below many layers that keep none."""

    def __init__(self) -> None:
        layers = [nn.Sequential(nn.Linear(FEATURES, FEATURES)) for _ in range(9)]
        super().__init__(*layers, KeepsTensors())


class WithLoss(Classify):
    """Its loss has weights of its own."""

    def build(self) -> nn.Module:
        self.weighted = nn.CrossEntropyLoss(weight=torch.ones(CLASSES))
        return super().build()


class LooksUp(nn.Sequential):
    """Fails on `meta` in a way of its own, after it has begun."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, CLASSES))
        self.name = {1.0: "one"}[float(torch.ones(()).to("cpu")) if not torch.ones(()).is_meta else 0.0]


class Recurrent(nn.Module):
    """With a tied weight, and nn.LSTM's list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.cell = nn.LSTM(FEATURES, FEATURES)
        self.head.weight = self.embedding.weight


@cache
def given() -> nn.Module:
    """The same one each time, as a program gives it to ``ddptrain.fit``."""
    return Recurrent()


def config() -> Config:
    return Config(recipe="toy", task={}, data={}, optim=dict(SGD), sched=lr_schedule(), seed=5)


def numbers(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named}
    return {name: value.detach().clone() for name, value in whole.items()}


@pytest.mark.parametrize(
    ("make", "task", "on_others"),
    [
        (WithBuffers, Classify, "meta"), (with_noise, Classify, "meta"), (ReadsNumbers, Classify, "cpu"),
        (KeepsTensors, Classify, "cpu"), (KeepsThemDeepInside, Classify, "cpu"),
        (LooksUp, Classify, "cpu"), (with_noise, WithLoss, "cpu"), (Recurrent, Classify, "cpu"),
        (given, Classify, "cpu"),
    ],
)  # fmt: skip
def test_each_rank_gets_its_part_of_the_first_ones(
    make: Callable[[], nn.Module], task: type[Classify], on_others: str
) -> None:
    """Whose numbers are those of a single process, to the bit."""

    def trained_or_not(model: nn.Module) -> dict[str, bool]:
        """A tied parameter counts once."""
        return {name: value.requires_grad for name, value in model.named_parameters()}

    def rank(world: World) -> tuple[str, dict[str, Tensor], dict[str, bool]]:
        own = task(make)
        model = make_sharded_model(config(), own, world)
        assert not isinstance(own, WithLoss) or own.weighted.weight.device.type == "cpu"
        where = next(model.parameters()).device.type
        strategy = Fsdp(world)
        model = strategy.wrap(strategy.prepare(model))
        return where, numbers(model), trained_or_not(model)

    single = make_model(config(), Classify(make), torch.device("cpu"))
    ranks = run_ranks(rank, 3)
    assert [where for where, *_ in ranks] == ["cpu", on_others, on_others]
    for _, own, parameters in ranks:
        assert_same(own, numbers(single))
        assert parameters == trained_or_not(single)


def test_an_error_of_the_model_is_its_own() -> None:
    def broken() -> nn.Module:
        raise ValueError("width must be even")

    def rank(world: World) -> None:
        with pytest.raises(ValueError, match="width must be even"):
            make_sharded_model(config(), Classify(broken), world)

    run_ranks(rank, 1)


@contextmanager
def held_bytes() -> Iterator[list[tuple[float, int]]]:
    """Times, and the bytes that this process' children hold together then; what they share counts once."""
    ended, held = threading.Event(), list[tuple[float, int]]()

    def watch() -> None:
        children = Path(f"/proc/self/task/{os.getpid()}/children")  # of the thread that forks them
        while not ended.wait(0.02):
            held.append((time.time(), sum(map(share_of, children.read_text().split()))))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield held
    finally:
        ended.set()
        watching.join()


def share_of(pid: str) -> int:
    """Without files: what other programs have of libraries changes its share of them."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(int(kb) for kb in re.findall(r"^Pss_Anon:\s+(\d+) kB", rollup, re.M))


def models_held() -> float:
    """By 4 ranks, at most, while they make a model of 20 blocks."""
    width, blocks = 3000, 20  # of 36 MB: so much malloc gives back

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(blocks)))

    def rank(world: World) -> float:
        torch.distributed.barrier()
        time.sleep(1)
        begun = time.time()
        Fsdp(world).wrap(make_sharded_model(config(), Classify(make), world))
        torch.distributed.barrier()
        return begun

    with held_bytes() as held:
        begun = min(run_ranks(rank, 4, timeout=200))
    before = [bytes_ for when, bytes_ in held if when < begun][-1]
    return (max(bytes_ for _, bytes_ in held) - before) / (4 * width**2 * blocks)


@pytest.mark.long
def test_the_hosts_hold_one_model() -> None:
    """On CPUs the parts are on the host, too. In a new process: ranks share pages with the one that forks
    them, and of a long-lived one they come to hold more and more of their own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert 1 < pool.submit(models_held).result() < 1.3
