"""Random transforms: torchvision's distributions, torchvision's pixels."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, ks_2samp
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from ddptrain.data.draws import Draws
from ddptrain.data.mixing import Mix, Mixture, mixed_pixels, soft_targets
from ddptrain.data.pictures import resized
from ddptrain.data.policies import BINS, OPERATIONS, RandAugment, TrivialAugmentWide, applied
from ddptrain.data.source import ArraySplit
from ddptrain.data.transformed import TransformedImages
from ddptrain.data.transforms import ColorJitter, RandomErasing, RandomResizedCrop, Transforms
from ddptrain.errors import UserError

COUNT = 6000
LEAST_P = 1e-4
"""Some hundred comparisons are made, and a fair one falls below this once in 10,000; a wrong distribution
gives 1e-20 and less. Seeds are fixed, so a test passes always or never."""


def picture(height: int, width: int, channels: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (channels, height, width), generator=generator, dtype=torch.uint8)


def of_samples(draw: Callable[[Draws], Any]) -> list[Any]:
    return [draw(Draws(3, 1, sample, 0)) for sample in range(COUNT)]


def of_torchvision(transform: Any, height: int, width: int) -> list[dict[str, Any]]:
    torch.manual_seed(5)
    image = picture(height, width)
    return [transform.make_params([image]) for _ in range(COUNT)]


def assert_same_distribution(ours: Sequence[float], theirs: Sequence[float]) -> None:
    assert ks_2samp(ours, theirs).pvalue > LEAST_P


def assert_same_counts(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    kinds = sorted({*ours, *theirs})
    table = [[list(side).count(kind) for kind in kinds] for side in (ours, theirs)]
    assert chi2_contingency(table).pvalue > LEAST_P


def test_draws_are_even_apart_and_of_the_sample_alone() -> None:
    numbers = of_samples(Draws.uniform)
    assert ks_2samp(numbers, numpy.linspace(0, 1, COUNT)).pvalue > LEAST_P
    assert len(set(numbers)) == COUNT
    for other in ((4, 1, 7, 0), (3, 2, 7, 0), (3, 1, 8, 0), (3, 1, 7, 1)):
        assert Draws(*other).uniform() != Draws(3, 1, 7, 0).uniform()
    one = Draws(3, 1, 7, 0)
    assert one.uniform() == numbers[7] != one.uniform()
    orders = of_samples(lambda draws: draws.permutation(4))
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 24
    assert max(abs(count - COUNT / 24) for count in counts) < 5 * (COUNT / 24) ** 0.5


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.5, 1.0, 4.0])
def test_beta_is_torchs(alpha: float) -> None:
    torch.manual_seed(1)
    theirs = torch.distributions.Beta(torch.tensor(alpha).double(), alpha).sample((COUNT,))
    ours = of_samples(lambda draws: draws.beta(alpha))
    # nearer to 0 and 1 the two round in different ways
    near = (torch.tensor(shares).double().clamp(1e-12, 1 - 1e-12) for shares in (ours, theirs.tolist()))
    assert_same_distribution(*(shares.tolist() for shares in near))
    assert all(0 <= share <= 1 for share in ours)


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
    ours = of_samples(lambda draws: crop.params(draws, *size))
    theirs = of_torchvision(v2.RandomResizedCrop(32, scale, ratio), *size)
    for name in ("top", "left", "height", "width"):
        assert_same_distribution([getattr(box, name) for box in ours], [box[name] for box in theirs])
    assert all(box.top + box.height <= size[0] and box.left + box.width <= size[1] for box in ours)


def test_erasing_is_drawn_as_torchvision_draws_it() -> None:
    erasing = RandomErasing(p=1, scale=(0.1, 0.6), ratio=(0.3, 3.3))
    ours = of_samples(lambda draws: erasing.params(draws, 24, 40))
    theirs = of_torchvision(v2.RandomErasing(1, (0.1, 0.6), (0.3, 3.3)), 24, 40)
    given_up = [[box is None for box in ours], [box["v"] is None for box in theirs]]
    assert_same_counts(*given_up)
    for name, key in (("top", "i"), ("left", "j"), ("height", "h"), ("width", "w")):
        assert_same_distribution(
            [getattr(box, name) for box in ours if box], [box[key] for box in theirs if box["v"] is not None]
        )
    rare = RandomErasing(p=0.25)
    share = sum(box is not None for box in of_samples(lambda draws: rare.params(draws, 32, 32))) / COUNT
    assert abs(share - 0.25) < 0.02


def test_jitter_is_drawn_as_torchvision_draws_it() -> None:
    values = {"brightness": 0.4, "contrast": 1.5, "saturation": 0.2, "hue": 0.1}
    ours = of_samples(ColorJitter(**values).params)
    theirs = of_torchvision(v2.ColorJitter(**values), 8, 8)
    for i, name in enumerate(values):
        assert_same_distribution(
            [jitter.factors[i] for jitter in ours], [drawn[f"{name}_factor"] for drawn in theirs]
        )
    assert_same_counts(
        [jitter.order for jitter in ours], [tuple(drawn["fn_idx"].tolist()) for drawn in theirs]
    )
    assert ColorJitter(hue=0.1).params(Draws(0, 0, 0, 0)).factors[:3] == (None, None, None)


class Recorder:
    """torchvision's policies, with what they would do instead of doing it."""

    def __init__(self, policy: type[Any], **options: Any) -> None:
        self.done: list[tuple[str, float]] = []
        outer = self

        class Recording(policy):  # type: ignore[misc]
            def _apply_image_or_video_transform(
                self, image: Tensor, transform_id: str, magnitude: float, **_: Any
            ) -> Tensor:
                outer.done.append((transform_id, magnitude))
                return image

        self.transform = Recording(**options)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (TrivialAugmentWide(), Recorder(v2.TrivialAugmentWide)),
        (RandAugment(n=1, magnitude=9), Recorder(v2.RandAugment, num_ops=1, magnitude=9)),
        (RandAugment(n=1, magnitude=30), Recorder(v2.RandAugment, num_ops=1, magnitude=30)),
    ],
)
def test_policies_are_drawn_as_torchvision_draws_them(
    ours: TrivialAugmentWide | RandAugment, theirs: Recorder
) -> None:
    torch.manual_seed(2)
    image = picture(48, 80)
    for _ in range(COUNT):
        theirs.transform(image)
    drawn = of_samples(lambda draws: ours.params(draws, 48, 80)[0])
    assert_same_counts([name for name, _ in drawn], [name for name, _ in theirs.done])
    for operation in OPERATIONS:
        mine, other = (
            sorted(round(m, 5) + 0.0 for name, m in done if name == operation)
            for done in (drawn, theirs.done)
        )
        magnitudes, signed = theirs.transform._AUGMENTATION_SPACE[operation]
        steps = magnitudes(BINS, 48, 80)
        known = {round(m, 5) + 0.0 for step in ([0.0] if steps is None else steps.tolist())
                 for m in ((step, -step) if signed else (step,))}  # fmt: skip
        assert {*mine} <= known
        assert_same_distribution(mine, other)


def test_rand_augment_draws_each_of_its_operations_anew() -> None:
    drawn = of_samples(lambda draws: RandAugment(n=3).params(draws, 32, 32))
    assert {len(operations) for operations in drawn} == {3}
    same = sum(one.name == other.name for one, other, _ in drawn) / COUNT
    assert abs(same - 1 / len(OPERATIONS)) < 0.015


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_torchvisions(channels: int) -> None:
    crop, jitter = RandomResizedCrop(), ColorJitter(0.4, 0.4, 0.4, 0.1)
    policy, erasing = TrivialAugmentWide(), RandomErasing(p=1)
    fill = torch.tensor([7, 120, 250][:channels], dtype=torch.uint8)
    bilinear = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": fill.tolist()}
    reference = v2.TrivialAugmentWide()
    seen = set()
    for sample in range(300):
        image, draws = picture(37, 53, channels, sample), Draws(0, 0, sample, 0)
        box = crop.params(draws, 37, 53)
        theirs = v2.RandomResizedCrop((32, 24)).transform(image, box._asdict())
        cropped = resized(image, box, (32, 24))
        assert torch.equal(cropped, theirs)
        drawn = jitter.params(draws)
        names = ("brightness", "contrast", "saturation", "hue")
        factors = {f"{name}_factor": factor for name, factor in zip(names, drawn.factors, strict=True)}
        theirs = v2.ColorJitter().transform(cropped, {"fn_idx": drawn.order, **factors})
        assert torch.equal(jitter.apply(cropped, drawn), theirs)
        (operation,) = policy.params(draws, 32, 24)
        seen.add(operation.name)
        theirs = reference._apply_image_or_video_transform(cropped, *operation, **{**bilinear, "fill": {
            Tensor: fill.tolist()}})  # fmt: skip
        assert torch.equal(applied(cropped, [operation], fill), theirs), operation
        erased = erasing.params(draws, 32, 24)
        params = dict(zip("ijhw", erased or (), strict=False), v=fill[:, None, None] if erased else None)
        assert torch.equal(
            erasing.apply(cropped, erased, fill), v2.RandomErasing().transform(cropped, params)
        )
    assert seen == set(OPERATIONS)


def test_all_parts_come_in_order_and_do_not_move_each_other() -> None:
    image, fill = picture(40, 50), torch.tensor([1, 2, 3], dtype=torch.uint8)
    flips = Transforms(horizontal_flip=0.5, vertical_flip=0.3)
    sides = [flips.apply(image, fill, (0, 2, i)) for i in range(400)]
    options = {
        (False, False): image,
        (True, False): functional.horizontal_flip(image),
        (False, True): functional.vertical_flip(image),
        (True, True): functional.vertical_flip(functional.horizontal_flip(image)),
    }
    which = [next(name for name, seen in options.items() if torch.equal(side, seen)) for side in sides]
    assert abs(sum(mirrored for mirrored, _ in which) / 400 - 0.5) < 0.08
    assert abs(sum(turned for _, turned in which) / 400 - 0.3) < 0.08

    crop, jitter, policy, erasing = RandomResizedCrop(), ColorJitter(0.3), RandAugment(), RandomErasing(1)
    whole = Transforms(crop, 0.5, 0.3, jitter, policy, erasing)
    split = ArraySplit(image.permute(1, 2, 0).expand(40, 40, 50, 3), torch.zeros(40, dtype=torch.int64))
    made = TransformedImages(split, whole, 2, fill, 0).__getitems__([(2, i, 0.0) for i in range(40)])
    assert not isinstance(made, UserError)
    for i, (mirrored, turned) in enumerate(which[:40]):
        key = (0, 2, i)
        by_hand = resized(image, crop.params(Draws(*key, 0), 40, 50), (40, 50))
        by_hand = functional.horizontal_flip(by_hand) if mirrored else by_hand
        by_hand = functional.vertical_flip(by_hand) if turned else by_hand
        by_hand = jitter.apply(by_hand, jitter.params(Draws(*key, 3)))
        by_hand = policy.apply(by_hand, policy.params(Draws(*key, 4), 40, 50), fill)
        by_hand = erasing.apply(by_hand, erasing.params(Draws(*key, 5), 40, 50), fill)
        assert torch.equal(made[0][i].permute(2, 0, 1), by_hand)


SHARE = st.floats(0.001, 1)


@settings(deadline=None, max_examples=200)
@given(
    height=st.integers(1, 60), width=st.integers(1, 60), scale=st.tuples(SHARE, SHARE), sample=st.integers(0),
    ratio=st.tuples(st.floats(0.05, 20), st.floats(0.05, 20)),
)  # fmt: skip
def test_rectangles_lie_in_pictures_of_any_size(
    height: int, width: int, scale: tuple[float, float], sample: int, ratio: tuple[float, float]
) -> None:
    low_high = {"scale": (min(scale), max(scale)), "ratio": (min(ratio), max(ratio))}
    crop, erasing = RandomResizedCrop(**low_high), RandomErasing(1, **low_high)
    for box in (crop.params(Draws(0, 0, sample, 0), height, width),
                erasing.params(Draws(0, 0, sample, 1), height, width)):  # fmt: skip
        if box is not None:
            assert 0 <= box.top <= box.top + box.height <= height
            assert 0 <= box.left <= box.left + box.width <= width
    made = resized(picture(height, width), crop.params(Draws(0, 0, sample, 0), height, width), (7, 5))
    assert made.shape == (3, 7, 5)
    left, top, right, bottom = Mix(0, 1).params((0, 0, sample), range(9), height, width).box or (0, 0, 0, 0)
    assert 0 <= left <= right <= width
    assert 0 <= top <= bottom <= height


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_mixing_is_drawn_as_torchvision_draws_it(alpha: float) -> None:
    up = [Mix(alpha, 0).params((3, 1, i), range(COUNT), 20, 30) for i in range(COUNT)]
    theirs = of_torchvision(v2.MixUp(alpha=alpha, num_classes=2), 20, 30)
    assert_same_distribution([mixture.share for mixture in up], [drawn["lam"] for drawn in theirs])
    cut = [Mix(0, alpha).params((3, 1, i), range(COUNT), 20, 30) for i in range(COUNT)]
    theirs = of_torchvision(v2.CutMix(alpha=alpha, num_classes=2), 20, 30)
    assert_same_distribution([mixture.share for mixture in cut], [drawn["lam_adjusted"] for drawn in theirs])
    for side in range(4):
        assert_same_distribution(
            [mixture.box[side] for mixture in cut if mixture.box], [drawn["box"][side] for drawn in theirs]
        )
    both = [Mix(alpha, alpha).params((3, 1, i), range(COUNT), 20, 30) for i in range(COUNT)]
    assert abs(sum(mixture.box is None for mixture in both) / COUNT - 0.5) < 0.03


def test_a_partner_is_any_other_sample() -> None:
    partners = [Mix().params((0, 0, i % 9), range(9), 8, 8).partner - i % 9 for i in range(9)]
    assert 0 not in partners
    found = torch.tensor([Mix().params((0, epoch, 4), range(9), 8, 8).partner for epoch in range(8000)])
    counts = torch.bincount(found, minlength=9)
    assert counts[4] == 0
    assert (counts[counts > 0] - 1000).abs().max() < 150
    assert Mix().params((0, 0, 0), range(1), 8, 8).partner == 0  # there is no other


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
    found = mixed_pixels(own, other, mixture)
    assert torch.equal(found, reference.round().to(torch.uint8))
    if not mixture.shows_partner:
        assert torch.equal(found, own)
    if not mixture.shows_own:
        assert torch.equal(found, other)


def test_cut_pixels_are_torchvisions() -> None:
    own, other = picture(20, 30), picture(20, 30, seed=1)
    for i in range(200):
        mixture = Mix(0, 1).params((0, 0, i), range(50), 20, 30)
        params = {"box": mixture.box, "labels": torch.zeros(2), "batch_size": 2}
        reference = v2.CutMix(num_classes=2).transform(torch.stack([own, other]), params)[0]
        found = mixed_pixels(own, other, mixture)
        assert torch.equal(found, reference)
        assert mixture.shows_partner == (not torch.equal(found, own))
        assert mixture.shows_own == (not torch.equal(found, other))


def test_soft_targets_are_torchvisions() -> None:
    labels, others, shares = torch.tensor([0, 2, 1]), torch.tensor([1, 2, 3]), torch.tensor([0.25, 0.5, 1])
    found = soft_targets(labels, others, shares, 4)
    expected = torch.tensor([[0.25, 0.75, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]])
    assert torch.equal(found, expected)
    for label, other, share, row in zip(labels, others, shares, found, strict=True):
        pair = torch.tensor([int(label), int(other)])
        mixup = v2.MixUp(num_classes=4)
        torch.testing.assert_close(mixup._mixup_label(pair, lam=float(share))[0], row)


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: RandomResizedCrop(scale=(0, 1)), r"resized_crop\.scale=\[0,1\]: .*above 0, and at most 1"),
    (lambda: RandomResizedCrop(scale=(0.5, 1.5)), r"resized_crop\.scale=\[0\.5,1\.5\]"),
    (lambda: RandomResizedCrop(ratio=(2, 1)), r"resized_crop\.ratio=\[2,1\]"),
    (lambda: ColorJitter(brightness=-1), r"color_jitter\.brightness=-1: must be 0 \(off\) or more"),
    (lambda: ColorJitter(hue=0.6), r"color_jitter\.hue=0\.6: must be from 0 \(off\) to 0\.5"),
    (lambda: RandAugment(n=0), r"policy\.n=0"),
    (lambda: RandAugment(magnitude=BINS), r"policy\.magnitude=31: must be from 0 to 30"),
    (lambda: RandomErasing(p=2), r"erasing\.p=2: must be from 0"),
    (lambda: RandomErasing(scale=(0.3, 0.1)), r"erasing\.scale=\[0\.3,0\.1\]"),
    (lambda: RandomErasing(ratio=(0, 1)), r"erasing\.ratio=\[0,1\]"),
    (lambda: Mix(mixup=-0.1), r"mix\.mixup=-0\.1: must be 0 \(off\) or more"),
    (lambda: Mix(0, 0), r"mix: mixup and cutmix are both 0; set data\.augment\.mix=null"),
    (lambda: Transforms(horizontal_flip=1.1), r"horizontal_flip=1\.1"),
    (lambda: Transforms(vertical_flip=-1), r"vertical_flip=-1"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_wrong_values_name_their_key(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=rf"^data\.augment\.{message}"):
        make()
