"""Labelled pictures of a streamed set."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ddptrain.data.agreement import Relabelling, check_renamed
from ddptrain.data.images.folder import IMAGENET_MEAN, IMAGENET_STD, check_sizes
from ddptrain.data.images.source import ImageSet, ImageSource, Split
from ddptrain.data.pictures import Box, cropped, fitted
from ddptrain.data.stream.manifest import PICTURE
from ddptrain.data.stream.opened import Column, Streamed
from ddptrain.data.stream.samples import StreamSamples
from ddptrain.errors import UserError


@final
class StreamSplit(Split):
    """Pictures as their files have them, decoded when asked for, cut and scaled to a square as `fitted` does
    it."""

    full_size = True

    def __init__(
        self, samples: StreamSamples, labels: Column, shape: tuple[int, int, int], resize: int | None = None,
        relabel: Relabelling | None = None,
    ) -> None:  # fmt: skip
        """labels: as `Split` has them, once ``relabel`` has changed them."""
        self.stream: StreamSamples = samples
        self.labels = labels.read() if relabel is None else relabel(labels.read())
        self._relabel = relabel
        self.shape = shape
        self._column = labels
        self._resize = resize
        self._picture = next(name for name in samples.fields if name in PICTURE)

    def __reduce__(self) -> tuple[object, ...]:
        """A loader's worker reads the labels itself."""
        return StreamSplit, (self.stream, self._column, self.shape, self._resize, self._relabel)

    def images(self, ids: Tensor) -> Tensor:
        make = partial(fitted, shape=self.shape, resize=self._resize)
        return torch.stack(self.stream.decode(ids.tolist(), [self._picture], make))

    def cropped(self, i: int, box_of: Callable[[int, int], Box]) -> Tensor:
        make = partial(cropped, shape=self.shape, box_of=box_of)
        return self.stream.decode([i], [self._picture], make)[0]

    def encoded(self, i: int) -> bytes:
        ((content,),) = self.stream.read([i], [self._picture])
        return content


@final
class StreamImages(ImageSource):
    """Labelled pictures that lie in a bucket, on a web server or in a folder, in blocks.

    url, valid_url, cache, cache_gb, shuffle_blocks, retry_s: as `Streamed` has them. classes: their names, or
    how many there are; None where the set's manifest names them. size, resize: as `ImageFolder` has them.
    """

    name = "stream"
    no_skip = Streamed.no_skip

    def __init__(
        self,
        url: str | None = None,
        valid_url: str | None = None,
        classes: list[str] | int | None = None,
        size: int = 224,
        resize: int | None = None,
        cache: str | None = "data/stream",
        cache_gb: float = 50.0,
        shuffle_blocks: int = 16,
        retry_s: float = 120.0,
    ) -> None:
        check_sizes(size, resize)
        self._streamed = Streamed(url, valid_url, cache, cache_gb, shuffle_blocks, retry_s)
        self._classes = classes
        self.size: int = size
        self.resize = resize

    def fetch(self, root: Path) -> None:
        self._streamed.fetch()

    def open(self, root: Path) -> ImageSet:
        opened = self._streamed.open("classes", "")
        about = opened.about
        shape = (self.size, self.size, int(about.get("channels", 3)))
        # classes=[...] may be other words for those that the manifest names
        configured = [] if isinstance(self._classes, int) else self._classes or []
        relabel = self._streamed.relabelling(opened, about.get("classes") or configured)
        train, valid = (
            StreamSplit(part.samples, part.columns["labels"], shape, resize, relabel)
            for part, resize, relabel in ((opened.train, None, None), (opened.valid, self.resize, relabel))
        )
        if train.labels.ndim != valid.labels.ndim:
            raise UserError(
                "data.source.valid_url: pictures have one class each in one of this set and that of"
                " data.source.url, and any number in the other. Both must be of one kind."
            )
        classes = self._names(about.get("classes"), train.labels, valid.labels)
        mean, std = about.get("mean", IMAGENET_MEAN), about.get("std", IMAGENET_STD)
        return ImageSet(
            train, valid, classes, mean, std, self.resize,
            epoch_order=opened.train.samples.blocks, identity=opened.identity,
        )  # fmt: skip

    def _names(self, noted: list[str] | None, *labels: Tensor) -> list[str]:
        configured = self._classes
        if isinstance(configured, list):
            check_renamed(configured, noted or [], "data.source.classes")
        named = noted if configured is None else configured
        if isinstance(named, int):
            named = list(map(str, range(named)))
        if named is None:
            raise UserError(
                "data.source.classes: the set's index names none; give their names or their number."
            )
        for part in labels:
            if part.ndim == 1 and len(part) and not 0 <= int(part.min()) <= int(part.max()) < len(named):
                raise UserError(
                    f"data.source.classes: has {len(named)}, and the set's labels are {int(part.min())} to"
                    f" {int(part.max())}. Give their number or all names."
                )
            if part.ndim == 2 and part.shape[1] != len(named):
                raise UserError(
                    f"data.source.classes: has {len(named)}, and the set's labels are of {part.shape[1]}."
                    " Give their number or all names."
                )
        return list(named)
