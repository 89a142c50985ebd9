"""Training samples that are varied one at a time, by `Transforms` or by a module of the user's."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddptrain.api.rng import derive_seed
from ddptrain.data.draws import Draws, SampleKey
from ddptrain.data.generators import restored, seed_all
from ddptrain.data.mixing import Mix, mixed_pixels, soft_targets
from ddptrain.data.source import Split
from ddptrain.data.stream.samples import neighbours
from ddptrain.data.transforms import CROP, RandomResizedCrop, Transforms
from ddptrain.data.workers import Key
from ddptrain.errors import UserError

_OWN = 7  # The purpose of a user's module; 0 to 6 are those of Transforms and Mix


@final
class OwnTransform:
    """Any module that takes a picture, uint8 (C, H, W), and gives another one of that type and size.

    What it draws from torch's generator follows from (seed, epoch, sample index). No other generator is
    seeded.
    """

    resized_crop: RandomResizedCrop | None = None
    mix: Mix | None = None

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def apply(self, picture: Tensor, fill: Tensor, key: SampleKey) -> Tensor:
        """As `Transforms.apply`. Raises UserError where the module gives something else than a picture."""
        with restored():
            seed_all(derive_seed(*key, _OWN))
            out = self._module(picture)
        if not isinstance(out, Tensor) or out.dtype != torch.uint8 or out.shape != picture.shape:
            kind = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise UserError(
                f"data.augment: {type(self._module).__name__} made {kind} of uint8"
                f" {tuple(picture.shape)}; it must give a picture of the same type and size. The engine"
                " normalises."
            )
        return out


@final
class TransformedImages(Dataset[Any]):
    """Training samples, made a batch at a time in a worker: uint8 (n, H, W, C), and int64 (n,) labels, or
    soft targets, float32 (n, classes), where samples are mixed.

    A partner costs as much as a sample: it is read and augmented too, as (seed, epoch, its index) say. A
    picture of which nothing would be seen is not read. A broken file is returned as its UserError.
    """

    def __init__(
        self, split: Split, transforms: Transforms | OwnTransform, classes: int, fill: Tensor, seed: int
    ) -> None:
        """fill: uint8 (C,) on the CPU, the set's mean colour."""
        self._split = split
        self._transforms = transforms
        self._classes = classes
        self._fill = fill
        self._seed = seed

    def __len__(self) -> int:
        return len(self._split)

    def __getitems__(self, keys: list[Key]) -> tuple[Tensor, Tensor] | UserError:
        with one_thread():
            try:
                return self._batch(keys)
            except UserError as error:
                return error

    def _batch(self, keys: list[Key]) -> tuple[Tensor, Tensor]:
        labels = self._split.labels[torch.tensor([sample for _, sample, _ in keys])]
        mix = self._transforms.mix
        if mix is None:
            return _stacked([self._one(epoch, sample) for epoch, sample, _ in keys]), labels
        height, width, _ = self._split.shape
        images, partners, shares = [], [], []
        for epoch, sample, _ in keys:
            near = neighbours(self._split.stream, sample, len(self))
            mixture = mix.params((self._seed, epoch, sample), near, height, width)
            if not mixture.shows_partner:
                image = self._one(epoch, sample)
            elif not mixture.shows_own:
                image = self._one(epoch, mixture.partner)
            else:
                image = mixed_pixels(self._one(epoch, sample), self._one(epoch, mixture.partner), mixture)
            images.append(image)
            partners.append(mixture.partner)
            shares.append(mixture.share)
        others = self._split.labels[torch.tensor(partners)]
        return _stacked(images), soft_targets(labels, others, torch.tensor(shares), self._classes)

    def _one(self, epoch: int, sample: int) -> Tensor:
        """uint8 (C, H, W): the sample as it is augmented in that epoch, not mixed."""
        key = (self._seed, epoch, sample)
        crop = self._transforms.resized_crop
        if crop is None:
            image = self._split.images(torch.tensor([sample]))[0].permute(2, 0, 1).contiguous()
        else:
            image = self._split.cropped(sample, partial(crop.params, Draws(*key, CROP)))
        return self._transforms.apply(image, self._fill, key)


def _stacked(images: list[Tensor]) -> Tensor:
    """(C, H, W) each -> (n, H, W, C), contiguous."""
    return torch.stack([image.permute(1, 2, 0) for image in images])


@contextmanager
def one_thread() -> Iterator[None]:
    """A sum over a picture (contrast's mean) is rounded otherwise by another number of threads: a worker has
    one, the trainer's own process all of its cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
