"""Pictures with boxes as `ddptrain.data.pipeline` has them: source and transform."""

from collections.abc import Sequence
from itertools import compress
from typing import final

import torch
from torch import Tensor

from ddptrain.data.detection.augment import BoxDraws, BoxedImage, DetectionAugment
from ddptrain.data.detection.batch import Sample
from ddptrain.data.detection.letterbox import Letterbox, Shape, canvases, fitted, in_canvas, letterbox
from ddptrain.data.detection.run_lengths import decode_masks
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
    """Pictures at the size they are trained at, not yet on their canvases, with their boxes: the source of
    `ddptrain.data.pipeline`. resident: as `ScaledPictures` has it. shape: of an evaluation's canvases.
    masks: with the objects' masks, where the set has some; they are decoded whenever they are asked for."""

    def __init__(self, scenes: Scenes, size: int, resident: bool, shape: Shape, masks: bool) -> None:
        self.canvases = canvases(scenes.sizes, size, shape)
        self.placed = letterbox(scenes.sizes, size, self.canvases)
        self.stream = scenes.stream
        self._sizes = scenes.sizes
        self._pictures = ScaledPictures(scenes, size, resident)
        self._objects = _to_learn(scenes.objects, self.placed, masks)

    def __len__(self) -> int:
        return len(self._objects)

    def __getitem__(self, index: int) -> BoxedImage:
        on_it, pixels = self._objects[index], self._pictures[index]
        masks = None
        if on_it.masks is not None:
            size = self._sizes[index].tolist()
            masks = torch.zeros(len(on_it), *pixels.shape[1:], dtype=torch.uint8)
            for own, mask in zip(masks, on_it.masks, strict=True):  # a large picture's would fill the memory
                own.copy_(_scaled(decode_masks([mask], *size), pixels.shape[1:])[0])
        return BoxedImage(pixels, on_it.boxes, on_it.labels, masks)


@final
class BoxTransform:
    """As it is onto its canvas, or augmented into a square."""

    def __init__(self, size: int, augment: DetectionAugment) -> None:
        self._size = size
        self._augment = augment

    def __call__(self, source: BoxedPictures, key: Key) -> Sample:
        placed = source.placed.of(key.sample)
        if key.epoch == AS_IT_IS:
            image = _letterboxed(source[key.sample], placed, source.canvases[key.sample])
            return Sample(image, torch.eye(3), key.sample, placed)
        draws = BoxDraws.draw()
        near = neighbours(source.stream, key.sample, len(source))
        tiles = self._augment.tiles(draws, key.sample, near, key.progress)
        image = self._augment.apply([source[tile] for tile in tiles], draws, self._size)
        partner = self._augment.partner(draws, near, key.progress)
        if partner is not None:
            other = self._augment.apply([source[partner]], BoxDraws.draw(), self._size)
            image = self._augment.combined(image, other, draws)
        return Sample(image, self._augment.colours(draws), key.sample, placed)


def _scaled(masks: Tensor, size: Sequence[int]) -> Tensor:
    """uint8 (k, h, w) of 0 and 1 -> the same of another height and width."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    scaled: Tensor = functional.resize(masks, list(size), InterpolationMode.NEAREST_EXACT)
    return scaled


def _letterboxed(scaled_image: BoxedImage, placed: Letterbox, canvas: Tensor) -> BoxedImage:
    boxes = scaled_image.boxes + placed.corner.repeat(2)
    pixels = in_canvas(scaled_image.pixels, placed, canvas)
    return BoxedImage(pixels, boxes, scaled_image.labels)  # masks are compared at the picture's own size


def _to_learn(objects: Sequence[Objects], placed: Letterbox, masks: bool) -> PackedObjects:
    """Boxes at the size that pictures are trained at, and masks at their own; crowds are left out."""
    scaled = placed._replace(corner=torch.zeros_like(placed.corner))
    kept = []
    for i, on_it in enumerate(objects):
        single = ~on_it.crowd
        boxes, labels = scaled.of(i).there(on_it.boxes[single]), on_it.labels[single]
        of_single = [*compress(on_it.masks, single.tolist())] if masks and on_it.masks is not None else None
        kept.append(Objects(boxes, labels, on_it.crowd[single], of_single))
    return PackedObjects.of(kept)
