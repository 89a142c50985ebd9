"""Ten kinds of coloured shapes on cluttered 32x32 backgrounds, drawn by the program.

Any position, size, rotation and colour, crossed by lines, so that no pixel tells the class and a
linear model fails, while a small CNN learns it in a minute. A pure function of the seed. Shapes are
drawn from signed distances (I. Quilez, https://iquilezles.org/articles/distfunctions2d/).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Generator, Tensor

from ddptrain.api.rng import derive_seed
from ddptrain.data.identity import digest
from ddptrain.data.images.source import ArraySplit, ImageSet, ImageSource, Split
from ddptrain.errors import check_least

SIDE = 32
_CHUNK = 1000
"""Samples of one generator, which draws for all of them: sample i does not depend on how many are painted."""


@final
@dataclass(frozen=True, eq=False)
class Shapes(ImageSource):
    """train, valid: how many samples. seed: of the drawings; it is not the run's, so that runs with
    different seeds see the same set."""

    name = "shapes"

    train: int = 10_000
    valid: int = 2_000
    seed: int = 0

    def __post_init__(self) -> None:
        check_least("data.source", 1, train=self.train, valid=self.valid)

    def fetch(self, root: Path) -> None:
        """Nothing to fetch."""

    def open(self, root: Path) -> ImageSet:
        return ImageSet(
            train=self._split(self.train, part=0),
            valid=self._split(self.valid, part=1),
            classes=list(DISTANCES),
            mean=[85.8] * 3,
            std=[59.8] * 3,
            # not of the pixels: kinds of processors differ in how they round
            identity=digest([repr((self.name, self.train, self.valid, self.seed)).encode()]),
        )

    def _split(self, count: int, part: int) -> Split:
        chunks = [draw_samples(*chunk) for chunk in in_chunks(count, _CHUNK, self.seed, part)]
        images, labels = (torch.cat(pieces) for pieces in zip(*chunks, strict=True))
        return ArraySplit(images, labels)


def in_chunks(count: int, most: int, *key: int) -> Iterator[tuple[Generator, int]]:
    """For each chunk of a drawn set, of at most so many samples: its generator, which follows from the key (a
    seed, the part of the set) and the chunk's number, and how many samples it has."""
    for i in range(math.ceil(count / most)):
        yield torch.Generator().manual_seed(derive_seed(*key, i)), min(count - i * most, most)


def draw_samples(generator: Generator, n: int) -> tuple[Tensor, Tensor]:
    """uint8 (n, 32, 32, 3) images, at most 1000, and int64 (n,) labels."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return (low + (high - low) * torch.rand(_CHUNK, *shape, generator=generator))[:n]

    labels = torch.randint(len(DISTANCES), (_CHUNK,), generator=generator)[:n]
    ground = uniform(0, 0.5, 1, 1, 3)
    canvas = ground + _slope(uniform) * uniform(-0.2, 0.2, 1, 1, 3)
    for _ in range(3):
        canvas = _painted(canvas, _blob(uniform), uniform(0, 1, 1, 1, 3))
    colour = uniform(0.5, 1, 1, 1, 3)
    radius, centre, angle = uniform(8.0, 12.0), _points(uniform, 12, SIDE - 12), uniform(0, 2 * math.pi)
    canvas = _painted(canvas, signed_distance(labels, radius, centre, angle, SIDE), colour)
    for _ in range(2):
        canvas = _painted(canvas, _line(uniform), uniform(0, 1, 1, 1, 3))
    noise = 0.05 * torch.randn(_CHUNK, *canvas.shape[1:], generator=generator)[:n]
    return ((canvas + noise).clamp(0, 1) * 255).round().to(torch.uint8), labels


Uniform = Callable[..., Tensor]


def _painted(canvas: Tensor, distance: Tensor, colour: Tensor) -> Tensor:
    """Paint where the distance (in pixels, (n, 32, 32)) is negative, with a soft edge of one pixel."""
    cover = (0.5 - distance).clamp(0, 1)[..., None]
    return torch.lerp(canvas, colour.expand_as(canvas), cover)


def placed(centre: Tensor, angle: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The pixel grid as seen from (n, 2) centres and turned by (n,) angles; (n, side, side) each."""
    at = torch.arange(side) + 0.5
    dx, dy = at[None, None, :] - centre[:, 0, None, None], at[None, :, None] - centre[:, 1, None, None]
    cosine, sine = angle.cos()[:, None, None], angle.sin()[:, None, None]
    return cosine * dx + sine * dy, cosine * dy - sine * dx


def signed_distance(labels: Tensor, radius: Tensor, centre: Tensor, angle: Tensor, side: int) -> Tensor:
    """float32 (n, side, side): signed distance in pixels from each shape."""
    scale = radius[:, None, None]
    u, v = (offset / scale for offset in placed(centre, angle, side))
    distance = torch.empty_like(u)
    for label, formula in enumerate(DISTANCES.values()):
        chosen = labels == label
        distance[chosen] = formula(u[chosen], v[chosen])
    return distance * scale


def _slope(uniform: Uniform) -> Tensor:
    along, _ = placed(_points(uniform, 12, 20), uniform(0, 2 * math.pi), SIDE)
    return (along / 16)[..., None]


def _blob(uniform: Uniform) -> Tensor:
    u, v = placed(_points(uniform, 0, SIDE), uniform(0, math.pi), SIDE)
    return torch.hypot(u, v) - uniform(1.0, 2.5, 1, 1)


def _line(uniform: Uniform) -> Tensor:
    u, v = placed(_points(uniform, 0, SIDE), uniform(0, math.pi), SIDE)
    return _box(u, v, uniform(3, 12, 1, 1), uniform(0.3, 0.7, 1, 1))


def _points(uniform: Uniform, low: float, high: float) -> Tensor:
    """float32 (n, 2)"""
    return torch.stack([uniform(low, high), uniform(low, high)], dim=1)


def _box(u: Tensor, v: Tensor, half_u: Tensor | float, half_v: Tensor | float) -> Tensor:
    du, dv = u.abs() - half_u, v.abs() - half_v
    return torch.hypot(du.clamp(min=0), dv.clamp(min=0)) + torch.maximum(du, dv).clamp(max=0)


def _polygon(u: Tensor, v: Tensor, corners: int, inner: float) -> Tensor:
    """A star of ``corners`` points on the unit circle with its notches at radius ``inner``."""
    step = math.pi / corners
    angle = torch.remainder(torch.atan2(v, u) + step, 2 * step) - step
    radius = torch.hypot(u, v)
    x, y = radius * angle.cos(), radius * angle.sin().abs()
    notch_x, notch_y = inner * math.cos(step), inner * math.sin(step)
    edge_x, edge_y = notch_x - 1, notch_y
    return ((x - 1) * edge_y - y * edge_x) / math.hypot(edge_x, edge_y)


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "disc": lambda u, v: torch.hypot(u, v) - 0.8,
    "ring": lambda u, v: (torch.hypot(u, v) - 0.65).abs() - 0.2,
    "square": lambda u, v: _box(u, v, 0.68, 0.68),
    "triangle": lambda u, v: _polygon(u, v, 3, 0.5),
    "star": lambda u, v: _polygon(u, v, 5, 0.42),
    "cross": lambda u, v: torch.minimum(_box(u, v, 0.9, 0.25), _box(u, v, 0.25, 0.9)),
    "bar": lambda u, v: _box(u, v, 0.95, 0.3),
    "crescent": lambda u, v: torch.maximum(torch.hypot(u, v) - 0.9, 0.75 - torch.hypot(u - 0.5, v)),
    "half": lambda u, v: torch.maximum(torch.hypot(u, v) - 0.95, -u),
    "frame": lambda u, v: _box(u, v, 0.58, 0.58).abs() - 0.16,
}
"""Signed distance of each class, in units of its radius; negative inside."""
