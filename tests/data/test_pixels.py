"""A picture file's pixels are those that it says, or it is refused: in every door that pictures come in by.

A generated product of TIFFs, written by hand: bits, signed or floating, byte order, where 0 is white, planes.
"""

import struct
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from ddptrain.api.world import World
from ddptrain.data.detection.files import FileScenes, probe
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.dataset import DatasetImages
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.masks.files import Pair, read_pair
from ddptrain.data.pictures import Box, cropped
from ddptrain.errors import UserError

SIDE = 16
RAMP = np.tile(np.arange(SIDE) * 17, (SIDE, 1))
"""What every file shows, 0 to 255."""


def tiff(file: Path, bits: int, kind: int, order: str, white: bool, channels: int, planar: bool) -> None:
    """kind: 1 unsigned, 2 signed, 3 floating."""
    levels = np.repeat((255 - RAMP if white else RAMP)[..., None], channels, 2).astype(np.float64) / 255
    levels = levels.transpose(2, 0, 1) if planar else levels
    top = 1.0 if kind == 3 else 2.0**bits - 1
    values = levels * top - 2.0 ** (bits - 1) * (kind == 2)
    if bits == 12:  # two pixels in three bytes, the first bit first
        whole = "".join(f"{int(value):012b}" for value in values.round().flatten())
        body = bytes(int(whole[i : i + 8], 2) for i in range(0, len(whole), 8))
    else:
        values = values if kind == 3 else values.round()
        body = values.astype(f"{order}{' uif'[kind]}{bits // 8}").tobytes()
    planes, size = channels if planar else 1, len(body)
    tags: dict[int, tuple[str, list[int]]] = {
        256: ("H", [SIDE]), 257: ("H", [SIDE]), 258: ("H", [bits] * channels), 259: ("H", [1]),
        262: ("H", [2 if channels == 3 else int(not white)]),
        273: ("I", [8 + size // planes * i for i in range(planes)]), 277: ("H", [channels]),
        278: ("H", [SIDE]), 279: ("I", [size // planes] * planes), 284: ("H", [1 + planar]),
        339: ("H", [kind] * channels),
    }  # fmt: skip
    entries, beyond = b"", b""
    after = 8 + size + 2 + 12 * len(tags) + 4
    for tag, (letter, numbers) in tags.items():
        packed = struct.pack(f"{order}{len(numbers)}{letter}", *numbers)
        if len(packed) > 4:
            packed, beyond = struct.pack(f"{order}I", after + len(beyond)), beyond + packed
        entries += struct.pack(f"{order}HHI", tag, "HI".index(letter) + 3, len(numbers)) + packed.ljust(
            4, b"\0"
        )
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8 + size)
    file.write_bytes(head + body + struct.pack(f"{order}H", len(tags)) + entries + bytes(4) + beyond)


def _in_folder(file: Path) -> Tensor:
    for name in ("one", "two"):
        for i in range(10):
            Image.new("RGB", (SIDE, SIDE)).save(_made(file.parent / "set" / name) / f"b{i}.png")
    (file.parent / "set" / "one" / "a.tif").write_bytes(file.read_bytes())
    return ImageFolder(SIDE).open(file.parent / "set").train.images(torch.tensor([0]))[0].permute(2, 0, 1)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _in_dataset(file: Path) -> Tensor:
    samples = [(Image.open(file), 0), *[(Image.new("L", (SIDE, SIDE)), 1)] * 9]
    opened = DatasetImages(samples, size=SIDE).open(Path())  # type: ignore[arg-type]
    return opened.train.images(torch.tensor([0]))[0].permute(2, 0, 1)


def _in_memory(file: Path) -> Tensor:
    data = ImageData(ImageFolder(SIDE), Augment(), workers=0)
    about = {"classes": ["a", "b"], "shape": [SIDE, SIDE, 3], "mean": [0.0] * 3, "std": [1.0] * 3}
    data.load_metadata(about, World())
    with Image.open(file) as picture:
        return data.preprocess(picture)[0]


def _with_boxes(file: Path) -> Tensor:
    return FileScenes([(probe(file), "a", [])]).image(0)


def _with_a_mask(file: Path) -> Tensor:
    Image.new("L", (SIDE, SIDE)).save(file.with_name("mask.png"))
    return pil_to_tensor(read_pair(Pair(file, file.with_name("mask.png")), 2)[0])


DOORS: dict[str, Callable[[Path], Tensor]] = {
    "folder": _in_folder, "dataset": _in_dataset, "in memory": _in_memory, "boxes": _with_boxes,
    "masks": _with_a_mask, "crops": lambda file: cropped(file, (SIDE, SIDE, 3), lambda h, w: Box(0, 0, h, w)),
}  # fmt: skip
READ = {(8, 1), (16, 1)}
"""Bits and kinds that can be had."""
REFUSED = {(8, 2), (12, 1), (16, 2), (32, 1), (32, 2), (32, 3)}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("bits", "kind"), [(8, 1), (8, 2), (12, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 3)]
)
def test_a_tiff_has_its_own_pixels_or_is_refused(door: str, bits: int, kind: int, tmp_path: Path) -> None:
    read = 0
    for i, (order, (white, channels, planar)) in enumerate(
        product("<>", ((False, 1, False), (True, 1, False), (False, 3, False), (False, 3, True)))
    ):
        file = _made(tmp_path / str(i)) / "a.tif"
        tiff(file, bits, kind, order, white, channels, planar)
        try:
            pixels = DOORS[door](file)
        except UnidentifiedImageError:  # of Pillow's own opening, outside of ddptrain
            assert door in ("dataset", "in memory")
            continue
        except UserError:
            continue
        read += 1
        assert (pixels - torch.tensor(RAMP)).abs().max() <= 1, (order, white, channels, planar)
    assert bool(read) == ((bits, kind) in READ)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_a_dataset_of_32_bits_a_pixel_is_refused(mode: str) -> None:
    """Pillow's own conversion cuts off all above 255."""
    deep = Image.new(mode, (SIDE, SIDE), 700)
    opened = DatasetImages([(deep, i % 2) for i in range(20)], size=SIDE).open(Path())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"sample 0 can't be used \(its picture: has 32 bits a pixel"):
        opened.train.images(torch.tensor([0]))


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("first", [True, False])
def test_the_channels_of_a_dataset(as_tensor: bool, channels: int, first: bool) -> None:
    """(C, H, W) of a tensor, (H, W, C) of an array; the other way round is not taken for a picture."""
    levels = np.repeat(RAMP[..., None], channels, 2).astype(np.uint8)
    found = levels.transpose(2, 0, 1).copy() if first else levels
    samples = [(torch.from_numpy(found) if as_tensor else found, i % 2) for i in range(20)]
    opened = DatasetImages(samples, size=SIDE).open(Path())  # type: ignore[arg-type]
    if channels in (1, 3, 4) and first == as_tensor:
        pixels = opened.train.images(torch.tensor([0]))[0].permute(2, 0, 1)
        assert (pixels - torch.tensor(RAMP)).abs().max() == 0
        return
    with pytest.raises(UserError, match="its picture has the shape"):
        opened.train.images(torch.tensor([0]))


def test_a_class_without_a_sample_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Labels that count from 1, say."""
    samples = [(Image.new("L", (SIDE, SIDE)), 1 + i % 2) for i in range(20)]
    data = ImageData(DatasetImages(samples, size=SIDE), Augment(), workers=0)  # type: ignore[arg-type]
    with caplog.at_level("WARNING", logger="ddptrain"):
        data.prepare(World(), 0)
    assert "no training sample has the class '0'" in caplog.text
