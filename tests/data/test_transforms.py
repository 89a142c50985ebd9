"""Random transforms are torchvision's, seeded by the sample; crops and mixtures have its distributions."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp
from torch import Tensor
from torchvision.transforms import v2

from ddptrain.api.rng import derive_seed
from ddptrain.data.generators import seed_all
from ddptrain.data.images.mixing import Mix, Mixture, mixed_pixels, soft_target
from ddptrain.data.images.source import ArraySplit
from ddptrain.data.images.transforms import ImageTransform, RandomResizedCrop, Transforms
from ddptrain.data.pictures import Box, resized
from ddptrain.data.pipeline import Samples
from ddptrain.data.workers import Key
from ddptrain.errors import UserError

COUNT = 6000
LEAST_P = 1e-4
"""Some dozens of comparisons are made, and a fair one falls below this once in 10,000; a wrong distribution
gives 1e-20 and less. Seeds are fixed, so a test passes always or never."""


def picture(height: int, width: int, channels: int = 3, seed: int = 0) -> Tensor:
    """uint8 (C, H, W)"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (channels, height, width), generator=generator, dtype=torch.uint8)


def of_torchvision(transform: Any, height: int, width: int) -> list[dict[str, Any]]:
    torch.manual_seed(5)
    image = picture(height, width)
    return [transform.make_params([image]) for _ in range(COUNT)]


def assert_same_distribution(ours: Sequence[float], theirs: Sequence[float]) -> None:
    assert ks_2samp(ours, theirs).pvalue > LEAST_P


def boxes(crop: RandomResizedCrop, height: int, width: int) -> list[Box]:
    """Of many samples, each drawn from the seed that its pipeline gives it."""
    drawn = []
    for sample in range(COUNT):
        seed_all(derive_seed(3, 1, sample))
        drawn.append(crop.box(height, width))
    return drawn


@pytest.mark.parametrize(
    ("size", "scale", "ratio"),
    [
        ((32, 32), (0.08, 1.0), (3 / 4, 4 / 3)),
        ((100, 300), (0.5, 1.0), (3 / 4, 4 / 3)),  # many that don't fit: the fallback, too wide
        ((300, 100), (0.5, 1.0), (3 / 4, 4 / 3)),  # too tall
        ((40, 60), (0.9, 1.0), (0.2, 5.0)),  # the whole picture
    ],
)
def test_resized_crops_are_drawn_as_torchvision_draws_them(
    size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    crop = RandomResizedCrop(scale, ratio)
    ours = boxes(crop, *size)
    theirs = of_torchvision(v2.RandomResizedCrop(32, scale, ratio), *size)
    for name in ("top", "left", "height", "width"):
        assert_same_distribution([getattr(box, name) for box in ours], [box[name] for box in theirs])
    assert all(box.top + box.height <= size[0] and box.left + box.width <= size[1] for box in ours)


@pytest.mark.parametrize("channels", [1, 3])
def test_crops_have_torchvisions_pixels(channels: int) -> None:
    crop = RandomResizedCrop()
    for sample in range(100):
        image = picture(37, 53, channels, sample)
        box = crop.box(37, 53)
        theirs = v2.RandomResizedCrop((32, 24)).transform(image, box._asdict())
        assert torch.equal(resized(image, box, (32, 24)), theirs)


@pytest.mark.parametrize("channels", [1, 3])
def test_all_parts_come_in_order_from_the_samples_seed(channels: int) -> None:
    image = picture(40, 50, channels)
    modules = {
        "horizontal_flip": v2.RandomHorizontalFlip(0.5),
        "off": None,
        "color_jitter": v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        "policy": v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR, fill=116),
        "rand_augment": v2.RandAugment(),
        "erasing": v2.RandomErasing(p=0.5, value=116),
    }
    crop = RandomResizedCrop()
    split = ArraySplit(image.permute(1, 2, 0).expand(40, 40, 50, channels), torch.arange(40))
    varied = Samples(split, ImageTransform(Transforms(modules, crop)), seed=7)
    images, labels = varied.batch([Key(2, i) for i in range(40)])
    assert torch.equal(labels, torch.arange(40))
    for i in range(40):
        seed_all(derive_seed(7, 2, i, 8))
        by_hand = resized(image, crop.box(40, 50), (40, 50))
        for module in modules.values():
            by_hand = by_hand if module is None else module(by_hand)
        assert torch.equal(images[i].permute(2, 0, 1), by_hand)
    assert len({tuple(image.flatten().tolist()) for image in images}) == 40


def test_a_flip_is_drawn_for_half_of_the_samples() -> None:
    image = picture(4, 5)
    split = ArraySplit(image.permute(1, 2, 0).expand(400, 4, 5, 3), torch.zeros(400))
    flips = Transforms({"flip": v2.RandomHorizontalFlip()})
    images, _ = Samples(split, ImageTransform(flips), seed=0).batch([Key(2, i) for i in range(400)])
    mirrored = sum(torch.equal(one.permute(2, 0, 1), image.flip(2)) for one in images)
    assert abs(mirrored / 400 - 0.5) < 0.08


SHARE = st.floats(0.001, 1)


@settings(deadline=None, max_examples=200)
@given(
    height=st.integers(1, 60), width=st.integers(1, 60), scale=st.tuples(SHARE, SHARE), sample=st.integers(0),
    ratio=st.tuples(st.floats(0.05, 20), st.floats(0.05, 20)),
)  # fmt: skip
def test_rectangles_lie_in_pictures_of_any_size(
    height: int, width: int, scale: tuple[float, float], sample: int, ratio: tuple[float, float]
) -> None:
    crop = RandomResizedCrop((min(scale), max(scale)), (min(ratio), max(ratio)))
    seed_all(derive_seed(sample))
    box = crop.box(height, width)
    assert 0 <= box.top <= box.top + box.height <= height
    assert 0 <= box.left <= box.left + box.width <= width
    assert resized(picture(height, width), box, (7, 5)).shape == (3, 7, 5)
    drawn = Mix(0, 1).mixture(0, 0, sample, range(sample, sample + 9), height, width)
    left, top, right, bottom = drawn.box or (0, 0, 0, 0)
    assert 0 <= left <= right <= width
    assert 0 <= top <= bottom <= height


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_mixing_is_drawn_as_torchvision_draws_it(alpha: float) -> None:
    up = [Mix(alpha, 0).mixture(3, 1, i, range(COUNT), 20, 30) for i in range(COUNT)]
    theirs = of_torchvision(v2.MixUp(alpha=alpha, num_classes=2), 20, 30)
    assert_same_distribution([mixture.share for mixture in up], [drawn["lam"] for drawn in theirs])
    cut = [Mix(0, alpha).mixture(3, 1, i, range(COUNT), 20, 30) for i in range(COUNT)]
    theirs = of_torchvision(v2.CutMix(alpha=alpha, num_classes=2), 20, 30)
    assert_same_distribution([mixture.share for mixture in cut], [drawn["lam_adjusted"] for drawn in theirs])
    for side in range(4):
        assert_same_distribution(
            [mixture.box[side] for mixture in cut if mixture.box], [drawn["box"][side] for drawn in theirs]
        )
    both = [Mix(alpha, alpha).mixture(3, 1, i, range(COUNT), 20, 30) for i in range(COUNT)]
    assert abs(sum(mixture.box is None for mixture in both) / COUNT - 0.5) < 0.03


def test_a_partner_is_any_other_sample() -> None:
    partners = [Mix().mixture(0, 0, i % 9, range(9), 8, 8).partner - i % 9 for i in range(9)]
    assert 0 not in partners
    found = torch.tensor([Mix().mixture(0, epoch, 4, range(9), 8, 8).partner for epoch in range(8000)])
    counts = torch.bincount(found, minlength=9)
    assert counts[4] == 0
    assert (counts[counts > 0] - 1000).abs().max() < 150
    assert Mix().mixture(0, 0, 0, range(1), 8, 8).partner == 0  # there is no other


@settings(deadline=None, max_examples=100)
@given(share=st.floats(0, 1), seed=st.integers(0, 1000))
def test_mixed_pixels_are_torchvisions_rounded_and_what_is_unseen_may_be_left_out(
    share: float, seed: int
) -> None:
    own, other = picture(6, 5, seed=seed), picture(6, 5, seed=seed + 1)
    pair = torch.stack([own, other]).float()
    reference = v2.MixUp(num_classes=2).transform(
        pair, {"lam": share, "labels": torch.zeros(2), "batch_size": 2}
    )[0]
    mixture = Mixture(0, share, None)
    found = mixed_pixels(own.permute(1, 2, 0), other.permute(1, 2, 0), mixture).permute(2, 0, 1)
    assert torch.equal(found, reference.round().to(torch.uint8))
    if not mixture.shows_partner:
        assert torch.equal(found, own)
    if not mixture.shows_own:
        assert torch.equal(found, other)


def test_cut_pixels_are_torchvisions() -> None:
    own, other = picture(20, 30), picture(20, 30, seed=1)
    for i in range(200):
        mixture = Mix(0, 1).mixture(0, 0, i, range(50), 20, 30)
        params = {"box": mixture.box, "labels": torch.zeros(2), "batch_size": 2}
        reference = v2.CutMix(num_classes=2).transform(torch.stack([own, other]), params)[0]
        found = mixed_pixels(own.permute(1, 2, 0), other.permute(1, 2, 0), mixture).permute(2, 0, 1)
        assert torch.equal(found, reference)
        assert mixture.shows_partner == (not torch.equal(found, own))
        assert mixture.shows_own == (not torch.equal(found, other))


def test_soft_targets_are_torchvisions() -> None:
    labels, others, shares = torch.tensor([0, 2, 1]), torch.tensor([1, 2, 3]), [0.25, 0.5, 1.0]
    expected = torch.tensor([[0.25, 0.75, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]])
    for label, other, share, row in zip(labels, others, shares, expected, strict=True):
        found = soft_target(label, other, share, 4)
        assert torch.equal(found, row)
        theirs = v2.MixUp(num_classes=4)._mixup_label(torch.stack([label, other]), lam=share)[0]
        torch.testing.assert_close(theirs, found)
    several = soft_target(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 1.0]), 0.75, 3)
    assert torch.equal(several, torch.tensor([0.75, 0.0, 1.0]))


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: RandomResizedCrop(scale=(0, 1)), r"resized_crop\.scale=\[0,1\]: .*above 0, and at most 1"),
    (lambda: RandomResizedCrop(scale=(0.5, 1.5)), r"resized_crop\.scale=\[0\.5,1\.5\]"),
    (lambda: RandomResizedCrop(ratio=(2, 1)), r"resized_crop\.ratio=\[2,1\]"),
    (lambda: Mix(mixup=-0.1), r"mix\.mixup=-0\.1: must be 0 \(off\) or more"),
    (lambda: Mix(0, 0), r"mix: mixup and cutmix are both 0; set data\.augment\.mix=null"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_wrong_values_name_their_key(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=rf"^data\.augment\.{message}"):
        make()
