"""Both loading paths give the same pixels, whatever reads them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import v2

from ddptrain.data.augment import Augment, Normalise
from ddptrain.data.images import ImageData
from ddptrain.data.prefetch import on_device, tensors_of
from ddptrain.data.sampler import Sampler
from ddptrain.data.shapes import Shapes
from ddptrain.distributed.world import World
from ddptrain.errors import UserError


@settings(deadline=None, max_examples=40)
@given(
    height=st.integers(3, 12), width=st.integers(3, 12), channels=st.sampled_from([1, 3]),
    crop=st.integers(0, 4), flip=st.booleans(), cutout=st.integers(0, 9), seed=st.integers(0, 2**40),
)  # fmt: skip
def test_the_batched_gather_equals_torchvisions_functions(
    height: int, width: int, channels: int, crop: int, flip: bool, cutout: int, seed: int
) -> None:
    augment = Augment(crop, flip, cutout)
    generator = torch.Generator().manual_seed(seed % 1000)
    images = torch.randint(0, 256, (6, height, width, channels), generator=generator, dtype=torch.uint8)
    fill = torch.arange(40, 40 + channels, dtype=torch.uint8)
    ids, epochs = torch.tensor([5, 0, 3, 3]), torch.tensor([0, 0, 1, 2])
    moves = augment.moves(seed, epochs, ids, height, width)
    batched = augment.gather(augment.padded(images, fill), ids, moves, fill)
    for i, image in enumerate(images[ids]):
        assert torch.equal(batched[i], augment.apply_one(image, moves, i, fill.tolist()))


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


def shapes(resident: bool, workers: int) -> ImageData:
    data = ImageData(Shapes(train=50, valid=23), Augment(4, True, 6), workers=workers, resident=resident)
    data.prepare(World(), seed=9)
    return data


def batches(data: ImageData, world_size: int = 1, rank: int = 0) -> list[tuple[Tensor, Tensor]]:
    sampler = Sampler(data.train_size, 12, seed=9, rank=rank, world_size=world_size)
    return list(data.train_batches(sampler, range(2, 8)))  # over an epoch's end


@pytest.mark.parametrize("workers", [0, 2])
def test_files_and_resident_give_the_same_batches(workers: int) -> None:
    resident, files = shapes(True, 0), shapes(False, workers)
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
