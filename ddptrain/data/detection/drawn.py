"""Scenes of 1 to 12 overlapping shapes of ten kinds, drawn by the program with exact boxes.

Any size, rotation, place and colour, over cluttered backgrounds, some cut off by the edge. A box holds what
is seen of a shape, to the pixel, as in COCO; of each shape at least half is seen. A pure function of the
seed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Generator, Tensor

from ddptrain.data.detection.run_lengths import encode_masks
from ddptrain.data.detection.source import ArrayScenes, DetectionSet, DetectionSource, Objects
from ddptrain.data.images.shapes import DISTANCES, in_chunks, signed_distance
from ddptrain.errors import check_least

MOST = 12
"""Shapes in a scene."""
_CHUNK = 200  # Scenes of one generator, which draws for all: scene i does not depend on how many are painted
_TRIES = 20  # Shapes offered to a scene; one that would hide too much of an earlier one is not painted
_PATCH = 64  # Side of the square in which a shape is drawn; no shape is larger
_RADIUS = (7.0, 28.0)
_SEEN = 0.5  # Least share of a shape that neither others nor the edge may hide
_NOBODY = -1


@final
@dataclass(frozen=True, eq=False)
class DrawnScenes(DetectionSource):
    """train, valid: how many scenes. size: pixels of a scene's side. seed: of the drawings; it is not the
    run's, so that runs with different seeds see the same set. masks: of each shape, too: what is seen of
    it."""

    name = "shapes_detection"

    train: int = 2000
    valid: int = 400
    size: int = 128
    seed: int = 0
    masks: bool = False

    def __post_init__(self) -> None:
        check_least("data.source", 1, train=self.train, valid=self.valid)
        check_least("data.source", 64, size=self.size)

    def open(self, root: Path) -> DetectionSet:
        return DetectionSet(
            train=self._scenes(self.train, part=0),
            valid=self._scenes(self.valid, part=1),
            classes=tuple(DISTANCES),
        )

    def _scenes(self, count: int, part: int) -> ArrayScenes:
        chunks = [
            draw_scenes(*chunk, self.size, self.masks) for chunk in in_chunks(count, _CHUNK, self.seed, part)
        ]
        images = torch.cat([images for images, _ in chunks])
        objects = [one for _, chunk_objects in chunks for one in chunk_objects]
        return ArrayScenes(images, objects, [f"{i:06}" for i in range(count)])


def draw_scenes(generator: Generator, n: int, side: int, masks: bool = False) -> tuple[Tensor, list[Objects]]:
    """uint8 (n, 3, side, side) pictures, at most 200, and what is on each, with masks if asked for."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return (low + (high - low) * torch.rand(_CHUNK, *shape, generator=generator))[:n]

    base = uniform(0, 1, 3)
    canvas = _Canvas.empty(_background(base, uniform, side))
    wanted = torch.randint(1, MOST + 1, (_CHUNK,), generator=generator)[:n]
    labels = torch.randint(len(DISTANCES), (_CHUNK, _TRIES), generator=generator)[:n]
    radius = torch.exp(uniform(math.log(_RADIUS[0]), math.log(_RADIUS[1]), _TRIES))
    angle = uniform(0, 2 * math.pi, _TRIES)
    centre = uniform(0.04, 0.96, _TRIES, 2) * side
    colour = (base[:, None] + uniform(0.2, 0.8, _TRIES, 3)) % 1  # never the background's own
    noise = 0.04 * torch.randn(_CHUNK, 3, side, side, generator=generator)[:n]
    painted = torch.full((n, MOST), _NOBODY)
    count = torch.zeros(n, dtype=torch.int64)
    for k in range(_TRIES):
        pending = torch.nonzero(count < wanted)[:, 0]
        accepted = canvas.paint(
            pending, count[pending], labels[pending, k], radius[pending, k], angle[pending, k],
            centre[pending, k], colour[pending, k],
        )  # fmt: skip
        done = pending[accepted]
        painted[done, count[done]] = labels[done, k]
        count[done] += 1
    images = ((canvas.pixels() + noise).clamp(0, 1) * 255).round().to(torch.uint8)
    owners = canvas.owners()
    boxes = _boxes_of(owners)
    objects = []
    for i, n in enumerate(count.tolist()):
        own = encode_masks((owners[i] == torch.arange(n)[:, None, None]).to(torch.uint8)) if masks else None
        crowd = torch.zeros(n, dtype=torch.bool)
        objects.append(Objects(boxes[i, :n].clone(), painted[i, :n].clone(), crowd, own))
    return images, objects


@dataclass(frozen=True, slots=True)
class _Canvas:
    """Pictures under the brush, with a margin into which shapes may reach."""

    colours: Tensor
    """float32 (n * tall * tall, 3)"""
    owner: Tensor
    """int64 (n * tall * tall,): which shape is seen at a pixel, counted as painted."""
    whole: Tensor
    """float32 (n, MOST): pixels of each shape."""
    visible: Tensor
    """float32 (n, MOST): of those, still to be seen."""
    side: int

    @classmethod
    def empty(cls, background: Tensor) -> "_Canvas":
        n, _, side, _ = background.shape
        colours = torch.nn.functional.pad(background, [_PATCH] * 4).permute(0, 2, 3, 1).reshape(-1, 3)
        owner = torch.full((len(colours),), _NOBODY)
        return cls(colours, owner, torch.zeros(n, MOST), torch.zeros(n, MOST), side)

    def paint(
        self,
        rows: Tensor,
        number: Tensor,
        labels: Tensor,
        radius: Tensor,
        angle: Tensor,
        centre: Tensor,
        colour: Tensor,
    ) -> Tensor:
        """Offer a shape to each of these pictures; bool (k,): which took it."""
        tall = self.side + 2 * _PATCH
        corner = centre.floor().long() + _PATCH // 2  # in the canvas with its margin
        pixels = torch.arange(_PATCH)
        x, y = (corner[:, i, None] + pixels for i in (0, 1))
        at = (rows[:, None, None] * tall**2 + y[:, :, None] * tall + x[:, None, :]).flatten(1)
        distance = signed_distance(labels, radius, centre + _PATCH - corner, angle, _PATCH).flatten(1)
        inside_x, inside_y = ((v >= _PATCH) & (v < _PATCH + self.side) for v in (x, y))
        within = (inside_y[:, :, None] & inside_x[:, None, :]).flatten(1)
        mask = (distance < 0) & within
        under = torch.where(mask, self.owner[at], _NOBODY)
        hidden = torch.zeros(len(rows), MOST + 1).scatter_add_(1, under + 1, torch.ones_like(distance))[:, 1:]
        own = mask.sum(1)
        takes = (self.visible[rows] - hidden >= _SEEN * self.whole[rows]).all(1)
        takes &= own >= _SEEN * (distance < 0).sum(1)
        rows, at, mask, number = rows[takes], at[takes], mask[takes], number[takes]
        self.visible[rows] -= hidden[takes]
        self.whole[rows, number] = (distance < 0).sum(1)[takes].float()
        self.visible[rows, number] = own[takes].float()
        self.owner[at] = torch.where(mask, number[:, None], self.owner[at])
        cover = (0.5 - distance[takes]).clamp(0, 1)[..., None]  # a soft edge of one pixel
        before = self.colours[at]
        self.colours[at] = torch.lerp(before, colour[takes, None, :].expand_as(before), cover)
        return takes

    def pixels(self) -> Tensor:
        """float32 (n, 3, side, side)"""
        return self._cut(self.colours).permute(0, 3, 1, 2)

    def owners(self) -> Tensor:
        """int64 (n, side, side)"""
        return self._cut(self.owner)

    def _cut(self, of: Tensor) -> Tensor:
        tall, inner = self.side + 2 * _PATCH, slice(_PATCH, _PATCH + self.side)
        canvas: Tensor = of.unflatten(0, (-1, tall, tall))
        return canvas[:, inner, inner]


def _background(base: Tensor, uniform: Callable[..., Tensor], side: int) -> Tensor:
    """float32 (n, 3, side, side): the base colour (n, 3) on a slope, crossed by four lines."""
    at = torch.arange(side) + 0.5
    y, x = at[:, None], at[None, :]
    along = uniform(-1, 1, 1, 1) * (x / side - 0.5) + uniform(-1, 1, 1, 1) * (y / side - 0.5)
    canvas = (base[..., None, None] + uniform(-0.5, 0.5, 3, 1, 1) * along[:, None]).clamp(0, 1)
    for _ in range(4):
        angle, offset = uniform(0, math.pi, 1, 1), uniform(-0.5, 0.5, 1, 1) * side
        line = (angle.cos() * (x - side / 2) + angle.sin() * (y - side / 2) - offset).abs()
        cover = (uniform(0.8, 1.5, 1, 1) - line).clamp(0, 1)[:, None]
        canvas = torch.lerp(canvas, uniform(0, 1, 3, 1, 1).expand_as(canvas), cover)
    return canvas


def _boxes_of(owners: Tensor) -> Tensor:
    """float32 (n, MOST, 4) from int64 (n, side, side): what each shape shows, to the pixel."""
    boxes = torch.zeros(len(owners), MOST, 4)
    side = owners.shape[-1]
    for number in range(MOST):
        mask = owners == number
        for start, dim in ((0, 1), (1, 2)):
            line = mask.any(dim).int()  # over rows: which columns; over columns: which rows
            boxes[:, number, start] = line.argmax(1).float()
            boxes[:, number, start + 2] = side - line.flip(1).argmax(1).float()
    return boxes
