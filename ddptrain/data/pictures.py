"""Picture files: which ones a word names, whether one can be read, and its pixels."""

import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from glob import glob
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean_path
from ddptrain.text import counted, first_few, fonts_for

log = logging.getLogger("ddptrain")


class Encoded(BytesIO):
    """A picture's file in memory. name: for errors, whose text is asked for only then."""

    def __init__(self, content: bytes, name: object) -> None:
        super().__init__(content)
        self._name = name

    def __str__(self) -> str:
        return str(self._name)

    __repr__ = __str__


if TYPE_CHECKING:
    from PIL import Image, ImageFile, ImageFont

    Named = str | os.PathLike[str] | Encoded | Image.Image
    """A picture, by its file's path, its file or itself."""

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")
_MODES = {1: "L", 3: "RGB"}  # Pillow's, by the number of channels
_DRAFTABLE = ("JPEG", "MPO")  # formats that libjpeg decodes, at a fraction of the size where asked
ORIENTATION = 0x0112
"""EXIF's tag."""
_BITS, _PHOTOMETRIC, _PLANAR, _SAMPLE_FORMAT = 258, 262, 284, 339  # tags of a TIFF
_UNSIGNED, _WHITE_IS_0 = 1, 0
ON_ITS_SIDE = (5, 6, 7, 8)
"""Orientations in which height and width are exchanged."""


class Box(NamedTuple):
    """A rectangle in pixels."""

    top: int
    left: int
    height: int
    width: int


def named_pictures(source: str) -> list[Path]:
    """The files that ``source`` names: one, those in and below a folder, or of a pattern. Sorted.

    Raises UserError where there is none.
    """
    if not source:
        raise UserError("source=: must name a picture, a folder or a pattern.")
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = pictures_in(path)
    else:
        matching = map(Path, glob(source, recursive=True))
        files = sorted(file for file in matching if file.suffix.lower() in ENDINGS and file.is_file())
    if not files:
        why = f"no such file or folder.{did_you_mean_path(path)}"
        if path.is_dir() or glob(source, recursive=True):
            others = "it and the folders in it hold none" if path.is_dir() else "its files are of other kinds"
            why = f"{others}. A video is named by itself, to a detector."
        raise UserError(f"source={source}: names no picture ({', '.join(ENDINGS)}): {why}")
    return files


def pictures_in(folder: Path, endings: Sequence[str] = ENDINGS, beside: Sequence[str] = ()) -> list[Path]:
    """The files in and below a folder with one of these endings, sorted. Of the others the log says how many
    there are, but for those with an ending of ``beside``; hidden ones, and those in hidden folders, are
    none."""
    visible: list[Path] = []
    for here, inner, names in os.walk(folder, onerror=partial(_unreadable, folder)):
        inner[:] = [name for name in inner if not name.startswith(".")]
        note_links(here, inner)
        paths = [Path(here, name) for name in names if not name.startswith(".")]
        # a link that leads nowhere is a picture that is missing, which reading it says
        visible += [path.relative_to(folder) for path in paths if path.is_file() or path.is_symlink()]
    others = [str(name) for name in visible if name.suffix.lower() not in (*endings, *beside)]
    note_not_read(folder, others, endings)
    return sorted(folder / name for name in visible if name.suffix.lower() in endings)


def note_links(folder: str, inner: Sequence[str]) -> None:
    """Log which of the folders in one are links, if any are: `os.walk` does not follow them."""
    if links := sorted(name for name in inner if os.path.islink(os.path.join(folder, name))):
        shown = first_few(links, 3)
        log.warning("note       %s: %s not followed: %s", folder, counted(len(links), "linked folder"), shown)


def _unreadable(folder: Path, error: OSError) -> None:
    """Of a folder in and below one. A disk's lost+found, for one, is nobody's."""
    if str(error.filename) == str(folder) or not isinstance(error, PermissionError):
        raise UserError(f"{error.filename}: can't be read ({error.strerror}).", everywhere=False) from error
    log.warning("note       %s: can't be read (%s)", error.filename, error.strerror)


def note_not_read(folder: object, names: Sequence[str], endings: Sequence[str] = ENDINGS) -> None:
    """Log that files in a folder are not read, if there are any, for their names have none of these
    endings."""
    if names:
        count, shown = f"{len(names):,} file{'s' * (len(names) > 1)}", first_few(sorted(names), 3)
        log.info("note       %s: %s not read (not %s): %s", folder, count, ", ".join(endings), shown)


def check_apart(where: object, names: Sequence[Path]) -> None:
    """Raises UserError for a.jpg beside a.png: what belongs to them would have one name."""
    first_with: dict[Path, Path] = {}
    for name in names:
        other = first_with.setdefault(name.with_suffix(""), name)
        if other is not name:
            raise UserError(
                f"{where}: {other} and {name} differ in their ending only; give them other names."
            )


def claim(folder: Path) -> None:
    """Make a folder, or take an empty one. Raises UserError where that can't be."""
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={folder}: can't be made ({error.strerror}). Name another folder.") from error


def check_free(folder: Path) -> None:
    """Raise UserError unless a folder is empty, or not there yet."""
    try:
        empty = not folder.exists() or not any(folder.iterdir())
    except OSError as error:
        raise UserError(f"out={folder}: can't be made ({error.strerror}). Name another folder.") from error
    if not empty:
        raise UserError(f"out={folder}: exists and isn't empty. Name a new folder, or clear this one.")


@contextmanager
def opened(file: "str | os.PathLike[str] | Encoded") -> Iterator["ImageFile.ImageFile"]:
    """The picture, of which only the header is read yet. Raises UserError naming the file, also for what the
    body finds."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            check_pixels(picture, file)
            yield picture
    except UserError:
        raise
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0) / 1e6
        raise UserError(
            f"{file}: has more than {most:.0f} megapixels, which Pillow takes for an attack. Cut it into"
            " tiles.",
            everywhere=False,
        ) from error
    except (OSError, ValueError, SyntaxError, EOFError, struct.error) as error:
        known = isinstance(error, OSError) and error.strerror
        reason = known or str(error).replace(f" '{file}'", "")
        raise UserError(
            f"{file}: can't be read as an image ({reason}). Mend or remove it.", everywhere=False
        ) from error


def decoded(file: "Named", mode: str, side: int = 0) -> "Image.Image":
    """The picture as it is seen, turned as its EXIF tag says, with 8 bits a channel.

    mode: L (grey) or RGB. side: pixels that suffice; a JPEG is then decoded at a fraction of its size, which
    is nearly free, but no smaller than that.
    """
    if not isinstance(file, str | os.PathLike | Encoded):
        check_pixels(file, "picture")
        return upright(file.copy(), mode)
    with opened(file) as picture:
        if side:
            picture.draft(mode, (side, side))
        return upright(picture, mode)


def content_of(file: "str | os.PathLike[str] | Encoded") -> bytes:
    """A picture's file as it is. Raises UserError where it can't be read."""
    if isinstance(file, Encoded):
        return file.getvalue()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UserError(f"{file}: can't be read ({error.strerror}).") from error


def as_png(picture: Tensor) -> bytes:
    """The file of a picture, uint8 (C, H, W)."""
    from torchvision.transforms.v2.functional import to_pil_image

    return png_of(to_pil_image(picture))


def png_of(picture: "Image.Image") -> bytes:
    """Its file."""
    buffer = BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def fitted(file: "Named", shape: tuple[int, int, int], resize: int | None = None) -> Tensor:
    """uint8 ``shape`` (height, width, channels): the picture as `fit` brings it into that form."""
    height, width, channels = shape
    enough = max(height, width) if resize is None else 0
    return fit(decoded(file, _mode(file, channels), enough), shape, resize)


def fit(picture: "Image.Image", shape: tuple[int, int, int], resize: int | None = None) -> Tensor:
    """uint8 ``shape`` (height, width, channels): the picture's middle, cut to that form and scaled.

    A picture of that size stays as it is. resize: scale the short side to so many pixels, then cut the middle
    out, as torchvision's presets do; no smaller than height and width.
    """
    from PIL import Image, ImageOps
    from torchvision.transforms.v2 import functional

    height, width, _ = shape
    if resize is None:
        middle = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
    else:  # by Pillow, as programs without torch do it: docs/finetuning.md shows one
        middle = functional.center_crop(functional.resize(picture, [resize]), [height, width])
    pixels: Tensor = functional.pil_to_tensor(middle)
    return pixels.permute(1, 2, 0)


def resized(picture: Tensor, box: Box, size: tuple[int, int]) -> Tensor:
    """uint8 (C, h, w) -> (C, *size): the rectangle, scaled bilinearly, with antialiasing."""
    from torchvision.transforms.v2 import functional

    return functional.resized_crop(picture, *box, list(size), antialias=True)  # type: ignore[no-any-return]


def cropped(file: Path | Encoded, shape: tuple[int, int, int], box_of: Callable[[int, int], Box]) -> Tensor:
    """uint8 (C, H, W) for a shape (H, W, C): a rectangle of the picture, scaled. box_of: the rectangle by the
    picture's height and width, as it is seen.

    A JPEG is decoded at a half, quarter or eighth of its size where the rectangle then still has as many
    pixels as it is scaled to; it is the same rectangle, within a pixel of those.
    """
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor

    mode, size = _mode(file, shape[2]), shape[:2]
    with opened(file) as picture:
        if picture.format not in _DRAFTABLE:
            whole = upright(picture, mode)
            return cut(whole, box_of(whole.height, whole.width), size)
        turned = picture.getexif().get(ORIENTATION, 1)
        width, height = picture.size
        box = box_of(width, height) if turned in ON_ITS_SIDE else box_of(height, width)
        enough = min(box.height // size[0], box.width // size[1])
        scale = max((scale for scale in (2, 4, 8) if scale <= enough), default=1)
        picture.draft(mode, (width // scale, height // scale))
        if scale > 1:
            top, left, tall, wide = (side / scale for side in box)
            area = (left, top, left + wide, top + tall)
            part = upright(picture, mode).resize(size[::-1], Image.Resampling.BILINEAR, box=area)
            return pil_to_tensor(part)  # type: ignore[no-any-return]
        pixels = _decoded_by_torchvision(file, mode) if turned == 1 else None
        return cut(upright(picture, mode), box, size) if pixels is None else resized(pixels, box, size)


def cut(picture: "Image.Image", box: Box, size: tuple[int, int]) -> Tensor:
    """As `resized`, of which only the rectangle becomes a tensor."""
    from torchvision.transforms.v2.functional import pil_to_tensor

    top, left, tall, wide = box
    part = pil_to_tensor(picture.crop((left, top, left + wide, top + tall)))
    return resized(part, Box(0, 0, tall, wide), size)


def _decoded_by_torchvision(file: Path | Encoded, mode: str) -> Tensor | None:
    """A JPEG's pixels, uint8 (C, h, w): those of Pillow, a fifth sooner. None where Pillow has to decode it,
    or to say what is wrong with it."""
    import numpy as np

    try:
        from torchvision.io import ImageReadMode, decode_jpeg  # deprecated since 0.29
    except ImportError:
        return None
    read = ImageReadMode.GRAY if mode == "L" else ImageReadMode.RGB
    try:
        if isinstance(file, Encoded):
            content = np.frombuffer(bytearray(file.getbuffer()), np.uint8)
        else:  # torchvision's own read_file takes no names that aren't UTF-8
            content = np.fromfile(file, np.uint8)
        pixels: Tensor = decode_jpeg(torch.from_numpy(content), read)
    except RuntimeError:
        return None
    return pixels


def check_pixels(picture: "Image.Image", name: object) -> None:
    """Raises UserError where Pillow would give other pixels than the picture has: clipped, wrapped, dark or
    inverted ones."""
    from PIL.TiffImagePlugin import TiffImageFile

    why = ""
    if picture.mode in ("I", "F"):
        why = "has 32 bits a pixel, or signed ones"
    elif isinstance(picture, TiffImageFile):
        tags = picture.tag_v2
        bits = max(tags.get(_BITS, (1,)))
        if any(kind != _UNSIGNED for kind in tags.get(_SAMPLE_FORMAT, ())):
            why = "has signed pixels"
        elif 8 < bits < 16:
            why = f"has {bits} bits a channel"
        elif bits == 16 and tags.get(_PHOTOMETRIC) == _WHITE_IS_0:
            why = "has 16 bits of grey that count from white"
        elif bits == 16 and tags.get(_PLANAR, 1) != 1 and picture.mode != "I;16":
            why = "has 16 bits a channel, each channel by itself (planar)"
    if why:
        raise UserError(
            f"{name}: {why}; must have 8 or 16 bits a channel, unsigned, 0 for black, the channels of a pixel"
            " together. Convert it.",
            everywhere=False,
        )


def _mode(file: object, channels: int) -> str:
    if channels not in _MODES:
        raise UserError(f"{file}: a picture has 1 channel or 3, and this model takes {channels}.")
    return _MODES[channels]


def font_of(text: str, size: int) -> "ImageFont.FreeTypeFont":
    """To write on a picture. size: pixels. The font that has those of its letters that DejaVu Sans lacks."""
    from PIL import ImageFont

    return ImageFont.truetype(fonts_for(text)[-1].file, size)


def decoders() -> list[str | None]:
    """The versions of what decodes and scales: with others, pixels may differ."""
    import PIL
    from PIL import features

    return [PIL.__version__, *(features.version(name) for name in ("jpg", "webp", "libtiff"))]


def upright(picture: "Image.Image", mode: str) -> "Image.Image":
    """The picture itself, decoded, turned as its EXIF tag says, with 8 bits a channel."""
    from PIL import ImageOps

    ImageOps.exif_transpose(picture, in_place=True)
    eight = _in_eight_bits(picture)
    return eight if eight.mode == mode else eight.convert(mode)  # convert would copy it


def _in_eight_bits(picture: "Image.Image") -> "Image.Image":
    """Pillow's own way from 16 bits of grey would cut off all that is brighter than 255."""
    if not picture.mode.startswith("I;16"):
        return picture
    return picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
