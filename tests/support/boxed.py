"""Pictures with boxes in memory, and what was found on them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddptrain.data.detection.source import ArrayScenes, Objects

CLASSES = ("cat", "dog", "owl")
WIDTH, HEIGHT = 90, 50
Row = tuple[list[float], int, bool]
Found = tuple[int, list[float], float, int]


def scenes_of(pictures: Sequence[Sequence[Row]]) -> ArrayScenes:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (len(pictures), 3, HEIGHT, WIDTH), generator=generator).to(torch.uint8)
    objects = [
        Objects(
            torch.tensor([box for box, _, _ in rows]).view(-1, 4),
            torch.tensor([label for _, label, _ in rows], dtype=torch.int64),
            torch.tensor([crowd for _, _, crowd in rows], dtype=torch.bool),
        )
        for rows in pictures
    ]
    return ArrayScenes(images, objects, [f"{i}" for i in range(len(pictures))])


def found_of(found: Sequence[Found]) -> Tensor:
    return torch.tensor([[i, *box, score, label] for i, box, score, label in found]).view(-1, 7)
