"""A small set of pictures with masks, drawn here."""

import random
from pathlib import Path

from PIL import Image, ImageDraw

CLASSES = ("background", "disc", "square")
_COLOURS = ((40, 60, 50), (220, 60, 40), (60, 90, 230))


def scene(seed: int, width: int, height: int) -> tuple[Image.Image, Image.Image]:
    """A picture, and its mask, of grey levels: a disc, a square, and a stripe that does not count, wider from
    seed to seed."""
    dice = random.Random(seed)
    picture, mask = Image.new("RGB", (width, height), _COLOURS[0]), Image.new("L", (width, height), 0)
    for label in (1, 2):
        radius = min(width, height) // 5
        x, y = dice.randint(radius, width - radius), dice.randint(radius, height - radius)
        box = (x - radius, y - radius, x + radius, y + radius)
        for image, fill in ((picture, _COLOURS[label]), (mask, label)):
            draw = ImageDraw.Draw(image)
            (draw.ellipse if label == 1 else draw.rectangle)(box, fill=fill)
    ImageDraw.Draw(mask).rectangle((0, 0, width, seed % 7 * height // 10), fill=255)
    return picture, mask


def mask_set(folder: Path, train: int = 12, valid: int = 4, longer: int = 64) -> Path:
    """``train`` and ``val`` under ``folder``, of PNGs whose longer side has ``longer`` pixels."""
    for part, count in (("train", train), ("val", valid)):
        for i in range(count):
            seed = i + 100 * (part == "val")
            shorter = longer - 5 * (i % 4)
            save(folder / part, f"{i:03}", *scene(seed, *((longer, shorter) if i % 2 else (shorter, longer))))
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    return folder


def save(part: Path, name: str, picture: Image.Image, mask: Image.Image) -> None:
    for kind, image in (("images", picture), ("masks", mask)):
        (part / kind).mkdir(parents=True, exist_ok=True)
        image.save(part / kind / f"{name}.png")
