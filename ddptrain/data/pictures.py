"""Picture files: which ones a word names, whether one can be read, and its pixels."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ddptrain.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")
_MODES = {1: "L", 3: "RGB"}  # Pillow's, by the number of channels


def named_pictures(source: str) -> list[Path]:
    """The files that ``source`` names: one, those in and below a folder, or of a pattern. Sorted.

    Raises UserError where there is none.
    """
    if not source:
        raise UserError("source=: must name a picture, a folder or a pattern.")
    path = Path(source)
    if path.is_file():
        return [path]
    found = path.rglob("*") if path.is_dir() else map(Path, glob(source, recursive=True))
    files = sorted(file for file in found if file.suffix.lower() in ENDINGS and file.is_file())
    if not files:
        why = "it and the folders in it hold none" if path.is_dir() else "no such file or folder"
        raise UserError(f"source={source}: names no picture ({', '.join(ENDINGS)}): {why}.")
    return files


def check_apart(where: object, names: Sequence[Path]) -> None:
    """Raises UserError for a.jpg beside a.png: what belongs to them would have one name."""
    seen: dict[Path, Path] = {}
    for name in names:
        other = seen.setdefault(name.with_suffix(""), name)
        if other is not name:
            raise UserError(
                f"{where}: {other} and {name} differ in their ending only; give them other names."
            )


def claim(folder: Path) -> None:
    """Make a folder, or take an empty one. Raises UserError where that can't be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        empty = not any(folder.iterdir())
    except OSError as error:
        raise UserError(f"out={folder}: can't be made ({error.strerror}). Name another folder.") from error
    if not empty:
        raise UserError(f"out={folder}: exists and isn't empty. Name a new folder, or clear this one.")


@contextmanager
def opened(file: Path) -> Iterator["Image.Image"]:
    """The picture, of which only the header is read yet. Raises UserError naming the file, also for what the
    body finds."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            if picture.mode in ("I", "F"):
                raise UserError(
                    f"{file}: has 32 bits a pixel; must have 8 or 16. Convert it.", everywhere=False
                )
            yield picture
    except UserError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        known = isinstance(error, OSError) and error.strerror
        reason = known or str(error).replace(f" '{file}'", "")
        raise UserError(
            f"{file}: can't be read as an image ({reason}). Mend or remove it.", everywhere=False
        ) from error


def decoded(file: Path, mode: str, side: int = 0) -> "Image.Image":
    """The picture as it is seen, turned as its EXIF tag says, with 8 bits a channel.

    mode: L (grey) or RGB. side: pixels that suffice; a JPEG is then decoded at a fraction of its size, which
    is nearly free, but no smaller than that.
    """
    from PIL import ImageOps

    with opened(file) as picture:
        if side:
            picture.draft(mode, (side, side))
        return _in_eight_bits(ImageOps.exif_transpose(picture)).convert(mode)


def fitted(file: Path, shape: tuple[int, int, int], resize: int | None = None) -> Tensor:
    """uint8 ``shape`` (height, width, channels): the picture's middle, cut to that form and scaled.

    A picture of that size stays as it is. resize: scale the short side to so many pixels, then cut the middle
    out, as torchvision's presets do; no smaller than height and width.
    """
    from PIL import Image, ImageOps
    from torchvision.transforms.v2 import functional

    height, width, channels = shape
    if resize is not None:
        # by Pillow, as programs without torch do it: docs/finetuning.md shows one
        scaled = functional.resize(decoded(file, _mode(file, channels)), [resize])
        middle: Tensor = functional.pil_to_tensor(functional.center_crop(scaled, [height, width]))
        return middle.permute(1, 2, 0)
    whole = decoded(file, _mode(file, channels), max(height, width))
    fit = ImageOps.fit(whole, (width, height), Image.Resampling.BILINEAR)
    pixels: Tensor = functional.pil_to_tensor(fit)
    return pixels.permute(1, 2, 0)


def stored(file: Path, channels: int) -> Tensor:
    """uint8 (channels, h, w): the whole picture at its full resolution."""
    from torchvision.transforms.v2.functional import pil_to_tensor

    pixels: Tensor = pil_to_tensor(decoded(file, _mode(file, channels)))
    return pixels.contiguous()


def _mode(file: Path, channels: int) -> str:
    if channels not in _MODES:
        raise UserError(f"{file}: a picture has 1 channel or 3, and this model takes {channels}.")
    return _MODES[channels]


def decoders() -> list[str | None]:
    """The versions of what decodes and scales: with others, pixels may differ."""
    import PIL
    from PIL import features

    return [PIL.__version__, *(features.version(name) for name in ("jpg", "webp", "libtiff"))]


def _in_eight_bits(picture: "Image.Image") -> "Image.Image":
    """Pillow's own way from 16 bits of grey would cut off all that is brighter than 255."""
    if not picture.mode.startswith("I;16"):
        return picture
    return picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
