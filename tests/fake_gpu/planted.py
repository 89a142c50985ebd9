"""Bugs planted one by one into a training on fake GPUs; each one has to be found.

python tests/fake_gpu --gpus=2 python -m pytest tests/fake_gpu/planted.py
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import emulate
import pytest
import rnns
import torch
import watch
from torch import Tensor
from toy import Fit

from ddptrain.api.world import World
from ddptrain.data import prefetch, workers
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.shapes import Shapes
from ddptrain.engine.health import Health
from ddptrain.engine.plan import Plan
from ddptrain.recipes.cnn import SmallCnn
from ddptrain.recipes.image import ImageClassification

Plant = Callable[[pytest.MonkeyPatch], None]
kept: list[Any] = []
"""What a bug does not let go."""


def small(num_classes: int, in_channels: int, image_size: tuple[int, int], examples: Any) -> SmallCnn:
    return SmallCnn(num_classes, in_channels, image_size, width=4, hidden=8)


def train(folder: Path) -> None:
    """Pictures from files, by the engine."""
    device = torch.device("cuda", 0)
    data = ImageData(Shapes(train=64, valid=16), Augment(4, True), workers=0, resident=False)
    task = ImageClassification(small, data)
    plan = Plan(
        steps=8, train_size=64, batch_size=8, log_every=4, eval_every=100, save_every=100, clip_norm=1.0
    )
    watch.strict = watch.memory = True
    Fit(plan).train(task, data, World(device=device), folder)


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    kept.clear()
    emulate.findings.clear()


def in_the_loss(what: Callable[[Tensor, Tensor, Tensor], object]) -> Plant:
    """Something that a recipe does with pictures, labels and the sum of the losses."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        loss = ImageClassification.loss

        def wrong(self: Any, model: Any, batch: Any, at: Any) -> Any:
            found = loss(self, model, batch, at)
            what(*batch, found.sum.detach())
            return found

        patch.setattr(ImageClassification, "loss", wrong)

    return plant


def to_the_batch(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Plant:
    """Something that goes wrong with a batch on the host, before it is pinned."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(workers, "_as_is", lambda batch: change(*batch) if isinstance(batch, tuple) else batch)

    return plant


def on_another_stream(images: Tensor, labels: Tensor, total: Tensor, waits: bool, tells: bool) -> None:
    """Something made in the step's stream, and read in another one."""
    stream = kept[0] if kept else torch.cuda.Stream()
    made = images * 2
    if waits:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        total = made.sum()
    if tells:
        made.record_stream(stream)
    kept[:] = [stream, total]


def without_wait(patch: pytest.MonkeyPatch) -> None:
    """The step does not wait for the stream that brings its batch."""
    wait = torch.cuda.Stream.wait_stream

    def waits(self: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        if self != torch.cuda.default_stream(self.device):
            wait(self, other)

    patch.setattr(torch.cuda.Stream, "wait_stream", waits)


def without_telling(patch: pytest.MonkeyPatch) -> None:
    """The memory of a batch is given back to the stream that brings, while the step computes with it."""
    patch.setattr(torch.Tensor, "record_stream", lambda *_: None)


def into_one_buffer(patch: pytest.MonkeyPatch) -> None:
    """Every batch is copied to the same place, while the one before is in use."""
    to_device = prefetch.to_device

    def copied(batch: Any, device: torch.device) -> Any:
        if batch is None:
            return None
        if not kept:
            kept.extend(to_device(batch, device))
        else:
            for own, new in zip(kept, batch, strict=True):
                own.copy_(new, non_blocking=True)
        return tuple(kept)

    patch.setattr(prefetch, "to_device", copied)


def without_pinning(patch: pytest.MonkeyPatch) -> None:
    loader = workers.DataLoader
    patch.setattr(
        workers, "DataLoader", lambda *args, **named: loader(*args, **{**named, "pin_memory": False})
    )


def read_too_early(patch: pytest.MonkeyPatch) -> None:
    """What a step has come to is read before it has arrived on the host."""
    patch.setattr(torch.cuda.Event, "synchronize", lambda self: None)


def in_the_optimizer(what: Callable[[list[Tensor]], object]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        check = Health.check

        def wrong(self: Any, step: int) -> Any:
            what([p.grad for _, group in self._groups for p in group if p.grad is not None])
            return check(self, step)

        patch.setattr(Health, "check", wrong)

    return plant


def leak(images: Tensor, labels: Tensor, total: Tensor) -> None:
    kept.append(torch.empty(1_000_000, device=images.device))


def pinned_each_time(images: Tensor, labels: Tensor, total: Tensor) -> None:
    kept.append(torch.empty(100_000, pin_memory=True))


def an_algorithm_without_order(images: Tensor, labels: Tensor, total: Tensor) -> None:
    with torch.enable_grad():
        torch.nn.functional.adaptive_avg_pool2d(images.detach().requires_grad_(), 3).sum().backward()


BUGS: dict[str, Plant] = {
    "an item() in the loss": in_the_loss(lambda images, labels, total: total.item()),
    "a tensor in an if": in_the_loss(lambda images, labels, total: bool(total > 0)),
    "numbers picked by a mask": in_the_loss(lambda images, labels, total: images[labels > 3]),
    "nonzero": in_the_loss(lambda images, labels, total: labels.nonzero()),
    "bincount": in_the_loss(lambda images, labels, total: labels.bincount()),
    "a tensor made of a list": in_the_loss(lambda images, *_: torch.tensor([1.0, 2.0], device=images.device)),
    "a copy from pageable memory": in_the_loss(lambda i, *_: torch.ones(9).to(i.device, non_blocking=True)),
    "a copy to pageable memory": in_the_loss(lambda images, labels, total: total.cpu()),
    "a synchronize()": in_the_loss(lambda *_: torch.cuda.synchronize()),
    "an empty_cache()": in_the_loss(lambda *_: torch.cuda.empty_cache()),
    "memory that is never let go": in_the_loss(leak),
    "pinned memory taken in each step": in_the_loss(pinned_each_time),
    "a product that CUDA has not": in_the_loss(lambda i, labels, t: labels[None] @ labels[:, None]),
    "a CPU tensor among others": in_the_loss(lambda images, *_: images + torch.ones(3, 1, 1)),
    "the other GPU's tensor": in_the_loss(lambda images, *_: images + torch.ones(3, 1, 1, device="cuda:1")),
    "a stream that does not wait": in_the_loss(partial(on_another_stream, waits=False, tells=True)),
    "a stream that nobody is told of": in_the_loss(partial(on_another_stream, waits=True, tells=False)),
    "a bool(tensor) in the optimizer": in_the_optimizer(lambda gradients: bool(gradients[0].isnan().any())),
    "a norm read in the optimizer": in_the_optimizer(lambda gradients: float(gradients[0].norm())),
    "no wait for the stream that brings a batch": without_wait,
    "no record_stream for a batch": without_telling,
    "batches copied over each other": into_one_buffer,
    "an unpinned batch": without_pinning,
    "an expand in a pinned batch": to_the_batch(
        lambda images, labels: (images[:1].expand_as(images), labels)
    ),
    "labels of int32": to_the_batch(lambda images, labels: (images, labels.int())),
    "read before it has arrived": read_too_early,
    "an algorithm that repeats no bits": in_the_loss(an_algorithm_without_order),
}


def test_without_a_bug_nothing_is_found(tmp_path: Path) -> None:
    train(tmp_path)


def test_nor_with_a_stream_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_loss(partial(on_another_stream, waits=True, tells=True))(monkeypatch)
    train(tmp_path)


def test_a_recurrent_layer_in_fp16_under_bf16_is_found() -> None:
    """With the kernel that is torch's own."""
    torchs = torch.library.Library("aten", "IMPL")
    torchs.impl("_cudnn_rnn", rnns.as_torch_does, "AutocastCUDA")
    cells, x = torch.nn.GRU(3, 4).cuda(), torch.ones(2, 1, 3, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        cells(x)
    del torchs
    assert (
        "a recurrent layer computes in torch.float16 under autocast to torch.bfloat16" in emulate.findings[0]
    )


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    torch.use_deterministic_algorithms("bits" in bug)
    try:
        with pytest.raises(Exception):  # noqa: B017, PT011 (by torch's own code, by the watch, or by the engine)
            train(tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
