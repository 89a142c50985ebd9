"""Small streamed sets, and batches of them."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.stream.images import StreamImages

SIDE = 16


def folder_of_pictures(root: Path, count: int = 60) -> Path:
    generator = torch.Generator().manual_seed(0)
    for part, size in (("train", count), ("val", 12)):
        for name in ("cats", "dogs", "owls"):
            (root / part / name).mkdir(parents=True)
            for i in range(size // 3):
                pixels = torch.randint(0, 256, (20 + i % 7, 24, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(root / part / name / f"{i:03}.jpg")
    return root


def written(root: Path, out: Path, block_mb: float = 0.006) -> Path:
    data = ImageData(ImageFolder(SIDE), Augment(), str(root))
    list(data.write(out, "stream", block_mb))
    return out


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def blocks(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same set in some ten blocks a part."""
    return written(pictures, tmp_path_factory.mktemp("blocks") / "set")


def streamed(
    url: Path | str, cache: Path | None, workers: int = 0, cache_gb: float = 1e-3, **more: object
) -> ImageData:
    source = StreamImages(
        str(url), size=SIDE, cache=None if cache is None else str(cache), cache_gb=cache_gb, shuffle_blocks=3,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip
    data = ImageData(source, Augment(2, True, 4), workers=workers, resident=False)
    data.prepare(World(), seed=5)
    return data


def trained(data: ImageData, steps: range, ranks: int = 1, rank: int = 0) -> list[tuple[Tensor, Tensor]]:
    sampler = Sampler(data.train_size, 8, 5, rank, ranks, epoch_order=data.epoch_order)
    return list(data.train_batches(sampler, steps))


def assert_same(found: list[tuple[Tensor, Tensor]], expected: list[tuple[Tensor, Tensor]]) -> None:
    assert len(found) == len(expected)
    for (images, labels), (others, names) in zip(found, expected, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, names)
