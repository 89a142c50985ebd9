"""Masks of objects as COCO's compressed run lengths: a few hundred bytes each, exact to the pixel."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, final, overload

import numpy as np
import torch
from torch import Tensor

from ddptrain.errors import UserError

_RULE = (
    "must be polygons, [[x1, y1, x2, y2, x3, y3, ...], ...], in pixels of the picture, or run lengths, {size:"
    " [height, width], counts}"
)

_LEAST_FILLED = 2
"""Pixels of a box's side; a polygon within less may enclose the middle of none."""


@final
class PackedMasks(Sequence[bytes]):
    """Masks of many objects in two tensors: a tensor each would cost a loader's workers a file descriptor
    each.

    counts: uint8 (bytes,), one mask after the other. ends: int64 (k,), where each one's end.
    """

    def __init__(self, counts: Tensor, ends: Tensor) -> None:
        self.counts = counts
        self.ends = ends

    @classmethod
    def of(cls, masks: Iterable[bytes]) -> "PackedMasks":
        """The same masks, packed."""
        listed = list(masks)
        ends = torch.tensor([*accumulate(map(len, listed))], dtype=torch.int64)
        return cls(torch.from_numpy(np.frombuffer(bytearray(b"".join(listed)), np.uint8)), ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, which: int) -> bytes: ...
    @overload
    def __getitem__(self, which: slice) -> list[bytes]: ...
    def __getitem__(self, which: int | slice) -> bytes | list[bytes]:
        if isinstance(which, slice):
            return [self[i] for i in range(len(self))[which]]
        i = range(len(self))[which]
        start, end = int(self.ends[i - 1]) if i else 0, int(self.ends[i])
        return self.counts[start:end].numpy().tobytes()


def encode_masks(masks: Tensor) -> list[bytes]:
    """uint8 (k, h, w) of 0 and 1 -> k masks."""
    from faster_coco_eval.core import mask

    if not len(masks):
        return []
    return [one["counts"] for one in mask.encode(np.asfortranarray(masks.permute(1, 2, 0).numpy()))]


def decode_masks(masks: Sequence[bytes], height: int, width: int) -> Tensor:
    """k masks of a picture -> uint8 (k, height, width) of 0 and 1."""
    from faster_coco_eval.core import mask

    if not masks:
        return torch.zeros(0, height, width, dtype=torch.uint8)
    pixels = mask.decode([as_json(one, height, width) for one in masks])
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def as_json(mask: bytes, height: int, width: int) -> dict[str, Any]:
    """As a ``segmentation`` of COCO's JSON."""
    return {"size": [height, width], "counts": mask.decode("ascii")}


def area(mask: bytes, height: int, width: int) -> int:
    """Pixels of it."""
    from faster_coco_eval.core import mask as library

    return int(library.area(as_json(mask, height, width)))


def fills(mask: bytes, box: Sequence[float], height: int, width: int) -> bool:
    """Whether it has a pixel within a box, x1, y1, x2, y2, or that is so small that it need not have one."""
    from faster_coco_eval.core import mask as library

    if min(box[2] - box[0], box[3] - box[1]) < _LEAST_FILLED:
        return True
    x, y, wide, tall = library.toBbox(as_json(mask, height, width))
    beside = x >= box[2] or x + wide <= box[0] or y >= box[3] or y + tall <= box[1]
    return bool(wide and tall and not beside)


def of_polygons(polygons: Sequence[Sequence[float]], height: int, width: int) -> bytes:
    """What lies within one of them. Each: x1, y1, x2, y2, x3, y3, ... in pixels, three points or more."""
    from faster_coco_eval.core import mask

    parts = mask.frPyObjects([list(one) for one in polygons], height, width)
    counts: bytes = (parts[0] if len(parts) == 1 else mask.merge(parts))["counts"]
    return counts


def of_json(segmentation: Any, height: int, width: int) -> bytes:
    """A ``segmentation`` of COCO's JSON: polygons, run lengths or compressed run lengths. Raises UserError
    that says what is wrong with it."""
    from faster_coco_eval.core import mask

    if isinstance(segmentation, list) and segmentation:
        if not all(_is_polygon(one, height, width) for one in segmentation):
            raise UserError(f"segmentation: {_RULE}")
        return of_polygons(segmentation, height, width)
    if not isinstance(segmentation, dict) or not {"size", "counts"} <= segmentation.keys():
        raise UserError(f"segmentation: {_RULE}")
    if segmentation["size"] != [height, width]:
        raise UserError(
            f"segmentation: size {segmentation['size']}: must be the picture's, [{height}, {width}]"
        )
    counts = segmentation["counts"]
    if isinstance(counts, str):
        counts = _runs(counts)
    pixels = height * width
    if not isinstance(counts, list) or not all(isinstance(n, int) and 0 <= n <= pixels for n in counts):
        raise UserError(f"segmentation: counts: {_RULE}")
    if sum(counts) != pixels:
        raise UserError(f"segmentation: counts: {sum(counts):,} pixels, and the picture has {pixels:,}")
    own: bytes = mask.frPyObjects({"size": [height, width], "counts": counts}, height, width)["counts"]
    return own


def _is_polygon(points: Any, height: int, width: int) -> bool:
    """Of three points or more, none of which is further from the picture than the picture's sides: filling it
    takes the memory of what it encloses."""
    return (
        isinstance(points, list)
        and len(points) >= 6
        and len(points) % 2 == 0
        and all(isinstance(value, int | float) for value in points)
        and all(-width <= x <= 2 * width for x in points[::2])
        and all(-height <= y <= 2 * height for y in points[1::2])
    )


def _runs(text: str) -> list[int] | None:
    """The run lengths that a text of COCO's stands for (``rleFrString`` of cocoapi's maskApi.c); None where
    it stands for none. The library's own way does not check it."""
    runs: list[int] = []
    value, shift = 0, 0
    for letter in text:
        code = ord(letter) - 48
        if not 0 <= code < 64 or shift > 60:
            return None
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:
            if code & 16:
                value -= 1 << shift
            runs.append(value + runs[-2] if len(runs) > 2 else value)
            value, shift = 0, 0
    return runs if shift == 0 else None
