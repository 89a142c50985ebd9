"""Any folder of class folders: ``cats/1.jpg``, ``dogs/2.png``, ..."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ddptrain.data import held_out
from ddptrain.data.agreement import check_distinct, check_known
from ddptrain.data.disk import size_and_time
from ddptrain.data.identity import of_file
from ddptrain.data.images.class_folders import parts_of, pictures_by_class, unpacked
from ddptrain.data.images.packed import open_packed, pack, packed_folder
from ddptrain.data.images.source import ImageSet, ImageSource, Split
from ddptrain.data.left_out import HINT, skippable
from ddptrain.data.paths import Paths
from ddptrain.data.pictures import Box, content_of, cropped, decoders, fitted
from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean_path

log = logging.getLogger(__name__)
_HINT_OF_CACHE = HINT.replace("data.on_error=skip", "data.on_error=skip data.source.cache=null")

IMAGENET_MEAN, IMAGENET_STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
"""Of the channels, in 0..255, as torchvision's weights are made for them."""


@final
class FolderSplit(Split):
    """Image files, decoded when asked for, cut and scaled to a square as `fitted` does it."""

    full_size = True

    def __init__(
        self, files: Paths, labels: Tensor, size: int, resize: int | None = None, hint: str = HINT
    ) -> None:
        """labels: as `Split` has them. hint: how to go on without a picture that can't be read."""
        self.files = files
        self.labels = labels
        self.shape = (size, size, 3)
        self._resize = resize
        self._hint = hint

    def images(self, ids: Tensor) -> Tensor:
        with skippable(self._hint):
            return torch.stack([fitted(Path(self.files[i]), self.shape, self._resize) for i in ids.tolist()])

    def cropped(self, i: int, box_of: Callable[[int, int], Box]) -> Tensor:
        with skippable(self._hint):
            return cropped(Path(self.files[i]), self.shape, box_of)

    def encoded(self, i: int) -> bytes:
        return content_of(self.files[i])

    def fingerprints(self, ids: Sequence[int]) -> Iterator[bytes]:
        folder, names = self.files.folder, self.files.names()
        return (of_file(os.path.join(folder, names[i]), names[i], len(ids)) for i in ids)


@final
class ImageFolder(ImageSource):
    """``root/train/<class>/*`` and ``root/val/<class>/*`` (or training; valid, validation, test, testing; in
    capitals or not). Without the second, or with just ``root/<class>/*``, every tenth file of a class (in
    sorted order) is held out. All of it may lie in the only folder of ``root``.

    size: side in pixels to which the middle square of every picture is scaled. resize: in evaluation, pixels
    to which the short side is scaled, before the middle ``size`` pixels are cut out; None for ``size``, and
    to cut first. cache: folder in which the decoded, scaled pictures are kept, size * size * 3 bytes each,
    for the epochs and runs to come; None to decode them whenever they are asked for. The pixels are the same.
    """

    name = "imagefolder"

    def __init__(self, size: int = 224, cache: str | None = None, resize: int | None = None) -> None:
        check_sizes(size, resize)
        if cache is not None and not cache.strip():
            raise UserError(
                "data.source.cache=: must name a folder; it is empty, as of a shell variable that isn't set."
                " Use data.source.cache=null to do without."
            )
        self.size: int = size
        self.resize = resize
        self._cache = None if cache is None else Path(cache)
        self.packed = cache is not None
        self.no_skip = "" if cache is None else "data.source.cache packs all pictures of the folder"

    def fetch(self, root: Path) -> None:
        if not root.is_dir():
            no_folder = f"there is no such folder.{did_you_mean_path(root)}"
            why = "is a file. Unpack it and name the folder." if root.is_file() else no_folder
            raise UserError(f"data.root={root}: {why} Name one that holds class folders.")
        if (folder := unpacked(root)) != root:
            log.info("data       %s is read, the only folder in data.root=%s", folder, root)
        if self._cache is not None:
            if self._cache.resolve().is_relative_to(root.resolve()):
                raise UserError(
                    f"data.source.cache={self._cache}: lies in data.root, whose folders are classes. Name"
                    " another folder."
                )
            listed = self._image_set(root)
            about = {"root": str(root.resolve()), "size": self.size, "resize": self.resize}
            parts = {"train": listed.train, "valid": listed.valid}
            pack(self._packed(root, self._cache, listed), parts, about)

    def open(self, root: Path) -> ImageSet:
        listed = self._image_set(root)
        counts = torch.bincount(listed.valid.labels, minlength=len(listed.classes))
        held_out_so = "every tenth file of a class is held out, unless val/<class>/ has some"
        note_unseen(f"data.root={root}", listed.classes, counts, held_out_so)
        if self._cache is None:
            return listed
        folder = self._packed(root, self._cache, listed)
        train, valid = open_packed(folder, "train", listed.train), open_packed(folder, "valid", listed.valid)
        return replace(listed, train=train, valid=valid, identity=listed.digest())

    def _packed(self, root: Path, cache: Path, listed: ImageSet) -> Path:
        """The pixels' folder, by all that they follow from: files are known by their real folders, names,
        sizes and times, because reading them would take as long as decoding them."""
        parts = [part.files for part in (listed.train, listed.valid) if isinstance(part, FolderSplit)]
        files = [
            [(os.path.relpath(file, root), *size_and_time(Path(file))) for file in part] for part in parts
        ]
        folders = dict.fromkeys(os.path.dirname(file) for part in parts for file in part)
        made_of = [[*map(os.path.realpath, folders)], self.size, self.resize, decoders(), files]
        return packed_folder(cache, f"{self.name}-{self.size}", made_of)

    def _image_set(self, root: Path) -> ImageSet:
        parts = parts_of(unpacked(root))
        train = pictures_by_class(parts.train)
        if parts.valid is None:
            halves = {name: held_out.split(files) for name, files in train.items()}
            train = {name: kept for name, (kept, _) in halves.items()}
            valid = {name: held for name, (_, held) in halves.items()}
        else:
            valid = pictures_by_class(parts.valid)
            check_known(valid, train, str(parts.valid), "the training folder")
        classes = sorted(train)
        check_distinct(classes, str(parts.train))
        if len(classes) < 2:
            raise UserError(
                f"data.root={root}: holds one class, {classes[0]!r}; put a folder beside it for each."
            )
        if not any(valid.values()):
            raise UserError(
                f"data.root={root}: no image is left for validation. Give each class ten files or more,"
                " or put some under val/<class>/."
            )
        return ImageSet(
            train=self._split(parts.train, train, classes),
            valid=self._split(parts.valid or parts.train, valid, classes, self.resize),
            classes=classes,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            resize=self.resize,
            held_out=parts.valid is None,
        )

    def _split(
        self, folder: Path, files: dict[str, list[str]], classes: list[str], resize: int | None = None
    ) -> FolderSplit:
        listed = [files.get(name, []) for name in classes]
        counts = torch.tensor([len(names) for names in listed])
        paths = Paths(folder, chain.from_iterable(listed))
        hint = HINT if self._cache is None else _HINT_OF_CACHE
        labels = torch.arange(len(classes)).repeat_interleave(counts)
        return FolderSplit(paths, labels, self.size, resize, hint)


def check_sizes(size: int, resize: int | None) -> None:
    """Raises UserError where ``data.source.size`` or ``data.source.resize`` make no sense."""
    if size < 1:
        raise UserError(f"data.source.size={size}: must be 1 pixel or more.")
    if resize is not None and resize < size:
        raise UserError(
            f"data.source.resize={resize}: must be data.source.size={size} or more, out of which that is cut,"
            " or null."
        )


def note_unseen(place: str, classes: Sequence[str], counts: Tensor, why: str) -> None:
    """Warn of classes that no validation picture has. counts: (classes,), pictures of each."""
    if unseen := [name for name, count in zip(classes, counts.tolist(), strict=True) if not count]:
        log.warning(
            "note       %s: no picture for validation in %d of %d classes, %s among them: %s",
            *(place, len(unseen), len(classes), unseen[0], why),
        )
