"""Real handwritten digits: the 1,797 8x8 images that scikit-learn carries (UCI optdigits)."""

from importlib.util import find_spec
from pathlib import Path
from typing import final

import numpy as np
import torch

from ddptrain.data.images.source import ArraySplit, ImageSet, ImageSource
from ddptrain.errors import UserError


@final
class Digits(ImageSource):
    """Grey 8x8 digits; every fifth sample is held out for validation (359 of 1,797)."""

    name = "digits"

    def fetch(self, root: Path) -> None:
        """Nothing to fetch: the set is part of scikit-learn."""

    def open(self, root: Path) -> ImageSet:
        package = find_spec("sklearn")
        if package is None or package.origin is None:
            raise UserError(
                "data=digits: these digits come with scikit-learn, which is not installed."
                " pip install scikit-learn, or use data=shapes, which needs nothing."
            )
        # the file alone: to import the package takes a second and more
        rows = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
        # pixels are 0..16 in steps of one; 255 / 16 brings them to the full range of uint8
        images = (torch.tensor(rows[:, :-1]).view(-1, 8, 8, 1) * (255 / 16)).round().to(torch.uint8)
        held_out = torch.arange(len(images)) % 5 == 4
        targets = torch.tensor(rows[:, -1], dtype=torch.int64)
        return ImageSet(
            train=ArraySplit(images[~held_out], targets[~held_out]),
            valid=ArraySplit(images[held_out], targets[held_out]),
            classes=[str(digit) for digit in range(10)],
            mean=[78.0],
            std=[96.0],
        )
