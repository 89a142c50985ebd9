"""Pictures in files, and what every format of labels shares: probing them, fitting boxes into
them, and collecting what is wrong, so that one run shows all of it."""

import logging
import math
import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, final

import torch
from torch import Tensor

from ddptrain.data.agreement import check_distinct
from ddptrain.data.detection.run_lengths import PackedMasks
from ddptrain.data.detection.source import DetectionSet, Objects, PackedObjects, Scenes
from ddptrain.data.identity import of_file
from ddptrain.data.left_out import OnError
from ddptrain.data.pictures import ON_ITS_SIDE, ORIENTATION, content_of, decoded, opened
from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean_path
from ddptrain.text import first_few

log = logging.getLogger("ddptrain")

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2 in pixels."""

_SHOWN = 20
_LEAST_SIDE = 0.01  # Pixels. What is thinner may have no area left once it is float32.
_TURNING = (b"Raw profile type exif", b"XML:com.adobe.xmp")


class Row(NamedTuple):
    """An object of `Objects`."""

    box: Box
    label: int
    crowd: bool
    mask: bytes | None = None


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file as its header describes it.

    height, width: in pixels, as it is seen. turned: its EXIF tag swaps the two sides.
    """

    file: Path
    height: int
    width: int
    turned: bool


@final
class FileScenes(Scenes):
    """Image files, decoded when asked for and turned as their EXIF tag says.

    labelled: each picture with its name and its objects. files: where the pictures lie. masks: whether each
    object has one.
    """

    def __init__(self, labelled: Iterable[tuple[ImageFile, str, Sequence[Row]]], masks: bool = False) -> None:
        self.files: list[str] = []
        self.names: list[str] = []
        sizes, starts = array("q"), array("q", [0])
        boxes, labels, crowds, of_objects = array("f"), array("q"), array("b"), []
        for picture, name, rows in labelled:
            self.files.append(str(picture.file))
            self.names.append(name)
            sizes.extend((picture.height, picture.width))
            for row in rows:
                boxes.extend(row.box)
                labels.append(row.label)
                crowds.append(row.crowd)
                if masks:
                    assert row.mask is not None
                    of_objects.append(row.mask)
            starts.append(len(labels))
        self.sizes = torch.tensor(sizes, dtype=torch.int64).view(-1, 2)
        self.objects = PackedObjects(
            torch.tensor(starts),
            Objects(
                boxes=torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
                labels=torch.tensor(labels, dtype=torch.int64),
                crowd=torch.tensor(crowds, dtype=torch.bool),
                masks=PackedMasks.of(of_objects) if masks else None,
            ),
        )

    def image(self, i: int) -> Tensor:
        from torchvision.transforms.v2.functional import pil_to_tensor

        file = self.files[i]
        pixels: Tensor = pil_to_tensor(decoded(Path(file), "RGB"))
        height, width = self.sizes[i].tolist()
        if pixels.shape[1:] != (height, width):
            raise UserError(
                f"{file}: is {pixels.shape[2]}x{pixels.shape[1]} pixels and was {width}x{height} when the set"
                " was opened. Leave the files alone while they are trained on.",
                everywhere=False,
            )
        return pixels

    def encoded(self, i: int) -> bytes:
        return content_of(self.files[i])

    def fingerprint(self, i: int) -> bytes:
        return of_file(self.files[i], self.names[i], len(self))


@final
class Problems:
    """What is wrong with the set that ``source`` describes, one line each.

    on_error: "stop" raises them all together, "skip" goes on without what they concern.
    """

    def __init__(self, source: Path, on_error: OnError) -> None:
        self._source = source
        self._on_error = on_error
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        self._lines.append(line)

    def opened(self, train: FileScenes, valid: FileScenes, classes: Sequence[str]) -> DetectionSet:
        """The set, where the problems allow it. Raises UserError with all of them, or the first 20."""
        count = len(self._lines)
        shown = "\n".join(f"  {line}" for line in self._lines[:_SHOWN])
        if count > _SHOWN:
            shown += f"\n  and {count - _SHOWN} more"
        if count and self._on_error == "stop":
            raise UserError(
                f"{self._source}: {count} problem{'s' if count > 1 else ''} in this set:\n{shown}\n"
                f"Mend {'them' if count > 1 else 'it'}, or go on without: data.source.on_error=skip leaves"
                " out such boxes and pictures."
            )
        for part, scenes in (("training", train), ("validation", valid)):
            if not len(scenes):
                why = ""
                if count:
                    why = f" Left out:\n{shown}"
                elif scenes is valid:
                    why = " Without a part for validation it is every tenth."
                raise UserError(f"{self._source}: no picture is left for {part}.{why}")
        return DetectionSet(train, valid, classes, skipped=tuple(self._lines))


def checked_path(path: str | None, expected: str) -> Path:
    """The path of a set, relative to the current folder. Raises UserError where none is given."""
    if not path:
        raise UserError(f"data.source.path: say which set: data.source.path=<file>, {expected}")
    return Path(path)


def check_exists(path: Path, expected: str, key: str = "data.source.path") -> None:
    """Raise UserError where there is no such file or folder."""
    if not path.exists():
        hint = did_you_mean_path(path)
        raise UserError(f"{key}={path}: there is no such file or folder.{hint} It must name {expected}.")


def read_text(file: Path) -> str:
    """The file, UTF-8. Raises UserError where there is none, or it is none."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{file}: can't be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start}).") from error


def probe(file: Path) -> ImageFile:
    """The picture's size without decoding it, unless only that tells whether the file is whole.

    Raises UserError naming the file where it is missing, broken or cut short.
    """
    from PIL import Image

    with opened(file) as picture:
        if not _surely_whole(file, picture.format):
            picture.load()
        # PNG's own getexif() would decode the picture, for a tag may follow the pixels: see _png_is_plain
        turned = Image.Image.getexif(picture).get(ORIENTATION, 1) in ON_ITS_SIDE
        width, height = picture.size[::-1] if turned else picture.size
    return ImageFile(file, height, width, turned)


def checked_names(file: Path, names: Sequence[str]) -> list[str]:
    """Class names, each of which has a metric of its own. Raises UserError where two would share one."""
    for i, name in enumerate(names):
        if not name.strip() or not name.isprintable():
            raise UserError(f"{file}: names: class {i} is called {name!r}; give it a name that can be read.")
        if name in names[:i]:
            raise UserError(f"{file}: names: classes {names.index(name)} and {i} are both called {name}.")
    check_distinct(names, f"{file}: names")
    return list(names)


def note_in_both(train: Iterable[Path], valid: Iterable[Path], train_name: str, valid_name: str) -> None:
    """Log where pictures are trained on and measured on. Names: of the parts, for people."""
    both = set(map(os.path.realpath, train)) & set(map(os.path.realpath, valid))
    if both:
        log.warning(
            "note       %s: %d of its pictures are in %s too, so metrics are of what was trained on: %s",
            *(valid_name, len(both), train_name, first_few(sorted(map(str, both)), 3)),
        )


def check_size(picture: ImageFile, width: object, height: object) -> None:
    """Raises UserError where the labels speak of another size than the picture's."""
    actual = (picture.width, picture.height)
    if (width, height) == actual:
        return
    if picture.turned and (height, width) == actual:
        raise UserError(
            f"{picture.file}: its EXIF tag turns it to {actual[0]}x{actual[1]} pixels, but its labels say"
            f" {width}x{height}, as if it were not turned. Label it as it is seen, or remove the tag."
        )
    raise UserError(f"{picture.file}: is {actual[0]}x{actual[1]} pixels; its labels say {width}x{height}.")


def clipped(what: str, box: Box, picture: ImageFile, slack: tuple[float, float], rule: str) -> Box:
    """The box, cut at the picture's edges where it leaves them by rounding alone.

    what: the box as it is written. slack: pixels across and down that count as rounding. Raises UserError
    that says what is wrong with the box; for one that leaves the picture, with the format's own ``rule``.
    """
    x1, y1, x2, y2 = box
    height, width = picture.height, picture.width
    if not all(map(math.isfinite, box)):
        raise UserError(f"{what}: must be finite numbers")
    if x2 - x1 < _LEAST_SIDE or y2 - y1 < _LEAST_SIDE:
        raise UserError(f"{what}: has no area; width and height must be more than 0")
    over_x, over_y = max(-x1, x2 - width), max(-y1, y2 - height)
    if over_x > slack[0] or over_y > slack[1]:
        raise UserError(f"{what}: leaves the picture of {width}x{height} pixels; {rule}")
    x1, y1, x2, y2 = max(x1, 0.0), max(y1, 0.0), min(x2, float(width)), min(y2, float(height))
    if x2 - x1 < _LEAST_SIDE or y2 - y1 < _LEAST_SIDE:
        raise UserError(f"{what}: has no area within the picture")
    return x1, y1, x2, y2


def _surely_whole(file: Path, kind: str | None) -> bool:
    """Whether the file's structure shows that nothing is missing; else only decoding can tell."""
    with file.open("rb") as data:
        size = data.seek(0, 2)
        if kind in ("JPEG", "MPO"):
            data.seek(size - 2)
            return data.read(2) == b"\xff\xd9"
        if kind == "PNG":
            data.seek(8)
            return _png_is_plain(data)
    return kind == "WEBP"  # of which PIL has read and checked all at opening


def _png_is_plain(data: BinaryIO) -> bool:
    """Whether the chunks go on to IEND, and none that could turn the picture follows its pixels."""
    pixels = False
    while len(head := data.read(8)) == 8:
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        if kind == b"IEND":
            return True
        start = data.read(min(length, 24))
        if pixels and (kind == b"eXIf" or (kind != b"IDAT" and start.startswith(_TURNING))):
            return False
        pixels = pixels or kind == b"IDAT"
        data.seek(length - len(start) + 4, 1)
    return False
