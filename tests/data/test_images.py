"""Both loading paths give the same pixels, whatever reads them."""

from itertools import product
from typing import Literal, final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import v2

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.images.augment import Augment, Moves, Normalise
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.loaders import AugmentedBatch, ResidentLoader, keyed
from ddptrain.data.images.shapes import Shapes
from ddptrain.data.images.source import Split
from ddptrain.data.pipeline import Pipeline, Samples
from ddptrain.data.prefetch import on_device, tensors_of
from ddptrain.errors import UserError

Flip = bool | Literal["alternate"]
Picture = list[list[list[int]]]
"""Rows of pixels of channels."""


def by_hand(image: Picture, augment: Augment, moves: Moves, i: int, fill: list[int]) -> Picture:
    """What the i-th of the moves does to an image, pixel by pixel."""
    height, width = len(image), len(image[0])
    top, left, flip = int(moves.top[i]), int(moves.left[i]), int(moves.flip[i])
    gain, lift = (float(of[i]) for of in (moves.gain, moves.lift))

    def lit(level: int) -> int:
        return int(min(max(gain * level + lift, 0), 255)) if augment.brightness or augment.contrast else level

    seen = []
    for y in range(height):
        row = []
        for x in range(width):
            from_y = y + top - augment.crop
            from_x = (width - 1 - x if flip else x) + left - augment.crop
            inside = 0 <= from_y < height and 0 <= from_x < width
            pixel = [lit(level) for level in (image[from_y][from_x] if inside else fill)]
            painted = augment.cutout and moves.cut_rows[i, y] and moves.cut_columns[i, x]
            row.append(fill if painted else pixel)
        seen.append(row)
    return seen


@settings(deadline=None, max_examples=60)
@given(
    height=st.integers(1, 12), width=st.integers(1, 12), channels=st.sampled_from([1, 3, 4]),
    crop=st.integers(0, 14), flip=st.sampled_from([False, True, "alternate"]), cutout=st.integers(0, 15),
    brightness=st.sampled_from([0, 0.035, 1]), contrast=st.sampled_from([0, 0.13, 1]),
    seed=st.integers(0, 2**40), channels_last=st.booleans(),
)  # fmt: skip
def test_batches_are_bit_for_bit_what_loops_over_pixels_make(
    height: int, width: int, channels: int, crop: int, flip: Flip, cutout: int, brightness: float,
    contrast: float, seed: int, channels_last: bool,
) -> None:  # fmt: skip
    augment = Augment(crop, flip, cutout, brightness, contrast)
    generator = torch.Generator().manual_seed(seed % 1000)
    images = torch.randint(0, 256, (6, height, width, channels), generator=generator, dtype=torch.uint8)
    fill = torch.arange(40, 40 + channels, dtype=torch.uint8)
    ids, epochs = torch.tensor([5, 0, 3, 3]), torch.tensor([0, 0, 1, 2])
    moves = augment.moves(seed, epochs, ids, height, width)
    found = augment.gather(augment.padded(images, fill), ids, moves, fill)
    expected = [
        by_hand(image, augment, moves, i, fill.tolist()) for i, image in enumerate(images[ids].tolist())
    ]
    assert found.tolist() == expected

    mean, std = torch.linspace(100, 130, channels), torch.linspace(50, 70, channels)
    normal = Normalise(mean, std, channels_last)(found)
    for k, c in product(range(len(ids)), range(channels)):
        pixels = torch.tensor([[pixel[c] for pixel in row] for row in expected[k]], dtype=torch.float32)
        assert torch.equal(normal[k, c], (pixels - mean[c]) / std[c])


def about_evenly(drawn: Tensor, bound: int) -> bool:
    shares = torch.bincount(drawn, minlength=bound) / len(drawn)
    return len(shares) == bound and bool((shares - 1 / bound).abs().max() < 0.01)  # 4.5 deviations of a half


@pytest.mark.parametrize("flip", [True, "alternate"])
def test_every_offset_side_and_centre_is_drawn_about_as_often(flip: Flip) -> None:
    ids = torch.arange(50_000)
    moves = Augment(2, flip, 3).moves(7, torch.full_like(ids, 4), ids, 6, 9)
    assert all(about_evenly(*of) for of in ((moves.top, 5), (moves.left, 5), (moves.flip, 2)))
    for covered, size in ((moves.cut_rows, 6), (moves.cut_columns, 9)):
        places = torch.arange(size)
        squares = (places[:, None] - places).abs() <= 1  # one for each centre
        fits = (covered[:, None, :] == squares).all(dim=2)
        assert torch.equal(fits.sum(dim=1), torch.ones_like(ids))
        assert about_evenly(fits.int().argmax(dim=1), size)


def test_light_is_drawn_evenly_about_the_middle_anew_in_each_epoch_and_exactly() -> None:
    # as many steps for one as for the other: one draw in both places would show
    ids, augment = torch.arange(50_000), Augment(brightness=0.25 / 255, contrast=0.25)
    moves = augment.moves(7, torch.full_like(ids, 4), ids, 8, 8)
    added = moves.lift + 128 * moves.gain - 128.5  # to the middle grey, which contrast leaves alone
    for drawn in (moves.gain - 1, added):
        assert float(drawn.abs().max()) == 0.25
        assert about_evenly(((4 * drawn + 1) * 4.999).long(), 10)
    assert abs(float(torch.stack([moves.gain, added]).corrcoef()[0, 1])) < 0.02
    other = augment.moves(7, torch.full_like(ids, 5), ids, 8, 8)
    assert not (other.gain == moves.gain).all()
    # sums and products of 1024ths, all below 2**24: nothing to round, with fused arithmetic or without it
    levels = torch.arange(256, dtype=torch.float32)
    lit = torch.addcmul(moves.lift[:1000, None], levels, moves.gain[:1000, None])
    exact = moves.lift.double()[:1000, None] + levels.double() * moves.gain.double()[:1000, None]
    assert torch.equal(lit.double(), exact)
    assert torch.equal((lit * 1024).frac(), torch.zeros_like(lit))


def test_alternating_flips_turn_every_image_over_from_epoch_to_epoch() -> None:
    ids = torch.arange(1000)
    alternate, always = Augment(horizontal_flip="alternate"), Augment(horizontal_flip=True)
    sides = [alternate.moves(3, torch.full_like(ids, e), ids, 8, 8).flip for e in range(5)]
    for epoch, side in enumerate(sides):
        assert torch.equal(side, (sides[0] + epoch) % 2)
    epochs = torch.tensor([0, 1]).repeat(500)  # a batch may reach over an epoch's end
    mixed = alternate.moves(3, epochs, ids, 8, 8).flip
    assert torch.equal(mixed, torch.where(epochs == 0, sides[0], sides[1]))
    assert torch.equal(sides[0], always.moves(3, torch.zeros_like(ids), ids, 8, 8).flip)
    assert not torch.equal(sides[0], alternate.moves(4, 0 * ids, ids, 8, 8).flip)


def test_normalise_is_torchvisions_to_rounding() -> None:
    images = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8)
    mean, std = torch.tensor([120.0, 110.0, 100.0]), torch.tensor([60.0, 61.0, 62.0])
    reference = v2.Compose(
        [v2.ToDtype(torch.float32, scale=True), v2.Normalize((mean / 255).tolist(), (std / 255).tolist())]
    )(images.permute(0, 3, 1, 2))
    for channels_last in (True, False):
        found = Normalise(mean, std, channels_last)(images)
        torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-6)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert found.is_contiguous(memory_format=layout)


def shapes(resident: bool, workers: int, flip: Flip = True) -> ImageData:
    augment = Augment(4, flip, 6, brightness=0.1, contrast=0.2)
    data = ImageData(Shapes(train=50, valid=23), augment, workers=workers, resident=resident)
    data.prepare(World(), seed=9)
    return data


def batches(data: ImageData, world_size: int = 1, rank: int = 0) -> list[tuple[Tensor, Tensor]]:
    sampler = Sampler(data.train_size, 12, seed=9, rank=rank, world_size=world_size)
    return list(data.train_batches(sampler, range(2, 8)))  # over an epoch's end


@pytest.mark.parametrize(("workers", "flip"), [(0, "alternate"), (2, True)])
def test_files_and_resident_give_the_same_batches(workers: int, flip: Flip) -> None:
    resident, files = shapes(True, 0, flip), shapes(False, workers, flip)
    for one, other in zip(batches(resident), batches(files), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    chunks = [range(10), range(20, 23)]
    for one, other in zip(resident.valid_batches(chunks), files.valid_batches(chunks), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@final
class Large(Split):
    """Pictures made when they are asked for, of 1 MiB each."""

    shape = (1024, 1024, 1)

    def __init__(self, count: int) -> None:
        self.labels = torch.arange(count)
        self.most = 0
        """Asked for at once."""

    def images(self, ids: Tensor) -> Tensor:
        self.most = max(self.most, len(ids))
        return (ids % 251).to(torch.uint8)[:, None, None, None].repeat(1, *self.shape)


def test_a_large_set_becomes_resident_block_by_block() -> None:
    train, valid = Large(70), Large(3)
    normalise = Normalise(torch.zeros(1), torch.ones(1), channels_last=True)
    fill = torch.tensor([9], dtype=torch.uint8)
    augment = Augment(crop=1)
    resident = ResidentLoader(train, valid, augment, normalise, fill, seed=9)
    assert len(list(resident.valid_batches([range(3)]))) == 1
    assert (train.most, valid.most) == (0, 3)  # an evaluation reads no training picture
    resident.train_batches(Sampler(70, 35, seed=9), range(0))
    assert train.most == 64  # before the first batch is asked for
    samples = Samples(train, keyed, AugmentedBatch(augment, fill, 9))
    files = Pipeline(
        samples, Samples(valid), 0, fill.device, lambda batch: (normalise(batch.image), batch.label)
    )
    sampler = Sampler(70, 35, seed=9)
    for one, other in zip(
        resident.train_batches(sampler, range(2)),
        files.train_batches(sampler, range(2)),
        strict=True,
    ):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_sample_is_augmented_alike_on_any_number_of_ranks() -> None:
    data = shapes(True, 0)
    alone = batches(data)
    for step, (images, labels) in enumerate(alone):
        halves = [batches(data, 2, rank)[step] for rank in (0, 1)]
        assert torch.equal(images, torch.cat([half[0] for half in halves]))
        assert torch.equal(labels, torch.cat([half[1] for half in halves]))


def test_batches_do_not_depend_on_where_the_steps_begin() -> None:
    data, sampler = shapes(True, 0), Sampler(50, 12, seed=9, micro_batch=5)
    whole = list(data.train_batches(sampler, range(2000)))  # moves are drawn for some hundreds at once
    parts = [batch for steps in (range(7), range(7, 2000)) for batch in data.train_batches(sampler, steps)]
    for one, other in zip(whole, parts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_preview_is_what_epoch_0_shows() -> None:
    data = shapes(True, 0)
    assert data.preview().dtype == torch.uint8
    order = Sampler(50, 50, seed=9).order(0)
    [(images, _)] = data.train_batches(Sampler(50, 50, seed=9), range(1))
    shown = torch.empty_like(images)
    shown[order] = images
    preview = data.preview().double()
    for channel in range(3):  # normalised, a line of its own for each
        ours, theirs = preview[:, channel], shown[:, channel].double()
        slope = (theirs.max() - theirs.min()) / (ours.max() - ours.min())
        assert torch.allclose(ours * slope + (theirs.min() - ours.min() * slope), theirs, atol=1e-5)


def test_on_device_passes_any_batch_through() -> None:
    batch = {"a": torch.ones(2), "b": [torch.zeros(1), (torch.ones(3), "name")]}
    [found] = on_device([batch], torch.device("cpu"))
    assert found["b"][1][1] == "name"
    assert len(list(tensors_of(found))) == 3


def test_wrong_options_name_their_key() -> None:
    with pytest.raises(UserError, match=r"data\.augment\.crop=-1"):
        Augment(crop=-1)
    with pytest.raises(UserError, match=r"data\.augment\.brightness=-0\.1: must be from 0 \(off\) to 1"):
        Augment(brightness=-0.1)
    with pytest.raises(UserError, match=r"data\.augment\.contrast=2: "):
        Augment(contrast=2)
    with pytest.raises(UserError, match=r"data\.workers=-2"):
        ImageData(Shapes(), Augment(), workers=-2)
