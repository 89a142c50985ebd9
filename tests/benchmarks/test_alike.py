"""What `benchmarks/gpu.py` takes for the same training: another order of sums is, an error is not."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddptrain.recipes.cnn import SmallCnn

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu_parts.part import COMPARED, Failed, check_same

STEPS, BATCH = COMPARED, 64
Rank = Callable[[nn.Module, Tensor, Tensor], list[Tensor]]
"""A rank's gradients of its part of a batch."""


def sound(model: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    loss = nn.functional.cross_entropy(model(images), labels)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def losses(*ranks: Rank, threads: int = 1) -> list[float]:
    """Of a training as the recipe's, on so many ranks: of each step's whole batch."""
    torch.manual_seed(0)
    model = SmallCnn(10, 3, (16, 16), width=16, hidden=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    images, labels = torch.randn(4 * BATCH, 3, 16, 16), torch.randint(10, (4 * BATCH,))
    images[range(len(labels)), 0, labels] += 2.0  # a line that tells the class
    found = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for step in range(STEPS):
        rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[:BATCH]
        parts = rows.view(len(ranks), -1)
        with torch.no_grad():
            found.append(float(nn.functional.cross_entropy(model(images[rows]), labels[rows])))
        gradients = [rank(model, images[part], labels[part]) for rank, part in zip(ranks, parts, strict=True)]
        for parameter, *own in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(own).mean(0)
        optimizer.step()
    torch.set_num_threads(before)
    return found


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return losses(sound)


def test_another_order_of_sums_is_the_same_training(alone: list[float]) -> None:
    for threads, ranks in ((2, 1), (1, 2), (2, 4)):
        assert check_same(losses(*[sound] * ranks, threads=threads), alone) < 1e-4


def scaled(model: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    return [1.01 * gradient for gradient in sound(model, images, labels)]


def without_a_sample(model: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    return sound(model, images[1:], labels[1:])


def without_the_last(model: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    """Its last layer's bias is left out of the all-reduce: the other rank's counts for both."""
    *rest, last = sound(model, images, labels)
    return [*rest, torch.zeros_like(last)]


@pytest.mark.parametrize("error", [scaled, without_a_sample, without_the_last])
def test_an_error_is_not(alone: list[float], error: Rank) -> None:
    with pytest.raises(Failed, match="losses differ"):
        check_same(losses(sound, error), alone)


def test_an_all_reduce_that_is_skipped_is_not(alone: list[float]) -> None:
    kept: list[list[Tensor]] = []

    def first(model: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
        kept[:] = [sound(model, images, labels)]
        return kept[0]

    with pytest.raises(Failed, match="losses differ"):
        check_same(losses(first, lambda *_: kept[0]), alone)


def test_equal_bits() -> None:
    assert check_same([1.0, 0.5], [1.0, 0.5], exactly=True) == 0
    with pytest.raises(Failed, match="losses differ"):
        check_same([1.0, 0.5], [1.0, 0.5 + 1e-15], exactly=True)


def test_steps_beyond_the_first_are_not_compared(alone: list[float]) -> None:
    assert check_same([*alone, 1.0], [*alone, 2.0]) == 0
