"""TrivialAugment and RandAugment: operations drawn from a list, with torchvision's kernels and magnitudes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ddptrain.data.draws import Draws
from ddptrain.errors import UserError

BINS = 31
"""Steps of a magnitude, as in the papers."""
OPERATIONS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color"),
    *("Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
)
_SIGNED = OPERATIONS[1:10]
_COLOURS = ("Brightness", "Color", "Contrast", "Sharpness")


class Operation(NamedTuple):
    """What is done to one picture."""

    name: str
    magnitude: float
    """A shear's tangent, pixels, degrees, what is added to a factor of 1, bits, or a share of white; 0 where
    there is none."""


@dataclass(frozen=True, slots=True)
class TrivialAugmentWide:
    """One operation with any magnitude (Mueller, Hutter, arXiv 2103.10158)."""

    def params(self, draws: Draws, height: int, width: int) -> list[Operation]:
        name = OPERATIONS[draws.below(len(OPERATIONS))]
        most = {"Rotate": 135.0, "TranslateX": 32.0, "TranslateY": 32.0, "Posterize": 6.0}.get(name, 0.99)
        return [_operation(draws, name, draws.below(BINS), most)]

    def apply(self, image: Tensor, operations: Sequence[Operation], fill: Tensor) -> Tensor:
        """uint8 (C, H, W), C 1 or 3; fill: uint8 (C,)."""
        return applied(image, operations, fill)


@dataclass(frozen=True, slots=True)
class RandAugment:
    """n operations of one magnitude, one after the other (Cubuk et al., arXiv 1909.13719).

    n: 1 or more. magnitude: from 0 to 30.
    """

    n: int = 2
    magnitude: int = 9

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UserError(f"data.augment.policy.n={self.n}: must be 1 operation or more.")
        if not 0 <= self.magnitude < BINS:
            raise UserError(f"data.augment.policy.magnitude={self.magnitude}: must be from 0 to {BINS - 1}.")

    def params(self, draws: Draws, height: int, width: int) -> list[Operation]:
        farthest = {"TranslateX": 150 / 331 * width, "TranslateY": 150 / 331 * height}
        most = {**farthest, "ShearX": 0.3, "ShearY": 0.3, "Rotate": 30.0, "Posterize": 4.0}
        names = [OPERATIONS[draws.below(len(OPERATIONS))] for _ in range(self.n)]
        return [_operation(draws, name, self.magnitude, most.get(name, 0.9)) for name in names]

    def apply(self, image: Tensor, operations: Sequence[Operation], fill: Tensor) -> Tensor:
        """uint8 (C, H, W), C 1 or 3; fill: uint8 (C,)."""
        return applied(image, operations, fill)


def _operation(draws: Draws, name: str, step: int, most: float) -> Operation:
    """With the magnitude at a step of 0 to 30, of either sign where that has a meaning."""
    share = step / (BINS - 1)
    if name in _SIGNED:
        return Operation(name, most * share * (1 if draws.below(2) else -1))
    if name == "Posterize":
        return Operation(name, 8 - round(most * share))
    return Operation(name, 1 - share if name == "Solarize" else 0.0)


def applied(image: Tensor, operations: Sequence[Operation], fill: Tensor) -> Tensor:
    """The operations one after the other; uint8 (C, H, W). What comes in from outside has colour ``fill``.

    Bilinear, as torchvision's training script has it; its classes' default is the nearest pixel.
    """
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as f

    outside = {"interpolation": InterpolationMode.BILINEAR, "fill": fill.tolist()}
    colours = dict(
        zip(
            _COLOURS,
            (f.adjust_brightness, f.adjust_saturation, f.adjust_contrast, f.adjust_sharpness),
            strict=True,
        )
    )
    for name, magnitude in operations:
        if name in ("ShearX", "ShearY"):
            slant = math.degrees(math.atan(magnitude))
            shear = [slant, 0.0] if name == "ShearX" else [0.0, slant]
            image = f.affine(image, 0.0, [0, 0], 1.0, shear, center=[0, 0], **outside)
        elif name in ("TranslateX", "TranslateY"):
            shift = [int(magnitude), 0] if name == "TranslateX" else [0, int(magnitude)]
            image = f.affine(image, 0.0, shift, 1.0, [0.0, 0.0], **outside)
        elif name == "Rotate":
            image = f.rotate(image, magnitude, **outside)
        elif name in colours:
            image = colours[name](image, 1 + magnitude)
        elif name == "Posterize":
            image = f.posterize(image, int(magnitude))
        elif name == "Solarize":
            image = f.solarize(image, 255 * magnitude)
        elif name == "AutoContrast":
            image = f.autocontrast(image)
        elif name == "Equalize":
            image = f.equalize(image)
    return image
