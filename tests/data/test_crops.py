"""Crops of picture files: where they lie, whose pixels they are, whatever decodes them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageFile, ImageOps
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

from ddptrain.data.pictures import Box, cropped
from ddptrain.errors import UserError

ORIENTATION = 0x0112
SIZE = (24, 20)


def picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """Smooth, and other in each place."""
    generator = torch.Generator().manual_seed(height * width)
    coarse = torch.rand(1, 3, 4, 5, generator=generator)
    smooth = nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)[0]
    made = functional.to_pil_image((smooth * 255).to(torch.uint8))
    if mode == "CMYK":  # convert would leave black at 0
        return Image.merge("CMYK", (*made.split(), made.convert("L")))
    return made.convert(mode)


def cut(file: Path, box: Box, channels: int = 3, seen: tuple[int, int] | None = None) -> Tensor:
    """What `cropped` gives; ``seen``: height and width for which it has to ask."""
    asked = []

    def box_of(height: int, width: int) -> Box:
        asked.append((height, width))
        return box

    made = cropped(file, (*SIZE, channels), box_of)
    assert asked == [seen] or seen is None
    assert made.dtype == torch.uint8
    return made


def by_pillow(file: Path, box: Box, channels: int = 3) -> Tensor:
    mode = "L" if channels == 1 else "RGB"
    with Image.open(file) as opened:
        if opened.format == "JPEG":
            opened.draft(mode, opened.size)
        whole = functional.pil_to_tensor(ImageOps.exif_transpose(opened).convert(mode))
    return functional.resized_crop(whole, *box, list(SIZE), antialias=True)


JPEGS = [
    (mode, options, shape)
    for mode in ("RGB", "L", "CMYK")
    for options in (
        {"quality": 30}, {"quality": 95, "subsampling": 0}, {"subsampling": 1}, {"subsampling": 2},
        {"progressive": True}, {"optimize": True, "restart_marker_rows": 1},
    )
    for shape in ((37, 33), (40, 48), (29, 64))
]  # fmt: skip


@pytest.mark.parametrize("channels", [1, 3])
def test_jpegs_have_pillows_pixels_whatever_decodes_them(
    tmp_path: Path, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 2**20)  # Pillow can't write small progressive files otherwise
    for mode, options, (height, width) in JPEGS:
        picture(height, width, mode).save(tmp_path / "a.jpg", **options)
        box = Box(3, 2, height - 7, width - 3)
        made = cut(tmp_path / "a.jpg", box, channels, (height, width))
        assert torch.equal(made, by_pillow(tmp_path / "a.jpg", box, channels)), (mode, options, height)


def save_16_bits(file: Path) -> None:
    pixels = torch.arange(40 * 50, dtype=torch.int32).view(40, 50) * 30
    Image.fromarray(pixels.numpy().astype("uint16")).save(file)


OTHERS: dict[str, Callable[[Path], None]] = {
    "a.png": lambda file: picture(40, 50, "RGBA").save(file),
    "palette.png": lambda file: picture(40, 50, "P").save(file),
    "b.webp": lambda file: picture(40, 50).save(file, lossless=True),
    "c.bmp": lambda file: picture(40, 50).save(file),
    "d.tif": lambda file: picture(40, 50).save(file, exif=turned_by(1)),
}


def turned_by(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_have_pillows_pixels(tmp_path: Path, name: str) -> None:
    OTHERS[name](tmp_path / name)
    box = Box(1, 4, 35, 41)
    assert torch.equal(cut(tmp_path / name, box, 3, (40, 50)), by_pillow(tmp_path / name, box))


def test_16_bits_of_grey_keep_their_bright_side(tmp_path: Path) -> None:
    save_16_bits(tmp_path / "a.png")
    made = cut(tmp_path / "a.png", Box(0, 0, 40, 50), 1).float()
    expected = (torch.arange(40 * 50).view(1, 1, 40, 50) * 30 / 256).floor()
    torch.testing.assert_close(
        made[None], nn.functional.interpolate(expected, SIZE, mode="bilinear", antialias=True), atol=1, rtol=0
    )


@pytest.mark.parametrize("ending", ["jpg", "png", "tif"])
@pytest.mark.parametrize("scale", [1, 4])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_crop_is_of_the_picture_as_it_is_seen(
    tmp_path: Path, ending: str, orientation: int, scale: int
) -> None:
    file = tmp_path / f"a.{ending}"
    options = {"quality": 98} if ending == "jpg" else {}
    picture(60 * scale, 84 * scale).save(file, exif=turned_by(orientation), **options)
    box = Box(*(scale * part for part in (11, 7, 40, 32)))
    with Image.open(file) as opened:
        width, height = ImageOps.exif_transpose(opened).size
    made = cut(file, box, 3, (height, width)).float()
    # decoding at a fraction filters a little otherwise
    assert (made - by_pillow(file, box).float()).abs().mean() < (0.01 if scale == 1 else 1.5)


@pytest.mark.parametrize(
    ("box", "fraction"),
    [
        (Box(10, 20, 47, 300), 1),  # a pixel too few for a half
        (Box(10, 20, 48, 40), 2),
        (Box(3, 7, 95, 200), 2),
        (Box(33, 21, 100, 90), 4),
        (Box(0, 0, 301, 403), 8),
    ],
)
@pytest.mark.parametrize("mpo", [False, True])
def test_a_jpeg_is_decoded_at_the_fraction_that_suffices(
    tmp_path: Path, box: Box, fraction: int, mpo: bool
) -> None:
    file, whole = tmp_path / "a.jpg", picture(301, 403)
    noise = torch.randint(0, 60, (3, 301, 403), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    noisy = functional.to_pil_image(functional.pil_to_tensor(whole) // 2 + noise)
    more: dict[str, Any] = {"format": "MPO", "save_all": True, "append_images": [whole]} if mpo else {}
    noisy.save(file, quality=90, **more)
    if fraction == 1:
        assert torch.equal(cut(file, box), by_pillow(file, box))
        return
    with Image.open(file) as opened:
        opened.draft("RGB", (403 // fraction, 301 // fraction))
        assert opened.size == (-(-403 // fraction), -(-301 // fraction))
        top, left, height, width = (part / fraction for part in box)
        area = (left, top, left + width, top + height)
        part = opened.resize(SIZE[::-1], Image.Resampling.BILINEAR, box=area)
    assert torch.equal(cut(file, box), functional.pil_to_tensor(part))
    assert not torch.equal(cut(file, box), by_pillow(file, box))


def test_a_file_that_is_cut_short_is_named_and_one_that_has_more_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    picture(60, 70).save(file, quality=95)
    sound, box = file.read_bytes(), Box(0, 0, 60, 70)
    whole = cut(file, box)
    file.write_bytes(sound + b"appended")
    assert torch.equal(cut(file, box), whole)
    for length in (len(sound) // 2, len(sound) - 2, 5, 0):
        file.write_bytes(sound[:length])
        with pytest.raises(UserError, match=r"a\.jpg: can't be read as an image"):
            cut(file, box)


def test_names_need_not_be_utf8(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"caf\xe9.jpg")
    picture(60, 70).save(file)
    box = Box(20, 30, 40, 35)
    assert torch.equal(cut(file, box), by_pillow(file, box))
