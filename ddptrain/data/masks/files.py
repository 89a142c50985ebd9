"""Pictures with masks in files: which there are, how a pair is read, and how it is brought into a square."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ddptrain.api.world import World
from ddptrain.data import held_out
from ddptrain.data.detection.files import read_text
from ddptrain.data.images.class_folders import VALID_NAMES
from ddptrain.data.left_out import readable, skippable, tell
from ddptrain.data.pictures import ENDINGS, Encoded, check_apart, decoded, opened, pictures_in
from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean_path
from ddptrain.text import first_few

if TYPE_CHECKING:
    from PIL import Image

log = logging.getLogger("ddptrain")

IGNORED = 255
"""Of a mask's pixels: those that count neither in training nor in evaluation."""
_FEWER_BITS = ("L;2", "L;4")
"""What Pillow calls such grey pixels in a PNG; it spreads them over 0 to 255. (Those of a palette stay.)"""
_LAYOUT = "It must hold train/images, train/masks, val/images and val/masks, or only images and masks."


class Pair(NamedTuple):
    """Their files, or what is in these."""

    picture: Path | Encoded
    mask: Path | Encoded


class Window(NamedTuple):
    """How a picture is scaled, in pixels, and which corner of that is the square's."""

    height: int
    width: int
    top: int = 0
    left: int = 0


def find_pairs(root: Path) -> tuple[list[Pair], list[Pair]]:
    """For training and for validation, sorted by name. Without a part for validation every tenth is held out.

    Raises UserError where folders, pictures or masks are missing.
    """
    if not root.is_dir():
        raise UserError(f"data.root={root}: there is no such folder.{did_you_mean_path(root)} {_LAYOUT}")
    train = root / "train"
    valid = next((root / name for name in VALID_NAMES if (root / name).is_dir()), None)
    if train.is_dir() and valid is not None:
        return _pairs(train), _pairs(valid)
    if valid is not None and (root / "images").is_dir():
        raise UserError(
            f"data.root={root}: holds {valid.name}, and no train, so {root / 'images'} may hold all pictures"
            f" or those for training. Call it train/images, or move {valid.name} elsewhere."
        )
    pairs = _pairs(train if train.is_dir() else root)
    if len(pairs) < 10:
        raise UserError(
            f"data.root={root}: holds {len(pairs)} pictures, and every tenth is for validation. Give it ten"
            " or more, or val/images and val/masks."
        )
    return held_out.split(pairs)


def _pairs(part: Path) -> list[Pair]:
    images, masks = part / "images", part / "masks"
    for folder in (images, masks):
        if not folder.is_dir():
            raise UserError(f"data.root: there is no folder {folder}. {_LAYOUT}")
    files = pictures_in(images)
    if not files:
        raise UserError(f"{images}: holds no picture ({', '.join(ENDINGS)}).")
    names = [file.relative_to(images) for file in files]
    check_apart(images, names)
    there = pictures_in(masks, (".png",))
    check_apart(masks, [mask.relative_to(masks) for mask in there])
    mask_of = {mask.relative_to(masks).with_suffix(""): mask for mask in there}
    without = [str(name) for name in names if name.with_suffix("") not in mask_of]
    if without:
        needed = masks / Path(without[0]).with_suffix(".png")
        raise UserError(
            f"{images}: {len(without)} of {len(files)} pictures have no mask: {first_few(without, 3)}. The"
            f" first needs {needed}."
        )
    unpaired = [
        str(name.with_suffix(".png")) for name in mask_of.keys() - {name.with_suffix("") for name in names}
    ]
    if unpaired:
        shown = first_few(sorted(unpaired), 3)
        log.warning("note       %s: %d masks have no picture in %s: %s", masks, len(unpaired), images, shown)
    return [Pair(file, mask_of[name.with_suffix("")]) for file, name in zip(files, names, strict=True)]


def class_names(configured: Sequence[str] | int | None, root: Path) -> tuple[str, ...]:
    """The names of classes 0, 1, ...: as configured, numbers for a count, or
    the lines of ``root/classes.txt``.

    Raises UserError where there are none, or not 2 to 255 different ones.
    """
    if isinstance(configured, int):
        source, names = f"data.classes={configured}", [str(label) for label in range(configured)]
    elif configured is not None:
        source, names = "data.classes", list(configured)
    else:
        file = root / "classes.txt"
        if not file.is_file():
            raise UserError(
                f"data.classes=null: the names are read from {file}, which does not exist. Write one name a"
                " line, in the order of the masks' values, or data.classes=[background,cat], or their number:"
                " data.classes=2."
            )
        source, names = str(file), listed_names(root)
    if not 2 <= len(names) <= IGNORED:
        raise UserError(f"{source}: has {len(names)} classes; must be 2 to {IGNORED}, background among them.")
    for label, name in enumerate(names):
        if not name.strip() or not name.isprintable() or name in names[:label]:
            raise UserError(f"{source}: class {label} is called {name!r}; give it a name of its own.")
    return tuple(names)


def listed_names(root: Path) -> list[str]:
    """The lines of ``root/classes.txt``; none without it."""
    file = root / "classes.txt"
    return [line.strip() for line in read_text(file).rstrip().splitlines()] if file.is_file() else []


def read_pair(pair: Pair, classes: int) -> tuple["Image.Image", "Image.Image"]:
    """The picture, RGB, and its mask, of mode L or P, both turned as their EXIF tags say.

    Raises UserError naming the file that can't be read, or the mask that does not fit.
    """
    from PIL import ImageOps

    picture = decoded(pair.picture, "RGB")
    with opened(pair.mask) as mask:
        problem = f"has pixels of mode {mask.mode}" if mask.format == "PNG" else f"is a {mask.format} file"
        if mask.mode == "L" and mask.tile and mask.tile[0].args in _FEWER_BITS:
            problem = "has grey pixels of less than 8 bits, whose values stand for levels from 0 to 255"
        elif mask.mode in ("L", "P") and mask.format == "PNG":
            problem = ""
        ImageOps.exif_transpose(mask, in_place=True)
    if problem:
        raise UserError(
            f"{pair.mask}: {problem}; a mask must be a grey or palette PNG of 8 bits, whose values are"
            " classes.",
            everywhere=False,
        )
    if mask.size != picture.size:
        raise UserError(
            f"{pair.mask}: has {mask.width}x{mask.height} pixels, and {pair.picture} as it is seen (turned by"
            f" its EXIF tag) {picture.width}x{picture.height}. Both must have the same size.",
            everywhere=False,
        )
    wrong = [value for value, count in enumerate(mask.histogram()) if count and classes <= value < IGNORED]
    if wrong:
        raise UserError(
            f"{pair.mask}: has pixels of value {wrong[0]}, which is no class: there are {classes}, 0 to"
            f" {classes - 1}, and {IGNORED} for what does not count. Mend the mask, or set data.classes.",
            everywhere=False,
        )
    return picture, mask


def readable_pairs(
    parts: tuple[Sequence[Pair], Sequence[Pair]], classes: int, world: World, workers: int
) -> tuple[tuple[Sequence[Pair], Sequence[Pair]], list[str]]:
    """Both parts without the pairs that `read_pair` refuses, and why it does. As `left_out.readable`."""
    kept, skipped = [], []
    for name, pairs in zip(("training", "validation"), parts, strict=True):
        ids, lines = readable(world, name, len(pairs), partial(_check, pairs, classes), workers)
        kept.append([pairs[i] for i in ids.tolist()])
        skipped += lines
    tell(skipped)
    train, valid = kept
    return (train, valid), skipped


def _check(pairs: Sequence[Pair], classes: int, i: int) -> None:
    with skippable():
        read_pair(pairs[i], classes)


def scaled(height: int, width: int, side: int) -> Window:
    """The size at which the longer side has ``side`` pixels; no side falls below one pixel."""
    longest = max(height, width)
    return Window(max(1, round(height * side / longest)), max(1, round(width * side / longest)))


def picture_in_square(picture: "Image.Image", window: Window, size: int, fill: Sequence[int]) -> Tensor:
    """uint8 (size, size, 3): scaled by Pillow's bilinear filter; ``fill`` on its right and below it."""
    from PIL import Image

    return _in_square(picture, window, size, Image.Resampling.BILINEAR, tuple(fill))


def mask_in_square(mask: "Image.Image", window: Window, size: int) -> Tensor:
    """uint8 (size, size): scaled by Pillow's nearest neighbour; 255 on its right and below it."""
    from PIL import Image

    return _in_square(mask, window, size, Image.Resampling.NEAREST, IGNORED)


def _in_square(
    image: "Image.Image", window: Window, size: int, filter: "Image.Resampling", fill: int | tuple[int, ...]
) -> Tensor:
    import numpy as np
    from PIL import Image

    height, width, top, left = window
    whole = image.resize((width, height), filter)
    square = Image.new(image.mode, (size, size), fill)
    square.paste(whole.crop((left, top, min(left + size, width), min(top + size, height))))
    return torch.from_numpy(np.array(square))


def _palette() -> list[int]:
    """Pascal VOC's colours, red, green and blue of 256 classes: a class's bits, the lowest one first, become
    the highest of each channel in turn."""
    return [
        sum((label >> (3 * bit + channel) & 1) << (7 - bit) for bit in range(8))
        for label in range(256)
        for channel in range(3)
    ]


PALETTE = _palette()


def blended(pixels: Tensor, mask: Tensor) -> Tensor:
    """uint8 (..., 3, H, W) pictures and (..., H, W) masks of any integer type -> the pictures, half in their
    classes' colours."""
    colours = torch.tensor(PALETTE, dtype=torch.uint8).view(256, 3)[mask.long()].movedim(-1, -3)
    return (pixels // 2) + (colours // 2)
