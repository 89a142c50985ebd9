"""The samples of a part of a set: which pictures make one, and what is done to them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddptrain.data.detection.augment import BoxDraws, BoxedImage, DetectionAugment
from ddptrain.data.detection.batch import Batch, stacked
from ddptrain.data.detection.letterbox import GREY, Letterbox, fitted, letterbox
from ddptrain.data.detection.source import Objects, PackedObjects, Scenes
from ddptrain.data.stream.samples import neighbours
from ddptrain.data.workers import AS_IT_IS, Key
from ddptrain.errors import UserError


class ScaledPictures:
    """Pictures scaled so that their longer side is ``side``; uint8 (3, h, w).

    resident: decode all of them once, into one piece of memory, which loader processes share. Else each is
    decoded whenever it is asked for.
    """

    def __init__(self, scenes: Scenes, side: int, resident: bool) -> None:
        self._sizes = fitted(scenes.sizes, side)
        lengths = 3 * self._sizes.prod(1)
        self._ends = lengths.cumsum(0)
        self._pictures: Scenes | Tensor = scenes
        if resident:
            decoded = torch.empty(decoded_bytes(scenes, side), dtype=torch.uint8)
            for i, place in enumerate(decoded.split(lengths.tolist())):
                place.copy_(self[i].flatten())
            self._pictures = decoded

    def __getitem__(self, i: int) -> Tensor:
        from torchvision.transforms.v2 import functional

        height, width = self._sizes[i].tolist()
        if isinstance(self._pictures, Tensor):
            end = int(self._ends[i])
            return self._pictures[end - 3 * height * width : end].view(3, height, width)
        picture = self._pictures.image(i)
        same = picture.shape[1:] == (height, width)
        return picture if same else functional.resize(picture, [height, width])


def decoded_bytes(scenes: Scenes, side: int) -> int:
    """The memory that resident `ScaledPictures` take."""
    return int(3 * fitted(scenes.sizes, side).prod(1).sum())


class BoxSamples(Dataset[Any]):
    """A part of the set, read a batch at a time, here or in a worker."""

    def __init__(
        self, scenes: Scenes, side: int, augment: DetectionAugment, seed: int, resident: bool
    ) -> None:
        self._placed = letterbox(scenes.sizes, side)
        self._pictures = ScaledPictures(scenes, side, resident)
        self._objects = _to_learn(scenes.objects, self._placed)
        self._stream = scenes.stream
        self._side = side
        self._augment = augment
        self._seed = seed

    def __len__(self) -> int:
        return len(self._objects)

    def __getitems__(self, keys: list[Key]) -> Batch | UserError:
        epochs, ids, _ = map(torch.tensor, zip(*keys, strict=True))
        draws = BoxDraws(self._seed, epochs, ids)
        placed = self._placed.of(ids)
        try:
            if keys[0][0] == AS_IT_IS:
                plain = torch.eye(3).repeat(len(keys), 1, 1)  # an expanded one can't be pinned
                return stacked([self._letterboxed(i) for _, i, _ in keys], plain, ids, placed)
            samples = [self._augmented(draws, i, key) for i, key in enumerate(keys)]
        except UserError as error:
            return error
        return stacked(samples, self._augment.colours(draws), ids, placed)

    def _augmented(self, draws: BoxDraws, i: int, key: Key) -> BoxedImage:
        _, sample, progress = key
        near = neighbours(self._stream, sample, len(self))
        tiles = self._augment.tiles(draws, i, sample, near, progress)
        return self._augment.apply([self._scaled(tile) for tile in tiles], draws, i, self._side)

    def _scaled(self, i: int) -> BoxedImage:
        """A picture at the size it is trained at, not yet in its square."""
        on_it = self._objects[i]
        return BoxedImage(self._pictures[i], on_it.boxes, on_it.labels)

    def _letterboxed(self, i: int) -> BoxedImage:
        scaled_image = self._scaled(i)
        left, top = self._placed.corner[i].long().tolist()
        square = torch.full((3, self._side, self._side), GREY, dtype=torch.uint8)
        square[:, top : top + scaled_image.pixels.shape[1], left : left + scaled_image.pixels.shape[2]] = (
            scaled_image.pixels
        )
        return scaled_image._replace(
            pixels=square, boxes=scaled_image.boxes + torch.tensor([left, top, left, top])
        )


def _to_learn(objects: Sequence[Objects], placed: Letterbox) -> PackedObjects:
    """Boxes at the size that pictures are trained at; crowds are left out."""
    scaled = placed._replace(corner=torch.zeros_like(placed.corner))
    kept = []
    for i, on_it in enumerate(objects):
        single = ~on_it.crowd
        boxes, labels = scaled.of(i).there(on_it.boxes[single]), on_it.labels[single]
        kept.append(Objects(boxes, labels, on_it.crowd[single]))
    return PackedObjects.of(kept)
