"""A part of a set at the size it is trained at, decoded once or each time."""

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from ddptrain.data.detection.letterbox import fitted
from ddptrain.data.detection.source import Scenes


class Pictures(ABC):
    """Pictures scaled so that their longer side is ``side``; uint8 (3, h, w)."""

    @abstractmethod
    def __getitem__(self, i: int) -> Tensor: ...


@final
class DecodedPictures(Pictures):
    """Read and scaled whenever asked for."""

    def __init__(self, scenes: Scenes, side: int) -> None:
        self._scenes = scenes
        self._sizes = fitted(scenes.sizes, side)

    def __getitem__(self, i: int) -> Tensor:
        from torchvision.transforms.v2 import functional

        picture = self._scenes.image(i)
        size = self._sizes[i].tolist()
        return picture if list(picture.shape[1:]) == size else functional.resize(picture, size)


@final
class ResidentPictures(Pictures):
    """All in one piece of memory, which loader processes share."""

    def __init__(self, scenes: Scenes, side: int) -> None:
        decoded = DecodedPictures(scenes, side)
        self._sizes = fitted(scenes.sizes, side)
        self._ends = (3 * self._sizes.prod(1)).cumsum(0)
        self._bytes = torch.empty(pooled_bytes(scenes, side), dtype=torch.uint8)
        for i in range(len(scenes)):
            self[i].copy_(decoded[i])

    def __getitem__(self, i: int) -> Tensor:
        height, width = self._sizes[i].tolist()
        end = int(self._ends[i])
        return self._bytes[end - 3 * height * width : end].view(3, height, width)


def pooled_bytes(scenes: Scenes, side: int) -> int:
    """What `ResidentPictures` would take."""
    return int(3 * fitted(scenes.sizes, side).prod(1).sum())
