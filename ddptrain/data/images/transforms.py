"""Training images varied one at a time, on the CPU: by torchvision.transforms.v2, or by modules of one's own.

Pixels are uint8 throughout: the engine normalises, on the device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from ddptrain.data.images.mixing import Mix, mixed_pixels, soft_target
from ddptrain.data.images.source import LabelledImage, Split
from ddptrain.data.pictures import Box
from ddptrain.data.pipeline import Samples
from ddptrain.data.stream.samples import StreamSamples, neighbours
from ddptrain.data.workers import Key
from ddptrain.errors import UserError


@final
@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A rectangle of a random area and form, as torchvision's class of that name draws it (Szegedy et al.,
    arXiv 1409.4842), cut out of the file as it is decoded and scaled to the set's size.

    scale: least and most share of the picture's area, in (0, 1]. ratio: least and most width / height, above
    0.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        _check_range("scale", self.scale, most=1.0)
        _check_range("ratio", self.ratio)

    def box(self, height: int, width: int) -> Box:
        """For a picture of this size."""
        from torchvision.transforms import RandomResizedCrop as Torchvisions

        of_that_size = torch.empty(1, height, width, device="meta")
        top, left, tall, wide = Torchvisions.get_params(of_that_size, list(self.scale), list(self.ratio))
        return Box(top, left, max(tall, 1), max(wide, 1))  # of a picture of one pixel, say, it has none


@final
@dataclass(frozen=True, slots=True)
class Transforms:
    """How training images are varied; None leaves a part out.

    transforms: by names of one's own, in their order; a module takes uint8 (C, H, W) and gives another of
    that type and size, as most of torchvision.transforms.v2 do. resized_crop: comes first, out of the picture
    as it is stored, for files at their full resolution; without, pictures are cut and scaled to the set's
    size. mix: comes last, with another training sample.
    """

    transforms: Mapping[str, nn.Module | None] = field(default_factory=dict)
    resized_crop: RandomResizedCrop | None = None
    mix: Mix | None = None


@final
class ImageTransform:
    """Of a `Split`'s samples, by `Transforms`; the transform of `ddptrain.data.pipeline`."""

    def __init__(self, transforms: Transforms) -> None:
        self._crop = transforms.resized_crop
        self._transforms = [
            (name, module) for name, module in transforms.transforms.items() if module is not None
        ]

    def __call__(self, split: Split, key: Key) -> LabelledImage:
        if self._crop is None:
            image, label = split[key.sample]
            # a copy, also of one channel: a module may write into it
            image = image.permute(2, 0, 1).clone(memory_format=torch.contiguous_format)
        else:
            image, label = split.cropped(key.sample, self._crop.box), split.labels[key.sample]
        for name, module in self._transforms:
            image = _applied(name, module, image)
        return LabelledImage(image.permute(1, 2, 0), label)


def _applied(name: str, module: nn.Module, image: Tensor) -> Tensor:
    out = module(image)
    if isinstance(out, Tensor) and out.dtype == torch.uint8 and out.shape == image.shape:
        return out
    kind = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
    raise UserError(
        f"data.augment: {name} ({type(module).__name__}) made {kind} of uint8 {tuple(image.shape)}; it must"
        " give a picture of the same type and size. The engine normalises."
    )


@final
class MixTransform:
    """Of transformed `Samples`: each with a partner, which is as augmented in its own right.

    A partner costs as much as a sample. A picture of which nothing would be seen is not read.

    seed: of the mixtures. size: (height, width) of the images. labels: of all samples, as `Split.labels`.
    classes: how many. stream: what the images are streamed from, where they are.
    """

    def __init__(
        self,
        mix: Mix,
        seed: int,
        size: tuple[int, int],
        labels: Tensor,
        classes: int,
        stream: StreamSamples | None,
    ) -> None:
        self._mix = mix
        self._seed = seed
        self._size = size
        self._labels = labels
        self._classes = classes
        self._stream = stream

    def __call__(self, samples: Samples, key: Key) -> LabelledImage:
        near = neighbours(self._stream, key.sample, len(samples))
        mixture = self._mix.mixture(self._seed, key.epoch, key.sample, near, *self._size)
        partner = key._replace(sample=mixture.partner)
        if not mixture.shows_partner:
            image = samples.sample(key).image
        elif not mixture.shows_own:
            image = samples.sample(partner).image
        else:
            image = mixed_pixels(samples.sample(key).image, samples.sample(partner).image, mixture)
        both = self._labels[key.sample], self._labels[mixture.partner]
        return LabelledImage(image, soft_target(*both, mixture.share, self._classes))


def _check_range(name: str, pair: Sequence[float], most: float = math.inf) -> None:
    """Raises UserError unless it is a least and a most, both above 0 and at most ``most``."""
    low, high = pair
    if not 0 < low <= high <= most:
        upper = "" if most == math.inf else f", and at most {most:g}"
        raise UserError(
            f"data.augment.resized_crop.{name}=[{low:g},{high:g}]: must be a least and a most value, above"
            f" 0{upper}."
        )
