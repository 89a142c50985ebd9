"""Pictures with boxes as `ddptrain.data.pipeline` has them: source and transform."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ddptrain.data.detection.augment import BoxDraws, BoxedImage, DetectionAugment
from ddptrain.data.detection.batch import Sample
from ddptrain.data.detection.letterbox import Letterbox, fitted, in_square, letterbox
from ddptrain.data.detection.source import Objects, PackedObjects, Scenes
from ddptrain.data.stream.samples import neighbours
from ddptrain.data.workers import AS_IT_IS, Key


class ScaledPictures:
    """Pictures scaled so that their longer side is ``size``; uint8 (3, h, w).

    resident: decode all of them once, into one piece of memory, which loader processes share. Else each is
    decoded whenever it is asked for.
    """

    def __init__(self, scenes: Scenes, size: int, resident: bool) -> None:
        self._sizes = fitted(scenes.sizes, size)
        lengths = 3 * self._sizes.prod(1)
        self._ends = lengths.cumsum(0)
        self._pictures: Scenes | Tensor = scenes
        if resident:
            decoded = torch.empty(decoded_bytes(scenes, size), dtype=torch.uint8)
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


def decoded_bytes(scenes: Scenes, size: int) -> int:
    """The memory that resident `ScaledPictures` take."""
    return int(3 * fitted(scenes.sizes, size).prod(1).sum())


@final
class BoxedPictures:
    """Pictures at the size they are trained at, not yet in their squares, with their boxes: the source of
    `ddptrain.data.pipeline`. resident: as `ScaledPictures` has it."""

    def __init__(self, scenes: Scenes, size: int, resident: bool) -> None:
        self.placed = letterbox(scenes.sizes, size)
        self.stream = scenes.stream
        self._pictures = ScaledPictures(scenes, size, resident)
        self._objects = _to_learn(scenes.objects, self.placed)

    def __len__(self) -> int:
        return len(self._objects)

    def __getitem__(self, index: int) -> BoxedImage:
        on_it = self._objects[index]
        return BoxedImage(self._pictures[index], on_it.boxes, on_it.labels)


@final
class BoxTransform:
    """Into a square: as it is, or augmented."""

    def __init__(self, size: int, augment: DetectionAugment) -> None:
        self._size = size
        self._augment = augment

    def __call__(self, source: BoxedPictures, key: Key) -> Sample:
        placed = source.placed.of(key.sample)
        if key.epoch == AS_IT_IS:
            image = self._letterboxed(source[key.sample], placed)
            return Sample(image, torch.eye(3), key.sample, placed)
        draws = BoxDraws.drawn()
        near = neighbours(source.stream, key.sample, len(source))
        tiles = self._augment.tiles(draws, key.sample, near, key.progress)
        image = self._augment.apply([source[tile] for tile in tiles], draws, self._size)
        return Sample(image, self._augment.colours(draws), key.sample, placed)

    def _letterboxed(self, scaled_image: BoxedImage, placed: Letterbox) -> BoxedImage:
        boxes = scaled_image.boxes + placed.corner.repeat(2)
        return scaled_image._replace(pixels=in_square(scaled_image.pixels, placed, self._size), boxes=boxes)


def _to_learn(objects: Sequence[Objects], placed: Letterbox) -> PackedObjects:
    """Boxes at the size that pictures are trained at; crowds are left out."""
    scaled = placed._replace(corner=torch.zeros_like(placed.corner))
    kept = []
    for i, on_it in enumerate(objects):
        single = ~on_it.crowd
        boxes, labels = scaled.of(i).there(on_it.boxes[single]), on_it.labels[single]
        kept.append(Objects(boxes, labels, on_it.crowd[single]))
    return PackedObjects.of(kept)
