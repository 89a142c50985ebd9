"""The samples of a part of a set: which pictures make one, and what is done to them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from ddptrain.api.sampler import Sampler
from ddptrain.data.detection.augment import Augment, Draws, Seen
from ddptrain.data.detection.batch import Batch, stacked
from ddptrain.data.detection.letterbox import GREY, Letterbox, letterbox
from ddptrain.data.detection.pictures import DecodedPictures, ResidentPictures
from ddptrain.data.detection.source import Objects, PackedObjects, Scenes
from ddptrain.errors import UserError

Key = tuple[int, int, float]
"""(epoch, sample index, progress); epoch -1 asks for the picture as it is."""
AS_IT_IS = -1


class Samples(Dataset[Any]):
    """A part of the set, read a batch at a time, here or in a worker."""

    def __init__(self, scenes: Scenes, side: int, augment: Augment, seed: int, resident: bool) -> None:
        self._placed = letterbox(scenes.sizes, side)
        self._pictures = (ResidentPictures if resident else DecodedPictures)(scenes, side)
        self._objects = _to_learn(scenes.objects, self._placed)
        self._side = side
        self._augment = augment
        self._seed = seed

    def __len__(self) -> int:
        return len(self._objects)

    def __getitems__(self, keys: list[Key]) -> Batch | UserError:
        epochs, ids, _ = map(torch.tensor, zip(*keys, strict=True))
        draws = Draws(self._seed, epochs, ids)
        placed = self._placed.of(ids)
        try:
            if keys[0][0] == AS_IT_IS:
                plain = torch.eye(3).repeat(len(keys), 1, 1)  # an expanded one can't be pinned
                return stacked([self._letterboxed(i) for _, i, _ in keys], plain, ids, placed)
            samples = [self._augmented(draws, i, key) for i, key in enumerate(keys)]
        except UserError as error:
            return error
        return stacked(samples, self._augment.colours(draws), ids, placed)

    def _augmented(self, draws: Draws, i: int, key: Key) -> Seen:
        _, sample, progress = key
        tiles = self._augment.tiles(draws, i, sample, len(self), progress)
        return self._augment.apply([self._scaled(tile) for tile in tiles], draws, i, self._side)

    def _scaled(self, i: int) -> Seen:
        """A picture at the size it is trained at, not yet in its square."""
        on_it = self._objects[i]
        return Seen(self._pictures[i], on_it.boxes, on_it.labels)

    def _letterboxed(self, i: int) -> Seen:
        seen = self._scaled(i)
        left, top = self._placed.corner[i].long().tolist()
        square = torch.full((3, self._side, self._side), GREY, dtype=torch.uint8)
        square[:, top : top + seen.pixels.shape[1], left : left + seen.pixels.shape[2]] = seen.pixels
        return seen._replace(pixels=square, boxes=seen.boxes + torch.tensor([left, top, left, top]))


def _to_learn(objects: Sequence[Objects], placed: Letterbox) -> PackedObjects:
    """Boxes at the size that pictures are trained at; crowds are left out."""
    scaled = placed._replace(corner=torch.zeros_like(placed.corner))
    kept = []
    for i, on_it in enumerate(objects):
        single = ~on_it.crowd
        boxes, labels = scaled.of(i).there(on_it.boxes[single]), on_it.labels[single]
        kept.append(Objects(boxes, labels, on_it.crowd[single]))
    return PackedObjects.of(kept)


class Keys:
    """A batch sampler over the whole run, so that workers are started once, not every epoch."""

    def __init__(self, sampler: Sampler, steps: range) -> None:
        self._sampler = sampler
        self._steps = steps

    def __iter__(self) -> Iterator[list[Key]]:
        per_step = len(self._sampler.micro_sizes)
        for i, (ids, epochs) in enumerate(self._sampler.samples(self._steps, torch.device("cpu"))):
            progress = (self._steps.start + i // per_step) / self._steps.stop
            yield [
                (epoch, sample, progress) for epoch, sample in zip(epochs.tolist(), ids.tolist(), strict=True)
            ]

    def __len__(self) -> int:
        return len(self._steps) * len(self._sampler.micro_sizes)
