"""Contact sheets: pictures side by side, each with what was seen on it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ddptrain.data.pictures import decoded, font_of

if TYPE_CHECKING:
    from PIL import ImageDraw, ImageFont

COLUMNS, ROWS = 8, 4
_SIDE, _GAP, _LINE = 176, 10, 18
"""Pixels: of a picture's square, between pictures, and of a line of text."""


class Titled(NamedTuple):
    file: Path
    title: str


def write_sheet(target: Path, pictures: Sequence[Titled]) -> None:
    """Write up to COLUMNS * ROWS pictures to one PNG, whole and in their own form; below each its title and
    its file's name."""
    from PIL import Image, ImageDraw

    rows = -(-len(pictures) // COLUMNS)
    columns = min(len(pictures), COLUMNS)
    across, down = _SIDE + _GAP, _SIDE + 2 * _LINE + _GAP
    sheet = Image.new("RGB", (columns * across + _GAP, rows * down + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (file, title) in enumerate(pictures):
        whole = decoded(file, "RGB", _SIDE)
        small = max(whole.size) < _SIDE
        size = [max(1, round(side * _SIDE / max(whole.size))) for side in whole.size]
        shown = whole.resize(size, Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS)
        left, top = _GAP + i % COLUMNS * across, _GAP + i // COLUMNS * down
        sheet.paste(shown, (left + (_SIDE - shown.width) // 2, top + _SIDE - shown.height))
        for line, text, colour in ((2, title, "black"), (_LINE, file.name, "#777777")):
            font = font_of(text, 13)
            draw.text((left, top + _SIDE + line), _cut(text, draw, font), fill=colour, font=font)
    sheet.save(target)


def _cut(text: str, draw: "ImageDraw.ImageDraw", font: "ImageFont.FreeTypeFont") -> str:
    """The text, of one line, as far as it fits below a picture."""
    line = " ".join(text.encode(errors="replace").decode().split())
    if draw.textlength(line, font) <= _SIDE:
        return line
    while line and draw.textlength(f"{line}…", font) > _SIDE:
        line = line[:-1]
    return f"{line}…"
