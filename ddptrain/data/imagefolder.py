"""Any folder of class folders: ``cats/1.jpg``, ``dogs/2.png``, ..."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ddptrain.data.disk import size_and_time
from ddptrain.data.packed import open_packed, pack, packed_folder
from ddptrain.data.pictures import ENDINGS, decoders, fitted, stored
from ddptrain.data.source import ImageSet, ImageSource, Split
from ddptrain.errors import UserError

_VALID_NAMES = ("val", "valid", "validation", "test")


@final
class FolderSplit(Split):
    """Image files, decoded when asked for, cut and scaled to a square as `fitted` does it."""

    def __init__(
        self, files: Sequence[Path], labels: Sequence[int], size: int, resize: int | None = None
    ) -> None:
        self.files = [str(file) for file in files]
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.shape = (size, size, 3)
        self._resize = resize

    def images(self, ids: Tensor) -> Tensor:
        return torch.stack([fitted(Path(self.files[i]), self.shape, self._resize) for i in ids.tolist()])

    def picture(self, i: int) -> Tensor:
        return stored(Path(self.files[i]), self.shape[2])


@final
class ImageFolder(ImageSource):
    """``root/train/<class>/*`` and ``root/val/<class>/*`` (or valid, validation, test). Without the
    second, or with just ``root/<class>/*``, every tenth file of a class (in sorted order) is held out.

    size: side in pixels to which the middle square of every picture is scaled. resize: in evaluation, pixels
    to which the short side is scaled, before the middle ``size`` pixels are cut out; None for ``size``, and
    to cut first. cache: folder in which the decoded, scaled pictures are kept, size * size * 3 bytes each,
    for the epochs and runs to come; None to decode them whenever they are asked for. The pixels are the same.
    """

    name = "imagefolder"

    def __init__(self, size: int = 224, cache: str | None = None, resize: int | None = None) -> None:
        if size < 1:
            raise UserError(f"data.source.size={size}: must be 1 pixel or more.")
        if resize is not None and resize < size:
            raise UserError(
                f"data.source.resize={resize}: must be data.source.size={size} or more, out of which that is"
                " cut, or null."
            )
        if cache is not None and not cache.strip():
            raise UserError(
                "data.source.cache=: must name a folder; it is empty, as of a shell variable that isn't set."
                " Use data.source.cache=null to do without."
            )
        self._size = size
        self._resize = resize
        self._cache = None if cache is None else Path(cache)

    def fetch(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(f"data.root={root}: there is no such folder. Name one that holds class folders.")
        if self._cache is not None:
            if self._cache.resolve().is_relative_to(root.resolve()):
                raise UserError(
                    f"data.source.cache={self._cache}: lies in data.root, whose folders are classes. Name"
                    " another folder."
                )
            listed = self._image_set(root)
            about = {"root": str(root.resolve()), "size": self._size, "resize": self._resize}
            parts = {"train": listed.train, "valid": listed.valid}
            pack(self._packed(root, self._cache, listed), parts, about)

    def open(self, root: Path) -> ImageSet:
        listed = self._image_set(root)
        if self._cache is None:
            return listed
        folder = self._packed(root, self._cache, listed)
        train, valid = open_packed(folder, "train", listed.train), open_packed(folder, "valid", listed.valid)
        return replace(listed, train=train, valid=valid)

    def _packed(self, root: Path, cache: Path, listed: ImageSet) -> Path:
        """The pixels' folder, by all that they follow from: files are known by names, sizes and times,
        because reading them would take as long as decoding them."""
        files = [
            [(os.path.relpath(file, root), *size_and_time(Path(file))) for file in part.files]
            for part in (listed.train, listed.valid)
            if isinstance(part, FolderSplit)
        ]
        # a folder that was packed before there was resize keeps its name
        size = self._size if self._resize is None else [self._size, self._resize]
        return packed_folder(cache, f"{self.name}-{self._size}", [size, decoders(), files])

    def _image_set(self, root: Path) -> ImageSet:
        train_root = root / "train"
        valid_root = next((root / name for name in _VALID_NAMES if (root / name).is_dir()), None)
        if train_root.is_dir() and valid_root is not None:
            train, valid = _files_by_class(train_root), _files_by_class(valid_root)
            unknown = sorted(valid.keys() - train.keys())
            if unknown:
                raise UserError(
                    f"{valid_root}: class {unknown[0]!r} is not in {train_root}. Both need the same classes."
                )
        else:
            found = _files_by_class(train_root if train_root.is_dir() else root)
            train = {name: [f for i, f in enumerate(files) if i % 10 != 9] for name, files in found.items()}
            valid = {name: files[9::10] for name, files in found.items()}
        classes = sorted(train)
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
            train=self._split(train, classes),
            valid=self._split(valid, classes, self._resize),
            classes=classes,
            mean=[123.7, 116.3, 103.5],  # of ImageNet, as in torchvision's weights
            std=[58.4, 57.1, 57.4],
            resize=self._resize,
        )

    def _split(
        self, files: dict[str, list[Path]], classes: list[str], resize: int | None = None
    ) -> FolderSplit:
        listed = [(file, label) for label, name in enumerate(classes) for file in files.get(name, [])]
        return FolderSplit([file for file, _ in listed], [label for _, label in listed], self._size, resize)


def _files_by_class(root: Path) -> dict[str, list[Path]]:
    """The image files of each class folder, sorted, in the same order on every machine."""
    folders = sorted(f for f in root.iterdir() if f.is_dir() and not f.name.startswith("."))
    found = {
        folder.name: sorted(f for f in folder.rglob("*") if f.suffix.lower() in ENDINGS) for folder in folders
    }
    if not any(found.values()):
        raise UserError(
            f"data.root={root}: no image found in its class folders (looked for"
            f" <class>/*{{{','.join(ENDINGS)}}}). Point data.root at a folder of class folders."
        )
    empty = [name for name, files in found.items() if not files]
    if empty:
        raise UserError(f"{root / empty[0]}: this class folder holds no image. Fill or remove it.")
    return found
