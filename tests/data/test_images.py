"""Both loading paths give the same pixels, whatever reads them."""

from itertools import product
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import v2

from ddptrain.data.augment import Augment, Moves, Normalise
from ddptrain.data.images import ImageData
from ddptrain.data.prefetch import on_device, tensors_of
from ddptrain.data.sampler import Sampler
from ddptrain.data.shapes import Shapes
from ddptrain.distributed.world import World
from ddptrain.errors import UserError

Flip = bool | Literal["alternate"]
Picture = list[list[list[int]]]
"""Rows of pixels of channels."""


def by_hand(image: Picture, augment: Augment, moves: Moves, i: int, fill: list[int]) -> Picture:
    """What the i-th of the moves does to an image, pixel by pixel."""
    height, width = len(image), len(image[0])
    top, left, flip, cut_y, cut_x = (int(move[i]) for move in moves)
    first_row, first_column = cut_y - augment.cutout // 2, cut_x - augment.cutout // 2
    seen = []
    for y in range(height):
        row = []
        for x in range(width):
            from_y = y + top - augment.crop
            from_x = (width - 1 - x if flip else x) + left - augment.crop
            inside = 0 <= from_y < height and 0 <= from_x < width
            painted = 0 <= y - first_row < augment.cutout and 0 <= x - first_column < augment.cutout
            row.append(image[from_y][from_x] if inside and not painted else fill)
        seen.append(row)
    return seen


@settings(deadline=None, max_examples=60)
@given(
    height=st.integers(1, 12), width=st.integers(1, 12), channels=st.sampled_from([1, 3, 4]),
    crop=st.integers(0, 14), flip=st.sampled_from([False, True, "alternate"]), cutout=st.integers(0, 15),
    seed=st.integers(0, 2**40), channels_last=st.booleans(),
)  # fmt: skip
def test_batches_are_bit_for_bit_what_loops_over_pixels_make(
    height: int, width: int, channels: int, crop: int, flip: Flip, cutout: int, seed: int, channels_last: bool
) -> None:
    augment = Augment(crop, flip, cutout)
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


@pytest.mark.parametrize("flip", [True, "alternate"])
def test_every_offset_side_and_centre_is_drawn_about_as_often(flip: Flip) -> None:
    ids = torch.arange(50_000)
    moves = Augment(2, flip, 3).moves(7, torch.full_like(ids, 4), ids, 6, 9)
    for drawn, bound in zip(moves, (5, 5, 2, 6, 9), strict=True):
        shares = torch.bincount(drawn, minlength=bound) / len(ids)
        assert len(shares) == bound
        assert (shares - 1 / bound).abs().max() < 0.01  # 4.5 deviations of a half


def test_alternating_flips_turn_every_image_over_from_epoch_to_epoch() -> None:
    ids = torch.arange(1000)
    sides = [Augment(flip="alternate").moves(3, torch.full_like(ids, e), ids, 8, 8).flip for e in range(5)]
    for epoch, side in enumerate(sides):
        assert torch.equal(side, (sides[0] + epoch) % 2)
    epochs = torch.tensor([0, 1]).repeat(500)  # a batch may reach over an epoch's end
    mixed = Augment(flip="alternate").moves(3, epochs, ids, 8, 8).flip
    assert torch.equal(mixed, torch.where(epochs == 0, sides[0], sides[1]))
    assert torch.equal(sides[0], Augment(flip=True).moves(3, torch.zeros_like(ids), ids, 8, 8).flip)
    assert not torch.equal(sides[0], Augment(flip="alternate").moves(4, 0 * ids, ids, 8, 8).flip)


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
    data = ImageData(Shapes(train=50, valid=23), Augment(4, flip, 6), workers=workers, resident=resident)
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
    assert data.preview().shape == (50, 3, 32, 32)
    assert data.preview().dtype == torch.uint8


def test_on_device_passes_any_batch_through() -> None:
    batch = {"a": torch.ones(2), "b": [torch.zeros(1), (torch.ones(3), "name")]}
    [found] = on_device([batch], torch.device("cpu"))
    assert found["b"][1][1] == "name"
    assert len(list(tensors_of(found))) == 3


def test_wrong_options_name_their_key() -> None:
    with pytest.raises(UserError, match=r"data\.augment\.crop=-1"):
        Augment(crop=-1)
    with pytest.raises(UserError, match=r"data\.workers=-2"):
        ImageData(Shapes(), Augment(), workers=-2)
