"""Streamed pictures: the same pixels as files, in an order that nothing but the seed decides."""

import io
import shutil
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bucket import Door, bucket, upload
from hypothesis import given, settings
from hypothesis import strategies as st
from masked import mask_set
from PIL import Image
from streamed_sets import SIDE, assert_same, blocks, pictures, streamed, trained

from ddptrain.api.blocks import Blocks
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.masks.data import MaskData
from ddptrain.data.stream.images import StreamImages
from ddptrain.data.stream.shards import packed, read_samples
from ddptrain.errors import UserError

__all__ = ["blocks", "pictures"]  # fixtures

LITDATA = (
    b"\x03\x00\x00\x00\x14\x00\x00\x00-\x00\x00\x00I\x00\x00\x00h\x00\x00\x00"
    b"\x03\x00\x00\x00\x08\x00\x00\x00\x02\x00\x00\x00abc\x00\x00\x00\x00\x00\x00\x00\x00n0"
    b"\x06\x00\x00\x00\x08\x00\x00\x00\x02\x00\x00\x00abcabc\x01\x00\x00\x00\x00\x00\x00\x00n1"
    b"\t\x00\x00\x00\x08\x00\x00\x00\x02\x00\x00\x00abcabcabc\x02\x00\x00\x00\x00\x00\x00\x00n2"
)
"""The first chunk that litdata 0.2.76's BinaryWriter(chunk_size=3) makes of
{"image": b"abc" * (i + 1), "label": i, "name": f"n{i}"} for i = 0, 1, 2."""


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with bucket() as opened:
        yield opened


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.integers(1, 8),
    st.integers(0, 99),
    st.integers(0, 5),
)
@settings(deadline=None)
def test_an_epoch_has_each_sample_once_and_reads_few_blocks_at_a_time(
    sizes: list[int], window: int, seed: int, epoch: int
) -> None:
    blocks = Blocks(torch.tensor(sizes), window)
    order = blocks.indices(sum(sizes), seed, epoch)
    assert sorted(order.tolist()) == list(range(sum(sizes)))
    windows = list(blocks.windows(seed, epoch))
    assert sorted(block for _, some in windows for block in some) == list(range(len(sizes)))
    ends = [begin for begin, _ in windows[1:]] + [sum(sizes)]
    for (begin, some), end in zip(windows, ends, strict=True):
        assert len(some) <= window
        assert {block for block, _ in blocks.of(order[begin:end].tolist())} == set(some)


def test_orders_differ_between_epochs_and_seeds() -> None:
    blocks = Blocks(torch.full((20,), 10), 4)
    orders = [tuple(blocks.indices(200, seed, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4


@given(st.lists(st.lists(st.binary(max_size=40), min_size=2, max_size=2), min_size=1, max_size=12), st.data())
@settings(deadline=None)
def test_a_block_gives_back_what_was_put_in(samples: list[list[bytes]], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(samples) - 1)))
    file = Path("/dev/shm") / f"ddptrain-test-{id(samples)}"
    try:
        file.write_bytes(packed(samples))
        assert read_samples(file, places, 2) == [samples[place] for place in places]
    finally:
        file.unlink()


def test_blocks_are_chunks_of_litdata() -> None:
    samples = [[b"abc" * (i + 1), struct.pack("<q", i), f"n{i}".encode()] for i in range(3)]
    assert packed(samples) == LITDATA


def pairs_of(data: ImageData) -> list[tuple[bytes, int]]:
    """The validation pictures with their labels, sorted."""
    ((images, labels),) = data.valid_batches([range(12)])
    pairs = zip(images, labels.tolist(), strict=True)
    return sorted((image.numpy().tobytes(), label) for image, label in pairs)


def test_the_pictures_are_those_of_the_files(pictures: Path, blocks: Path, tmp_path: Path) -> None:
    files = ImageData(ImageFolder(SIDE), Augment(), str(pictures))
    files.prepare(World(), seed=5)
    data = streamed(blocks, tmp_path)
    assert data.classes == files.classes
    assert pairs_of(data) == pairs_of(files)


def test_it_is_the_same_from_everywhere(
    blocks: Path, tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, by a cache that holds all or nearly nothing, from a bucket and a web server, by workers."""
    expected = trained(streamed(blocks, None), range(20))
    url = upload(door, blocks, "same")
    for name, value in door.variables.items():
        monkeypatch.setenv(name, value)
    size = sum(file.stat().st_size for file in (blocks / "train").iterdir())
    for data in (
        streamed(blocks, tmp_path / "0"),
        streamed(url, tmp_path / "1"),
        streamed(url, tmp_path / "2", cache_gb=size / 2e9),
        streamed(f"http://127.0.0.1:{door.port}/sets/same", tmp_path / "3", workers=2),
    ):  # fmt: skip
        assert_same(trained(data, range(20)), expected)
        assert_same(trained(data, range(13, 20)), expected[13:])


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_global_batches_don_t_depend_on_ranks_and_workers(
    blocks: Path, tmp_path: Path, ranks: int, workers: int
) -> None:
    expected = trained(streamed(blocks, None), range(9))
    parts = [trained(streamed(blocks, tmp_path, workers), range(9), ranks, rank) for rank in range(ranks)]
    joined = [tuple(map(torch.cat, zip(*step, strict=True))) for step in zip(*parts, strict=True)]
    assert_same(joined, expected)  # type: ignore[arg-type]


def test_chunks_of_litdata_are_read_too(blocks: Path, tmp_path: Path) -> None:
    """What ``write`` makes has litdata's index in each part's folder."""
    data = streamed(
        blocks / "train", tmp_path, valid_url=str(blocks / "valid"), classes=["cats", "dogs", "owls"]
    )
    assert_same(trained(data, range(9)), trained(streamed(blocks, None), range(9)))


def test_tars_are_read_too(pictures: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        files = sorted((pictures / part).rglob("*.jpg"))
        for shard in range(2):
            with tarfile.open(tmp_path / f"{part}-{shard:03}.tar", "w") as tar:
                for i, file in enumerate(files[shard::2]):
                    label = str(["cats", "dogs", "owls"].index(file.parent.name)).encode()
                    for ending, content in (("jpg", file.read_bytes()), ("cls", label)):
                        member = tarfile.TarInfo(f"some/{i:05}.{ending}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
    url, valid = (f"{tmp_path}/{part}-{{000..001}}.tar" for part in ("train", "val"))
    data = streamed(url, tmp_path / "cache", valid_url=valid, classes=3)
    assert (data.train_size, data.valid_size) == (60, 12)
    files = ImageData(ImageFolder(SIDE), Augment(), str(pictures))
    files.prepare(World(), seed=5)
    assert pairs_of(data) == pairs_of(files)
    [(_, labels)] = data.train_batches(Sampler(60, 60, seed=5), range(1))
    assert labels.bincount().tolist() == [20, 20, 20]
    with pytest.raises(UserError, match=r"data\.source\.classes"):
        streamed(url, tmp_path / "cache", valid_url=valid)


def test_writing_goes_on_where_it_was_killed(pictures: Path, blocks: Path, tmp_path: Path) -> None:
    data = ImageData(ImageFolder(SIDE), Augment(), str(pictures))
    out = tmp_path / "set"
    lines = data.write(out, "stream", 0.006)
    next(lines)  # the training part is there
    lines.close()
    (out / "train" / "chunk-0-1.bin").write_bytes(b"half")
    list(data.write(out, "stream", 0.006))
    files = sorted(file.relative_to(blocks) for file in blocks.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(out) for file in out.rglob("*") if file.is_file())
    assert all((out / file).read_bytes() == (blocks / file).read_bytes() for file in files)


@pytest.mark.parametrize("kind", ["pictures", "masks"])
def test_writing_does_not_go_on_with_files_that_were_changed_meanwhile(
    kind: str, pictures: Path, tmp_path: Path
) -> None:
    """Its first blocks would hold the old ones."""
    out, root = tmp_path / "set", tmp_path / "files"
    data: ImageData | MaskData
    if kind == "pictures":
        shutil.copytree(pictures, root)
        data = ImageData(ImageFolder(SIDE), Augment(), str(root))
    else:
        data = MaskData(str(mask_set(root)))
    lines = data.write(out, "stream", 0.006)
    next(lines)
    lines.close()
    changed = sorted(file for file in root.rglob("*.*") if file.suffix != ".txt")[0]
    with Image.open(changed) as picture:
        picture.copy().transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(changed)
    with pytest.raises(UserError, match="holds a part of another set"):
        list(data.write(out, "stream", 0.006))


def test_it_says_what_can_t_be(blocks: Path, tmp_path: Path) -> None:
    for words, key in (
        ({"url": None}, r"data\.source\.url"), ({"url": "ftp://x/y"}, "must begin with"),
        ({"url": str(tmp_path)}, "holds neither"), ({"url": f"{tmp_path}/no"}, "there is no such folder"),
        ({"cache_gb": 1e-6}, r"data\.source\.cache_gb=1e-06: a block of the validation set has"),
        ({"cache_gb": 5e-5}, r"data\.source\.cache_gb=5e-05: samples are shuffled"),
        ({"shuffle_blocks": 0}, "shuffle_blocks"), ({"classes": 2}, r"data\.source\.classes"),
        ({"url": "s3://sets/same", "cache": None}, r"cache=null"),
    ):  # fmt: skip
        arguments = {"url": str(blocks), "cache": str(tmp_path / "cache"), **words}
        with pytest.raises(UserError, match=key):
            ImageData(StreamImages(**arguments), Augment()).prepare(World(), 0)  # type: ignore[arg-type]
