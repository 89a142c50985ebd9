"""Bugs planted one by one into a training whose steps are captured in a CUDA graph. Each one has to be found:
by CUDA, by the engine before its first step, or by losses that are not those of eager steps.

python tests/fake_gpu python -m pytest tests/fake_gpu/planted_in_graphs.py
"""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulate
import pytest
import torch
import watch
from torch import Tensor, nn
from toy import Fit

from ddptrain.api.observer import Log, Observer
from ddptrain.api.recipe import Data, Loss, Task
from ddptrain.api.world import World
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.shapes import Shapes
from ddptrain.engine import step_graph
from ddptrain.engine.plan import Plan
from ddptrain.engine.seeding import StepSeed
from ddptrain.engine.step_graph import StepGraph
from ddptrain.recipes.image import ImageClassification

Plant = Callable[[pytest.MonkeyPatch], None]
ADAM = {"_target_": "torch.optim.AdamW", "lr": 0.01, "fused": True}
kept: list[Any] = []
"""What a bug does not let go."""


class Replaced(nn.Module):
    """Its buffer is another tensor after each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Cached(nn.Module):
    """Keeps a tensor for batches of one size as an attribute, and makes another one for those of another
    size, as an evaluation has them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.scale) != len(x):
            self.scale = torch.linspace(0.5, 1.5, len(x), device=x.device)[:, None]
        return x * self.scale


def small(num_classes: int, in_channels: int, image_size: tuple[int, int], examples: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 8),
        Replaced(), Cached(), nn.Dropout(0.3), nn.Linear(8, num_classes),
    )  # fmt: skip


def train(folder: Path, captured: bool) -> list[float]:
    """The losses of its steps."""
    data = ImageData(Shapes(train=64, valid=16), Augment(4, True), workers=0, resident=False)
    task = ImageClassification(small, data)
    plan = Plan(
        steps=10, train_size=64, batch_size=8, log_every=1, eval_every=5, save_every=100, clip_norm=1.0
    )
    watch.strict = True
    graph = StepGraph if captured else None
    return losses_of(Fit(plan, optim=ADAM, ema=0.9, graph=graph), task, data, folder)


class Losses(Observer):
    """Needs ``log_every=1``."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def log(self, event: Log) -> None:
        self.seen.append(event.values["loss"])


def losses_of(fit: Fit, task: Task, data: Data, folder: Path) -> list[float]:
    """Of the steps of a training on a GPU that may capture."""
    device, losses = torch.device("cuda", 0), Losses()
    with step_graph.own_stream(device):
        replace(fit, observers=[losses]).train(task, data, World(device=device), folder)
    return losses.seen


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    kept.clear()
    emulate.findings.clear()


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("eager"), captured=False)


def in_the_loss(factor: Callable[..., Tensor | float]) -> Plant:
    """Something by which a recipe multiplies its loss, out of images, labels and progress."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        loss = ImageClassification.loss

        def wrong(self: Any, model: Any, batch: Any, at: Any) -> Any:
            whole = loss(self, model, batch, at)
            return Loss(whole.sum * factor(*batch, at), whole.count, whole.logs)

        patch.setattr(ImageClassification, "loss", wrong)

    return plant


def replaced(name: str, by: Callable[..., Any]) -> Plant:
    """A part of ddptrain.engine.step_graph."""
    return lambda patch: patch.setattr(step_graph, name, by)


def numbers_of_the_first_step(patch: pytest.MonkeyPatch) -> None:
    numbers = StepGraph._numbers

    def once(self: Any, *given: Any) -> list[float]:
        kept.append(numbers(self, *given))
        return list(kept[0])

    patch.setattr(StepGraph, "_numbers", once)


def memory_that_is_given_back(patch: pytest.MonkeyPatch) -> None:
    """The loss is multiplied by a tensor that lives until the capture; then its memory is another's."""
    replay = StepGraph._replay

    def factor(images: Tensor, *_: Any) -> Tensor:
        if not kept:
            kept.append(torch.ones(1000, device=images.device))
        return kept[0][:1].sum()

    def replayed(self: Any, *given: Any) -> None:
        kept[:] = [torch.full((1000,), 3.0, device="cuda") for _ in range(len(kept) + 1)][1:]
        replay(self, *given)

    in_the_loss(factor)(patch)
    patch.setattr(StepGraph, "_replay", replayed)


def what_it_has_come_to_is_read_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda.Event, "synchronize", lambda self: None)


def without_a_copy_of_the_buffers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_graph, "_in_their_own_memory", lambda *_: None)


def seeds_of_one_step(patch: pytest.MonkeyPatch) -> None:
    seed = StepSeed.seed_captured
    patch.setattr(StepSeed, "seed_captured", lambda self, generators, step: seed(self, generators, 5))


def on_another_stream(images: Tensor, *_: Any) -> Tensor:
    stream = kept[0] if kept else torch.cuda.Stream()
    kept[:] = [stream]
    with torch.cuda.stream(stream):
        return (images * 0).sum() + 1


def an_event_is_asked(*_: Any) -> float:
    """CUDA lets no thread ask while it captures; DDP does so in its first ten passes."""
    if not kept:
        kept.append(torch.cuda.Event())
        kept[0].record()
    kept[0].query()
    return 1.0


def a_hidden_state(patch: pytest.MonkeyPatch) -> None:
    forward = Replaced.forward

    def kept_on(self: Any, x: Tensor) -> Tensor:
        y = forward(self, x) + getattr(self, "hidden", 0.0)
        if self.training:
            self.hidden = 0.1 * y.detach()
        return y

    patch.setattr(Replaced, "forward", kept_on)


calls = itertools.count(1)
WAITS = "can't be captured: called a synchronizing CUDA operation"
BUGS: dict[str, tuple[Plant, str]] = {
    "stale inputs": (replaced("tensors_of", lambda batch: iter(())), ""),
    "rates, weights and flags of the first step": (numbers_of_the_first_step, ""),
    "a rate that is a part of the graph": (
        replaced("_rates_on_device", lambda *_: nullcontext()), "param_groups' capturable is False"
    ),
    "seeds of one step": (seeds_of_one_step, ""),
    "no copy of replaced buffers": (without_a_copy_of_the_buffers, ""),
    "memory that is given back": (memory_that_is_given_back, ""),
    "what a step has come to is read too early": (what_it_has_come_to_is_read_too_early, "is not finite"),
    "an item() in the loss": (in_the_loss(lambda images, *_: images.mean().item()), WAITS),
    "a mask": (
        in_the_loss(lambda images, labels, at: images[labels > 3].sum() * 0 + 1), "when stream is capturing"
    ),
    "nonzero": (
        in_the_loss(lambda images, labels, at: labels.nonzero().sum() * 0 + 1), "when stream is capturing"
    ),
    "a copy from pageable memory": (
        in_the_loss(lambda images, *_: torch.ones(9).to(images.device).mean()), WAITS
    ),
    "the step's number": (in_the_loss(lambda images, labels, at: 1 + at.step), r"reads progress\.step"),
    "the share of the training": (
        in_the_loss(lambda images, labels, at: 1 - at.fraction / 2), r"reads progress\.fraction"
    ),
    "a draw from the CPU's generator": (
        in_the_loss(lambda *_: float(torch.rand(()))), "draws from the CPU's generator"
    ),
    "a draw from Python's generator": (in_the_loss(lambda *_: random.random()), "generators of Python or"),
    "a count that only the host knows": (in_the_loss(lambda *_: next(calls)), "changes from call to call"),
    "a count that grows slowly": (
        in_the_loss(lambda *_: 1 + next(calls) / 1000), "something on the host changes"
    ),
    "a tensor that a layer keeps from pass to pass": (a_hidden_state, r"model\.5\.hidden is changed by each"),
    "a stream that does not wait": (in_the_loss(on_another_stream), "without waiting for it"),
    "an event is asked": (
        in_the_loss(an_event_is_asked), "can't be captured: CUDA error: fake GPU error 900"
    ),
    "a wait for another stream's work": (
        in_the_loss(
            lambda *_: torch.cuda.current_stream().wait_stream(torch.cuda.default_stream()) or 1.0
        ),
        "can't be captured: CUDA error: fake GPU error 905",
    ),
}  # fmt: skip
"""Each with what is said of it; nothing: only losses tell."""


def test_without_a_bug_the_losses_are_those_of_eager_steps(eager: list[float], tmp_path: Path) -> None:
    assert train(tmp_path, captured=True) == eager
    assert len(set(eager)) == 10
    assert len(watch.replays) == 7


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(
    bug: str, eager: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, said = BUGS[bug]
    plant(monkeypatch)
    if said:
        with pytest.raises(Exception, match=said):
            train(tmp_path, captured=True)
    else:
        losses = train(tmp_path, captured=True)
        assert losses[:3] == eager[:3]
        assert losses != eager
