"""A run's pictures and texts, made part of a page: whoever looks at it needs no other file."""

import base64
import io
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from ddptrain.observe.plain_files import plain_files
from ddptrain.text import plain
from ddptrain.tools.report.run_files import RunFiles

_AS_IT_IS = 200_000  # Bytes up to which a PNG is taken as it is
_MOST_BYTES = 30_000_000
_MOST_CHARACTERS = 20_000
_SHOWN_AS_CURVES = "curves.png"  # The page has these curves, and one can switch them


@dataclass(slots=True)
class Embedded:
    """What the plots/ of some runs hold, by name, as HTML by run."""

    pictures: dict[str, dict[int, str]] = field(default_factory=dict)
    texts: dict[str, dict[int, str]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def embed(runs: Sequence[RunFiles], budget: int) -> Embedded:
    """budget: bytes of pictures; what comes after that is named in ``skipped``. Links are not followed."""
    embedded = Embedded()
    side = 1400 if len(runs) == 1 else 900
    for i, run in enumerate(runs):
        for path in plain_files(run.folder / "plots", "*"):
            if path.name == _SHOWN_AS_CURVES:
                continue
            if path.suffix == ".txt":
                embedded.texts.setdefault(plain(path.stem), {})[i] = _text(path)
            elif path.suffix == ".png":
                picture = embed_picture(path, side) if budget > 0 else None
                if picture is None:
                    embedded.skipped.append(plain(f"{run.name}: plots/{path.name}"))
                    continue
                budget -= len(picture)
                embedded.pictures.setdefault(plain(path.stem), {})[i] = picture
    return embedded


def _text(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            text = plain(file.read(_MOST_CHARACTERS + 1))
    except OSError as error:
        text = f"(can't be read: {error.strerror})"
    more = "\n… (cut here)" if len(text) > _MOST_CHARACTERS else ""
    return f'<pre tabindex="0">{escape(text[:_MOST_CHARACTERS])}{more}</pre>'


def embed_picture(path: Path, side: int) -> str | None:
    """An <img>, no more than so many pixels wide and high; None where the file is no picture."""
    from PIL import Image

    try:
        raw = path.read_bytes() if path.stat().st_size <= _MOST_BYTES else b""
        with Image.open(io.BytesIO(raw), formats=["PNG"]) as picture:
            picture.load()  # a damaged one fails here
            kind, (width, height) = "png", picture.size
            if len(raw) > _AS_IT_IS or max(picture.size) > side:
                small = picture.convert("RGB")
                small.thumbnail((side, side))
                packed = io.BytesIO()
                small.save(packed, "JPEG", quality=88, subsampling=0)
                kind, raw, (width, height) = "jpeg", packed.getvalue(), small.size
    except (OSError, ValueError, SyntaxError, zlib.error, struct.error, Image.DecompressionBombError):
        return None
    source = f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"
    return f'<img src="{source}" alt="{escape(plain(path.stem))}" width="{width}" height="{height}">'
