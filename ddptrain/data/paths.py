"""File names that loader processes share."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import final

import torch


@final
class Paths:
    """Files of one folder, their names as bytes one after the other. torch puts a tensor that it sends to
    loader processes into memory that they share; a list would be copied to each of them, name by name.
    """

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        """names: relative to the folder."""
        encoded = [os.fsencode(name) for name in names]
        self.folder = str(folder)
        self._bytes = torch.frombuffer(bytearray(b"".join(encoded)) or bytearray(1), dtype=torch.uint8)
        lengths = torch.tensor([len(name) for name in encoded], dtype=torch.int64)
        self._ends = lengths.cumsum(0)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> str:
        """The i-th file, its folder before its name; i from 0."""
        begin = int(self._ends[i - 1]) if i else 0
        name = self._bytes[begin : int(self._ends[i])].numpy().tobytes()
        return os.path.join(self.folder, os.fsdecode(name))

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def names(self) -> list[str]:
        """All of them, relative to the folder; one by one they take ten times as long."""
        whole, begin, paths = self._bytes.numpy().tobytes(), 0, []
        for end in self._ends.tolist():
            paths.append(os.fsdecode(whole[begin:end]))
            begin = end
        return paths
